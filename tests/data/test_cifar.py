"""The CIFAR loaders, on small synthetic copies in the official layouts, and on the real CIFAR-10 where there is one."""

import gzip
import hashlib
import io
import os
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lipflow.data import DataError, load
from lipflow.data.cifar import CIFAR10, CIFAR100, Layout, fetch
from tests.data.cifar_copies import SMALL, ask, assert_is_the_content, contents, write_archive, write_folder

REAL = Path(os.environ.get("LIPFLOW_DATA", "data"))
needs_real_data = pytest.mark.skipif(
    not (REAL / "cifar-10-batches-bin").is_dir(),
    reason=f"no CIFAR-10 in {REAL.resolve()}; set LIPFLOW_DATA to a folder with cifar-10-batches-bin",
)


@pytest.fixture(params=SMALL)
def layout(request) -> Layout:
    return SMALL[request.param]


def test_the_official_layouts():
    assert (CIFAR10.record, CIFAR100.record) == (3073, 3074)
    assert (sum(CIFAR10.train.values()), sum(CIFAR10.test.values())) == (50000, 10000)
    assert (sum(CIFAR100.train.values()), sum(CIFAR100.test.values())) == (50000, 10000)
    assert (len(CIFAR10.class_names), len(set(CIFAR100.class_names))) == (10, 100)
    assert list(CIFAR100.class_names) == sorted(CIFAR100.class_names)
    assert (CIFAR10.archive, CIFAR100.archive) == ("cifar-10-binary.tar.gz", "cifar-100-binary.tar.gz")
    assert CIFAR10.sha256.keys() == CIFAR10.files.keys()
    assert CIFAR100.sha256.keys() == CIFAR100.files.keys()


def test_a_folder_is_found_inside_the_data_dir(layout, tmp_path):
    write_folder(layout, tmp_path / layout.folder)
    assert_is_the_content(ask(layout, tmp_path), layout)


def test_the_data_dir_may_be_the_folder_itself(layout, tmp_path):
    assert_is_the_content(ask(layout, write_folder(layout, tmp_path / "renamed")), layout)


def test_an_archive_is_read_in_place(layout, tmp_path):
    write_archive(layout, tmp_path / layout.archive)
    assert_is_the_content(ask(layout, tmp_path), layout)
    assert [path.name for path in tmp_path.iterdir()] == [layout.archive]


def test_fetch_finds_what_is_there(layout, tmp_path):
    archive = write_archive(layout, tmp_path / layout.archive)
    assert fetch(layout, tmp_path) == archive


def test_validation_comes_from_the_training_images(layout, tmp_path):
    write_folder(layout, tmp_path / layout.folder)
    whole, parts = ask(layout, tmp_path), ask(layout, tmp_path, validation=50)
    assert (len(parts.train), len(parts.validation)) == (len(whole.train) - 50, 50)
    assert torch.equal(parts.test.images, whole.test.images)
    both = torch.cat([parts.train.images, parts.validation.images]).flatten(1)
    assert torch.equal(both.unique(dim=0), whole.train.images.flatten(1).unique(dim=0))


def test_a_truncated_file(layout, tmp_path):
    folder = write_folder(layout, tmp_path / layout.folder)
    name, count = next(iter(layout.test.items()))
    size = count * layout.record
    for wrong in (0, size - 1, size - layout.record, size + layout.record):
        (folder / name).write_bytes(bytes(wrong))
        with pytest.raises(DataError, match=rf"{name} has {wrong} bytes, not {size} .*lipflow data {layout.name}"):
            ask(layout, tmp_path)


def test_a_missing_file(layout, tmp_path):
    folder = write_folder(layout, tmp_path / layout.folder)
    name = list(layout.train)[-1]
    (folder / name).unlink()
    for data_dir in (tmp_path, folder):
        with pytest.raises(DataError, match=rf"{name} is missing.*not complete.*--data-dir"):
            ask(layout, data_dir)


def test_a_label_out_of_range(layout, tmp_path):
    folder = write_folder(layout, tmp_path / layout.folder)
    name = next(iter(layout.train))
    rows = contents(layout)[name]
    rows[7, layout.label_bytes - 1] = len(layout.class_names)
    (folder / name).write_bytes(rows.tobytes())
    with pytest.raises(DataError, match=rf"corrupt: record 7 has the label {len(layout.class_names)}"):
        ask(layout, tmp_path)


