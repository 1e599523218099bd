"""The CIFAR loaders, on small synthetic copies in the official layouts, and on the real CIFAR-10 if it is there."""

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lipflow.data import DataError, load
from lipflow.data.cifar import CIFAR10, CIFAR100, fetch
from tests.data.cifar_copies import ask, assert_is_the_content, contents, write_archive, write_folder

REAL = Path(os.environ.get("LIPFLOW_DATA", "data"))
needs_real_data = pytest.mark.skipif(
    not (REAL / "cifar-10-batches-bin").is_dir(),
    reason=f"no CIFAR-10 in {REAL.resolve()}; set LIPFLOW_DATA to a folder with cifar-10-batches-bin",
)


@pytest.mark.parametrize(("official", "classes"), [(CIFAR10, 10), (CIFAR100, 100)], ids=["cifar10", "cifar100"])
def test_layouts_have_the_official_sizes(official, classes):
    assert official.record_bytes == 3072 + (1 if classes == 10 else 2)
    assert (sum(official.train.values()), sum(official.test.values())) == (50000, 10000)
    assert len(set(official.class_names)) == classes
    assert list(official.class_names) == sorted(official.class_names)
    assert official.archive == f"cifar-{classes}-binary.tar.gz"
    assert official.sha256.keys() == official.files.keys()


def test_load_reads_a_folder_or_an_archive(layout, tmp_path):
    write_folder(layout, tmp_path / "parent" / layout.folder)
    write_folder(layout, tmp_path / "renamed")
    (tmp_path / "packed").mkdir()
    archive = write_archive(layout, tmp_path / "packed" / layout.archive)
    for data_dir in ("parent", "renamed", "packed"):
        assert_is_the_content(ask(layout, tmp_path / data_dir), layout)
    assert list((tmp_path / "packed").iterdir()) == [archive]  # not extracted
    assert fetch(layout, tmp_path / "packed") == archive
    with pytest.raises(DataError, match="images are 32×32 and are not resized; got image_size=64"):
        load(layout.name, tmp_path / "parent", image_size=64)
    with pytest.raises(DataError, match=r"bytes, not \d{8}"):
        load(layout.name, tmp_path / "parent")  # of the official counts


def test_load_holds_out_training_images_for_validation(layout, tmp_path):
    write_folder(layout, tmp_path / layout.folder)
    whole, parts = ask(layout, tmp_path), ask(layout, tmp_path, validation=50)
    assert (len(parts.train), len(parts.validation)) == (len(whole.train) - 50, 50)
    both = torch.cat([parts.train.images, parts.validation.images]).flatten(1)
    assert torch.equal(both.unique(dim=0), whole.train.images.flatten(1).unique(dim=0))
    assert torch.equal(parts.test.images, whole.test.images)


def test_load_rejects_damaged_folders(layout, tmp_path):
    folder = write_folder(layout, tmp_path / layout.folder)
    name, count = next(iter(layout.test.items()))
    size, whole = count * layout.record_bytes, (folder / name).read_bytes()
    for wrong in (0, size - 1, size - layout.record_bytes, size + layout.record_bytes):
        (folder / name).write_bytes(bytes(wrong))
        with pytest.raises(DataError, match=rf"{name} has {wrong} bytes, not {size} .*lipflow data {layout.name}"):
            ask(layout, tmp_path)
    (folder / name).write_bytes(whole)
    name, classes = next(iter(layout.train)), len(layout.class_names)
    rows = contents(layout)[name]
    rows[7, layout.label_bytes - 1] = classes
    (folder / name).write_bytes(rows.tobytes())
    with pytest.raises(DataError, match=rf"corrupt: record 7 has the label {classes}"):
        ask(layout, tmp_path)
    name = list(layout.train)[-1]
    (folder / name).unlink()
    for data_dir in (tmp_path, folder):
        with pytest.raises(DataError, match=rf"{name} is missing.*not complete.*--data-dir"):
            ask(layout, data_dir)


def test_load_warns_of_a_changed_pixel(layout, tmp_path):
    folder = write_folder(layout, tmp_path / layout.folder)
    name = next(iter(layout.train))
    official = replace(layout, sha256={name: hashlib.sha256((folder / name).read_bytes()).hexdigest()})
    assert_is_the_content(ask(official, tmp_path), layout)
    rows = contents(layout)[name]
    rows[3, 100] ^= 1
    (folder / name).write_bytes(rows.tobytes())
    with pytest.warns(UserWarning, match=rf"{name} .* differs from the official"):
        ask(official, tmp_path)


def test_load_rejects_an_empty_data_dir(layout, tmp_path, monkeypatch):
    words = f"no {layout.title} in .*{layout.folder}/ nor .*; run `lipflow data {layout.name}`"
    with pytest.raises(DataError, match=words):
        ask(layout, tmp_path)
    monkeypatch.setenv("LIPFLOW_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"no {layout.title} in"):
        load(layout.name, download=False)


def test_load_rejects_damaged_archives(layout, tmp_path):
    archive = write_archive(layout, tmp_path / layout.archive)
    content = archive.read_bytes()
    checksum = bytes([*content[:-8], content[-8] ^ 1, *content[-7:]])  # in gzip's trailer, which tar alone never reads
    truncated = [content[: int(part * len(content))] for part in (0.0, 0.1, 0.5, 0.99)]
    for damaged in (*truncated, checksum, gzip.compress(b"not a tar archive" * 100), b"<html>404</html>"):
        archive.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{layout.archive} .*(truncated or corrupt|lacks).*lipflow data"):
            ask(layout, tmp_path)
    last = list(layout.files)[-1]
    write_archive(layout, archive, leave_out=last)
    with pytest.raises(DataError, match=f"lacks {layout.folder}/{last}"):
        ask(layout, tmp_path)
    name = next(iter(layout.test))
    for size, kind in ((5, tarfile.REGTYPE), (0, tarfile.SYMTYPE)):
        with tarfile.open(tmp_path / layout.archive, "w:gz") as tar:
            member = tarfile.TarInfo(f"{layout.folder}/{name}")
            member.size, member.type, member.linkname = size, kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO(bytes(size)))
        with pytest.raises(DataError, match=rf"{name} in .* has 5 bytes|lacks {layout.folder}/"):
            ask(layout, tmp_path)


def test_load_reports_errors_of_the_system(layout, tmp_path, monkeypatch):
    write_archive(layout, tmp_path / layout.archive)
    monkeypatch.setattr("lipflow.data.cifar.gzip.open", Mock(side_effect=PermissionError("Permission denied")))
    with pytest.raises(DataError, match=f"{layout.name} cannot be read: .*Permission denied"):
        load(layout.name, tmp_path)


@needs_real_data
@pytest.mark.filterwarnings("error")  # as for files that are not the official ones
def test_load_of_the_real_cifar10():
    """The published class balance, the usual moments, and the first labels of data_batch_1 and test_batch."""
    real, whole = load("cifar10", REAL), load("cifar10", REAL, validation=0)
    assert [len(split) for split in (real.train, real.validation, real.test)] == [45000, 5000, 10000]
    assert [len(split) for split in (whole.train, whole.validation)] == [50000, 0]
    for split in (real.train, real.validation, real.test):
        assert torch.bincount(split.labels).tolist() == [len(split) // 10] * 10
    assert real.test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert whole.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert [round(value, 4) for value in whole.mean] == [0.4914, 0.4822, 0.4465]
    assert [round(value, 4) for value in whole.std] == [0.247, 0.2435, 0.2616]
