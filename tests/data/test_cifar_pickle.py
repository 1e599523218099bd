import hashlib
import io
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from lipflow.data import DataError
from lipflow.data.cifar import Layout
from lipflow.data.cifar_pickle import ArrayUnpickler
from tests.data.cifar_copies import ask, assert_is_the_content, contents


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 did, with which the official files were made."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = save_string


def python2_pickle(value: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_pickle_folder(layout: Layout, folder: Path) -> Layout:
    """Write the content as in the Python version; return the layout with the MD5s of the written files."""
    folder.mkdir()
    rows = contents(layout)
    digests = []
    for binary, python in ((layout.train, layout.pickle_train), (layout.test, layout.pickle_test)):
        written = {}
        for source, name in zip(binary, python, strict=True):
            labels = rows[source][:, layout.label_bytes - 1].tolist()
            batch = {b"data": rows[source][:, layout.label_bytes :], layout.pickle_labels: labels, b"batch_label": b"x"}
            (folder / name).write_bytes(python2_pickle(batch))
            written[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
        digests.append(written)
    return replace(layout, pickle_train=digests[0], pickle_test=digests[1])


@pytest.fixture
def published(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_pickle_folder(layout, tmp_path / layout.pickle_folder)


def test_load_reads_the_published_pickles(published, tmp_path):
    for data_dir in (tmp_path, tmp_path / published.pickle_folder):
        assert_is_the_content(ask(published, data_dir), published)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_load_does_not_open_other_pickles(published, tmp_path):
    name = next(iter(published.pickle_test))
    path = tmp_path / published.pickle_folder / name
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=rf"{name} is a pickle with MD5 .* not the published .* not opened"):
        ask(published, tmp_path)
    assert not (tmp_path / "exploded").exists()
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        ask(published, tmp_path)


@pytest.mark.parametrize("value", [Bomb(), eval])
def test_array_unpickler_rejects_other_names(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=r"asks for .*(system|eval)"):
        ArrayUnpickler(io.BytesIO(pickle.dumps(value))).load()
    assert not (tmp_path / "exploded").exists()
