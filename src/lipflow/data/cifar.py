"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images").

The official *binary* version, https://www.cs.toronto.edu/~kriz/cifar.html, is a file of fixed-size records: the label
bytes (CIFAR-10: one; CIFAR-100: coarse, then fine), then 3072 pixel bytes (red, green and blue planes of 32×32). It is
read from its folder or directly from the archive, without extracting it. An existing folder of the official *Python*
version is read too (cifar_pickle.py). A file of the wrong size, or a label out of range, is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lipflow.data.dataset import DataError, Dataset, Request, Split, assemble, carve
from lipflow.data.downloads import cache_dir, download

CHANNELS, SIDE = 3, 32
PIXELS = CHANNELS * SIDE * SIDE
VALIDATION = 5000


@dataclass(frozen=True)
class Layout:
    """One of the two datasets as its authors distribute it."""

    name: str
    title: str
    url: str
    archive_sha256: str
    folder: str  # in the archive, and after unpacking it
    train: Mapping[str, int]  # file → number of records
    test: Mapping[str, int]
    sha256: Mapping[str, str]  # of the files
    label_bytes: int  # the last of them is the label
    class_names: tuple[str, ...]
    pickle_folder: str
    pickle_train: Mapping[str, str]  # file → published MD5
    pickle_test: Mapping[str, str]
    pickle_labels: bytes

    @property
    def archive(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + PIXELS

    @property
    def files(self) -> dict[str, int]:
        return {**self.train, **self.test}

    @property
    def remedy(self) -> str:
        return f"remove it and run `lipflow data {self.name}`, or point --data-dir at a good copy"


CIFAR10 = Layout(
    name="cifar10",
    title="CIFAR-10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",  # MD5 c32a1d4ab5d03f1284b67883e8d87530
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    folder="cifar-10-batches-bin",
    train={f"data_batch_{i}.bin": 10000 for i in range(1, 6)},
    test={"test_batch.bin": 10000},
    sha256={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    label_bytes=1,
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    pickle_folder="cifar-10-batches-py",
    pickle_train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    pickle_test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    pickle_labels=b"labels",
)

_FINE_LABELS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100 = Layout(
    name="cifar100",
    title="CIFAR-100",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",  # MD5 03b5dce01913d631647c71ecec9e9cb8
    archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    folder="cifar-100-binary",
    train={"train.bin": 50000},
    test={"test.bin": 10000},
    sha256={
        "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    },
    label_bytes=2,
    class_names=tuple(_FINE_LABELS.split()),
    pickle_folder="cifar-100-python",
    pickle_train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    pickle_test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    pickle_labels=b"fine_labels",
)


def load(layout: Layout, request: Request) -> Dataset:
    """45000 train, 5000 validation and 10000 test images (3, 32, 32), from the requested folder or the cache.

    The official archive is downloaded only if no folder was requested and the cache does not have the data.
    """
    request.refuse_image_size(layout.name, SIDE)
    where = request.data_dir or cache_dir()
    found = find(layout, where)
    if found is None and request.data_dir is None and request.download:
        found = fetch(layout, None), read_archive
    if found is None:
        raise DataError(
            f"no {layout.title} in {where}: it has neither {layout.folder}/ nor {layout.archive} nor "
            f"{layout.pickle_folder}/; run `lipflow data {layout.name}`, or point --data-dir at a folder that has one"
        )
    path, read = found
    rest, test = read(layout, path)
    train, validation = carve(layout.name, rest, VALIDATION if request.validation is None else request.validation)
    return assemble(layout.name, train, validation, test, layout.class_names)


def fetch(layout: Layout, data_dir: Path | None) -> Path:
    """The path of the data in `data_dir` (or the cache), downloaded if it is not there yet."""
    where = data_dir or cache_dir()
    found = find(layout, where)
    return found[0] if found else download(layout.title, layout.url, layout.archive_sha256, where)


Reader = Callable[[Layout, Path], tuple[Split, Split]]


def find(layout: Layout, where: Path) -> tuple[Path, Reader] | None:
    """The path of the data in `where`, or `where` itself, and the function that reads it.

    A folder with only some of the files is found too, so that the error names the missing file.
    """
    inside: dict[str, Reader] = {
        layout.folder: read_folder,
        layout.archive: read_archive,
        layout.pickle_folder: read_pickle_folder,
    }
    for name, read in inside.items():
        if (where / name).exists():
            return where / name, read
    if any((where / name).is_file() for name in layout.files):
        return where, read_folder
    if any((where / name).is_file() for name in (*layout.pickle_train, *layout.pickle_test)):
        return where, read_pickle_folder
    return None


def read_folder(layout: Layout, folder: Path) -> tuple[Split, Split]:
    """(train, test) from the unpacked binary version."""
    contents = {}
    for name, records in layout.files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing, so this copy of {layout.title} is not complete; {layout.remedy}")
        _check_size(layout, str(path), path.stat().st_size, records)
        contents[name] = path.read_bytes()
    return _decode(layout, contents, str(folder))


def read_archive(layout: Layout, archive: Path) -> tuple[Split, Split]:
    """(train, test) from the members of the binary .tar.gz, in memory; the checksum of the whole file is verified."""
    wanted = {f"{layout.folder}/{name}": name for name in layout.files}
    contents = {}
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is None or not member.isfile():
                    continue
                _check_size(layout, f"{member.name} in {archive}", member.size, layout.files[name])
                file = tar.extractfile(member)
                contents[name] = file.read() if file else b""
            while stream.read(1 << 20):
                pass
    except DataError:
        raise
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError) as error:
        raise DataError(f"{archive} is truncated or corrupt ({error}); {layout.remedy}") from None
    if missing := sorted(layout.files.keys() - contents.keys()):
        raise DataError(f"{archive} lacks {layout.folder}/{missing[0]}; {layout.remedy}")
    return _decode(layout, contents, str(archive))


def read_pickle_folder(layout: Layout, folder: Path) -> tuple[Split, Split]:
    """(train, test) from the official Python version; see cifar_pickle."""
    from lipflow.data.cifar_pickle import read_batch

    def read(files: Mapping[str, str]) -> Split:
        batches = [read_batch(folder / name, md5, layout.pickle_labels, layout.remedy) for name, md5 in files.items()]
        return _split(layout, str(folder), *map(np.concatenate, zip(*batches, strict=True)))

    return read(layout.pickle_train), read(layout.pickle_test)


def _check_size(layout: Layout, what: str, size: int, records: int) -> None:
    expected = records * layout.record_bytes
    if size != expected:
        raise DataError(
            f"{what} has {size} bytes, not {expected} ({records} records of {layout.record_bytes}), so it is truncated "
            f"or not {layout.title}; {layout.remedy}"
        )


def _decode(layout: Layout, contents: Mapping[str, bytes], where: str) -> tuple[Split, Split]:
    changed = [name for name, digest in layout.sha256.items() if hashlib.sha256(contents[name]).hexdigest() != digest]
    if changed:
        message = f"{where}: {', '.join(changed)} has the right size but differs from the official {layout.title}"
        warnings.warn(message, stacklevel=2)

    def decode(files: Mapping[str, int]) -> Split:
        whole = np.concatenate([np.frombuffer(contents[name], np.uint8) for name in files])
        records = whole.reshape(-1, layout.record_bytes)
        return _split(layout, where, records[:, layout.label_bytes :], records[:, layout.label_bytes - 1])

    return decode(layout.train), decode(layout.test)


def _split(layout: Layout, where: str, pixels: np.ndarray, labels: np.ndarray) -> Split:
    classes = len(layout.class_names)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{where} is corrupt: record {wrong[0]} has the label {labels[wrong[0]]}, and {layout.title} has labels "
            f"0 to {classes - 1}; {layout.remedy}"
        )
    images = np.ascontiguousarray(pixels).reshape(-1, CHANNELS, SIDE, SIDE)
    return Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
