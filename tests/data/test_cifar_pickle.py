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
    """Writes bytes as Python 2 did, which made the official files."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = save_string


def python2_pickle(value: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_pickle_folder(layout: Layout, folder: Path) -> Layout:
    """Write the content as the Python version has it; return the layout with the MD5s of what was written."""
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


def test_the_python_version_is_read_if_it_is_the_published_one(layout, tmp_path):
    published = write_pickle_folder(layout, tmp_path / layout.pickle_folder)
    for data_dir in (tmp_path, tmp_path / layout.pickle_folder):
        assert_is_the_content(ask(published, data_dir), layout)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_another_pickle_is_not_opened(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published = write_pickle_folder(layout, tmp_path / layout.pickle_folder)
    name = next(iter(layout.pickle_test))
    (tmp_path / layout.pickle_folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=rf"{name} is a pickle with MD5 .* not the published .* not opened"):
        ask(published, tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_the_unpickler_refuses_what_is_not_an_array(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=r"asks for .*system"):
        ArrayUnpickler(io.BytesIO(pickle.dumps(Bomb()))).load()
    with pytest.raises(pickle.UnpicklingError, match=r"asks for builtins\.eval"):
        ArrayUnpickler(io.BytesIO(pickle.dumps(eval))).load()
    assert not (tmp_path / "exploded").exists()


def test_a_published_pickle_that_is_no_batch(layout, tmp_path):
    published = write_pickle_folder(layout, tmp_path / layout.pickle_folder)
    name = next(iter(layout.pickle_test))
    path = tmp_path / layout.pickle_folder / name
    for content in (
        b"",
        python2_pickle({}),
        python2_pickle([1]),
        python2_pickle({b"data": 1, layout.pickle_labels: [1]}),
    ):
        path.write_bytes(content)
        forged = replace(published, pickle_test={name: hashlib.md5(content).hexdigest()})
        with pytest.raises(DataError, match=rf"{name} is not a CIFAR batch"):
            ask(forged, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        ask(published, tmp_path)