def test_a_changed_pixel_is_warned_of(layout, tmp_path):
    folder = write_folder(layout, tmp_path / layout.folder)
    name = next(iter(layout.train))
    official = replace(layout, sha256={name: hashlib.sha256((folder / name).read_bytes()).hexdigest()})
    assert_is_the_content(ask(official, tmp_path), layout)
    rows = contents(layout)[name]
    rows[3, 100] ^= 1
    (folder / name).write_bytes(rows.tobytes())
    with pytest.warns(UserWarning, match=rf"{name} of the right size, but not the bytes of the official"):
        ask(official, tmp_path)


def test_an_empty_data_dir(layout, tmp_path):
    with pytest.raises(
        DataError, match=f"no {layout.title} in .*{layout.folder}/ nor .*; run `lipflow data {layout.name}`"
    ):
        ask(layout, tmp_path)


def test_an_empty_cache_without_downloading(layout, tmp_path, monkeypatch):
    monkeypatch.setenv("LIPFLOW_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"no {layout.title} in"):
        load(layout.name, download=False)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_archive(layout, tmp_path, kept):
    archive = write_archive(layout, tmp_path / layout.archive)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=f"{layout.archive} .*(truncated or corrupt|lacks).*lipflow data"):
        ask(layout, tmp_path)


def test_an_archive_that_ends_between_two_files(layout, tmp_path):
    write_archive(layout, tmp_path / layout.archive, leave_out=list(layout.files)[-1])
    with pytest.raises(DataError, match=f"lacks {layout.folder}/{list(layout.files)[-1]}"):
        ask(layout, tmp_path)


def test_a_damaged_archive(layout, tmp_path):
    archive = write_archive(layout, tmp_path / layout.archive)
    content = bytearray(archive.read_bytes())
    content[-8] ^= 1  # the checksum in gzip's trailer, which tar alone never reads
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"truncated or corrupt.*CRC"):
        ask(layout, tmp_path)
    archive.write_bytes(gzip.compress(b"not a tar archive" * 100))
    with pytest.raises(DataError, match="truncated or corrupt"):
        ask(layout, tmp_path)
    archive.write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match="truncated or corrupt"):
        ask(layout, tmp_path)


def test_an_archive_that_may_not_be_read_is_not_called_damaged(layout, tmp_path, monkeypatch):
    write_archive(layout, tmp_path / layout.archive)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lipflow.data.cifar.gzip.open", refuse)
    with pytest.raises(DataError, match=f"{layout.name} cannot be read: .*Permission denied.*{layout.archive}"):
        load(layout.name, tmp_path)


def test_an_archive_with_a_short_member_or_a_link(layout, tmp_path):
    name = next(iter(layout.test))
    for size, kind in ((5, tarfile.REGTYPE), (0, tarfile.SYMTYPE)):
        with tarfile.open(tmp_path / layout.archive, "w:gz") as tar:
            member = tarfile.TarInfo(f"{layout.folder}/{name}")
            member.size, member.type, member.linkname = size, kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO(bytes(size)))
        with pytest.raises(DataError, match=rf"{name} in .* has 5 bytes|lacks {layout.folder}/"):
            ask(layout, tmp_path)


def test_resizing_is_refused(layout, tmp_path):
    with pytest.raises(DataError, match="images are 32×32 and are not resized; got image_size=64"):
        load(layout.name, tmp_path, image_size=64)


def test_the_official_counts_are_asked_of_a_folder(layout, tmp_path):
    write_folder(layout, tmp_path / layout.folder)
    with pytest.raises(DataError, match=r"bytes, not \d{8}"):
        load(layout.name, tmp_path)


@pytest.fixture(scope="module")
def real():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as for files that are not the official ones
        return load("cifar10", REAL)


@needs_real_data
def test_the_real_cifar10(real):
    """The published class balance; the moments everyone uses; the first labels of data_batch_1 and test_batch."""
    assert [len(split) for split in (real.train, real.validation, real.test)] == [45000, 5000, 10000]
    assert torch.bincount(real.train.labels).tolist() == [4500] * 10
    assert torch.bincount(real.validation.labels).tolist() == [500] * 10
    assert torch.bincount(real.test.labels).tolist() == [1000] * 10
    assert real.test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]


@needs_real_data
def test_the_real_moments():
    whole = load("cifar10", REAL, validation=0)
    assert len(whole.train) == 50000
    assert len(whole.validation) == 0
    assert whole.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert [round(value, 4) for value in whole.mean] == [0.4914, 0.4822, 0.4465]
    assert [round(value, 4) for value in whole.std] == [0.247, 0.2435, 0.2616]
