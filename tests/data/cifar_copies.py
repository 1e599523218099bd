"""Small synthetic copies of CIFAR in the official layouts: the official ones with other record counts."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from lipflow.data import Dataset
from lipflow.data.cifar import CIFAR10, CIFAR100, Layout, load
from lipflow.data.dataset import Request

SMALL = {
    "cifar10": replace(
        CIFAR10,
        train={f"data_batch_{i}.bin": 20 for i in range(1, 6)},
        test={"test_batch.bin": 30},
        sha256={},
    ),
    "cifar100": replace(CIFAR100, train={"train.bin": 300}, test={"test.bin": 100}, sha256={}),
}


def records(layout: Layout, count: int, seed: int) -> np.ndarray:
    """Random pixels; labels 0, 1, 2, … in turn; CIFAR-100's coarse label is a decoy, never equal to the fine one."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, layout.record_bytes), dtype=np.uint8)
    rows[:, layout.label_bytes - 1] = np.arange(count) % len(layout.class_names)
    if layout.label_bytes == 2:
        rows[:, 0] = (rows[:, 1] + 1) % 20
    return rows


def contents(layout: Layout) -> dict[str, np.ndarray]:
    return {name: records(layout, count, seed) for seed, (name, count) in enumerate(layout.files.items())}


def write_folder(layout: Layout, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, rows in contents(layout).items():
        (folder / name).write_bytes(rows.tobytes())
    return folder


def write_archive(layout: Layout, path: Path, leave_out: str = "") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, rows in {"readme.html": np.zeros(5, np.uint8), **contents(layout)}.items():
            if name != leave_out:
                member = tarfile.TarInfo(f"{layout.folder}/{name}")
                member.size = rows.size
                tar.addfile(member, io.BytesIO(rows.tobytes()))
    return path


def ask(layout: Layout, folder: Path, validation: int = 0) -> Dataset:
    return load(layout, Request(data_dir=folder, validation=validation))


def assert_is_the_content(dataset: Dataset, layout: Layout) -> None:
    rows = contents(layout)
    for split, files in ((dataset.train, layout.train), (dataset.test, layout.test)):
        expected = np.concatenate([rows[name] for name in files])
        assert split.labels.tolist() == expected[:, layout.label_bytes - 1].tolist()
        assert split.images.shape == (len(expected), 3, 32, 32)
        assert np.array_equal(split.images.flatten(1).numpy(), expected[:, layout.label_bytes :])
