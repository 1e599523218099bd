import os
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lipflow.data import DataError, folder, load


def write(path, width=8, height=8, seed=0, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def write_classes(root, counts, side=8, start=0):
    """counts images of each class, which all differ."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            start += 1
            write(root / name / f"{i:03}.png", side, side, seed=start)


def sizes(data):
    return [len(split) for split in (data.train, data.validation, data.test)]


def test_load_reads_pixels_labels_and_order(tmp_path):
    names = {
        "train": ["ant/z.PNG", "cat/a.png", "cat/b.png"],
        "val": ["ant/1.bmp", "cat/1.bmp"],
        "test": ["ant/deeper/1.png", "cat/1.ppm"],
    }
    images = {
        (part, name): write(tmp_path / part / name, 5, 7, seed=zlib.crc32((part + name).encode()))
        for part, files in names.items()
        for name in reversed(files)
    }
    for skipped in ("train/cat/._000.png", "train/cat/.thumbnails/0.png", "train/.cache/0.png"):
        write(tmp_path / skipped)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "README").write_text("not a class")
    data = load("folder", tmp_path)
    assert (data.class_names, data.shape) == (("ant", "cat"), (3, 7, 5))
    for split, (part, files) in zip((data.train, data.validation, data.test), names.items(), strict=True):
        order = split.labels.argsort(stable=True)
        assert split.labels[order].tolist() == [("ant", "cat").index(name[:3]) for name in files]
        for image, name in zip(split.images[order], files, strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), images[part, name])


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_load_tests_on_the_only_held_out_part(tmp_path, held_out):
    write_classes(tmp_path / "train", {"a": 20, "b": 20})
    write_classes(tmp_path / held_out, {"a": 3, "b": 2}, start=1000)
    assert sizes(load("folder", tmp_path)) == [36, 4, 5]
    assert sizes(load("folder", tmp_path, validation=10)) == [30, 10, 5]


@pytest.mark.parametrize("counts", [dict.fromkeys("abcdefghijkl", 5), {"a": 90, "b": 3}, {"a": 30, "b": 20}])
def test_load_holds_out_a_tenth_of_each_class_and_at_least_one_image(tmp_path, counts):
    write_classes(tmp_path, counts)
    data = load("folder", tmp_path)
    for split in (data.validation, data.test):
        held = torch.bincount(split.labels, minlength=len(counts)).tolist()
        assert held == [max(1, (count + 5) // 10) for count in counts.values()]
    assert set(data.train.labels.tolist()) == set(range(len(counts)))
    images = torch.cat([data.train.images, data.validation.images, data.test.images])
    assert len(images.flatten(1).unique(dim=0)) == sum(counts.values())
    more = load("folder", tmp_path, validation=20)
    assert torch.equal(more.test.images, data.test.images)
    assert len(more.validation) == 20


@pytest.mark.parametrize("parts", [[""], ["train", "test"], ["train", "val", "test"]], ids=len)
def test_load_shuffles_the_classes_of_held_out_images(tmp_path, parts):
    for i, part in enumerate(parts):
        write_classes(tmp_path / part, dict.fromkeys("abcd", 80), start=1000 * i)
    data, again = load("folder", tmp_path), load("folder", tmp_path)
    for split in (data.validation, data.test):
        assert set(split.labels[: len(split) // 2].tolist()) == {0, 1, 2, 3}
    assert torch.equal(again.test.images, data.test.images)
    assert torch.equal(again.test.labels, data.test.labels)


def test_digest_depends_on_images_labels_and_class_names(tmp_path):
    write_classes(tmp_path, {"a": 10, "b": 10})
    parts = ("train", "validation", "test")
    data = load("folder", tmp_path)
    seen = {data.digest(part) for part in parts}
    assert {load("folder", tmp_path).digest(part) for part in parts} == seen
    relabelled = replace(data.test, labels=1 - data.test.labels)
    empty = data.test.take(torch.arange(0))
    for other in (replace(data, test=relabelled), replace(data, class_names=("a", "c")), replace(data, test=empty)):
        assert other.digest("test") not in seen
    write(tmp_path / "a" / "more.png", seed=99)
    assert load("folder", tmp_path).digest("train") not in seen


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_pixels_of_other_modes_are_rgb(tmp_path, mode):
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).convert(mode).save(path)
    assert (folder._pixels(path, None) == np.full((3, 8, 8), 255)).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_pixels_that_are_transparent_are_white(tmp_path, mode):
    drawn = np.zeros((8, 8), np.uint8)
    drawn[2:4] = 255
    if mode == "P":
        Image.fromarray(1 - drawn // 255).convert("P").save(tmp_path / "x.png", transparency=1)
    else:
        image = Image.new("L", (8, 8))
        image.putalpha(Image.fromarray(drawn))
        image.convert(mode).save(tmp_path / "x.png")
    assert np.array_equal(folder._pixels(tmp_path / "x.png", None)[0], 255 - drawn)


@pytest.mark.parametrize(("width", "height"), [(40, 20), (20, 40), (21, 60), (20, 20), (7, 9), (1, 50)])
@pytest.mark.parametrize("size", [1, 8, 20])
def test_pixels_are_resized_in_proportion_around_the_middle(tmp_path, width, height, size):
    """A ramp along the longer side is resampled exactly, up to rounding, except where the kernel meets the edge."""
    shorter, longer = sorted((width, height))
    ramp = np.rint(np.linspace(0, 250, longer)).astype(np.uint8)
    pixels = np.broadcast_to(ramp if width >= height else ramp[:, None], (height, width))
    Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / "x.png")
    out = folder._pixels(tmp_path / "x.png", size)
    assert out.shape == (3, size, size)
    position = (longer - shorter) / 2 + (np.arange(size) + 0.5) * shorter / size
    reach = 2 * max(1, shorter / size)
    exact = (position >= reach) & (position <= longer - reach)
    expected = 250 * (position - 0.5) / (longer - 1)
    line = out[0] if width >= height else out[0].T
    assert (np.abs(line - expected)[:, exact] <= 1.1).all()
    assert abs(float(out.mean()) - 125) <= 1.1


def test_pixels_are_rotated_by_the_exif_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    sideways = write(tmp_path / "x.png", 5, 8, exif=exif)
    upright = folder._pixels(tmp_path / "x.png", None)
    assert np.array_equal(upright.transpose(1, 2, 0), np.rot90(sideways, -1))


def _png_of_16_bits(path):
    """Pillow reads the high bytes and reports the mode RGB."""
    rows = (b"\0" + struct.pack(">24H", *range(1000, 1024))) * 8
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for chunk in (b"IHDR" + header, b"IDAT" + zlib.compress(rows), b"IEND"):
        content += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    path.write_bytes(content)
    assert Image.open(path).mode == "RGB"


@pytest.mark.parametrize(
    ("name", "write_deep"),
    [
        ("grey.png", lambda path: Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(path)),
        ("rgb.png", _png_of_16_bits),
        ("rgb.ppm", lambda path: path.write_bytes(b"P6 2 2 65535\n" + b"\x00\x01" * 12)),
    ],
)
def test_pixels_of_16_bits_are_rejected(tmp_path, name, write_deep):
    write_deep(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} has pixels of mode .*convert it to 8 bits"):
        folder._pixels(tmp_path / name, None)


@pytest.mark.parametrize("maximum", [255, 15])
def test_pixels_of_a_pixmap_of_bytes_are_read(tmp_path, maximum):
    (tmp_path / "x.ppm").write_bytes(b"P6 2 2 %d\n" % maximum + b"\x01" * 12)
    assert folder._pixels(tmp_path / "x.ppm", None).shape == (3, 2, 2)


def rejected(tmp_path, message, **arguments):
    with pytest.raises(DataError, match=message):
        load("folder", tmp_path, **arguments)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "at least 2 classes; its folders: \\[\\]"),
        ({"": {"a": 4}}, "at least 2 classes; its folders: \\['a'\\]"),
        ({"": {"a": 4, "b": 2}}, "b has 2 of the 3 images that a class needs to be in every split"),
        ({"train": {"a": 9, "b": 1}, "val": {"a": 1, "b": 1}}, "train/b has 1 of the 2 images"),
        ({"val": {"a": 1, "b": 1}}, "has val/; it needs train/"),
        ({"train": {"a": 10, "b": 10}}, "has train/; it needs train/ and val/"),
        ({part: {"a": 1, "b": 1} for part in ("train", "val", "validation")}, "has train/ and val/ and validation/"),
        ({"": {"a": 10, "b": 10, "empty": 0}}, r"empty has no images \(\.png, \.jpg"),
        ({"train": {"a": 1, "b": 1}, "test": {"a": 1, "b": 1, "c": 1}}, "differ in the class 'c'"),
        ({"train": {"a": 1, "b": 1}, "test": {"a": 1, "c": 1}}, "differ in the class 'b'"),
    ],
)
def test_load_rejects_wrong_layouts(tmp_path, parts, words):
    for part, counts in parts.items():
        write_classes(tmp_path / part, counts)
    rejected(tmp_path, words)


def test_load_rejects_images_of_several_sizes_without_an_image_size(tmp_path):
    write_classes(tmp_path, {"a": 5, "b": 5})
    write(tmp_path / "b" / "wide.png", 12, 8)
    rejected(tmp_path, r"wide\.png is 8×12 and .*\d{3}\.png 8×8; give --image-size")
    assert load("folder", tmp_path, image_size=6).shape == (3, 6, 6)


@pytest.mark.parametrize("damaged", [lambda b: b"hello", lambda b: b"", lambda b: b[: len(b) // 2]])
def test_load_names_a_damaged_image(tmp_path, damaged):
    write_classes(tmp_path, {"a": 5, "b": 5}, side=32)
    path = tmp_path / "b" / "003.png"
    path.write_bytes(damaged(path.read_bytes()))
    rejected(tmp_path, r"b/003\.png cannot be read as an image .*repair or remove it")


def _png_header(path):
    """A PNG of 50 000 × 50 000 pixels, without data."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)))


def _bomb(path):
    """An image that Pillow itself would only warn of."""
    Image.new("L", (9_000, 10_000)).save(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to(path), "is not a regular file"),
        (_png_header, "cannot be read as an image"),
        (_bomb, "90000000 pixels, above the limit"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_load_rejects_pipes_devices_and_huge_images(make, words, tmp_path):
    write_classes(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "b" / "003.png").unlink()
    make(tmp_path / "b" / "003.png")
    rejected(tmp_path, rf"b/003\.png .*{words}", image_size=6)


def test_load_rejects_more_than_the_memory_before_reading(tmp_path, monkeypatch):
    write_classes(tmp_path, {"a": 5, "b": 5})
    monkeypatch.setattr(folder, "_installed_memory", lambda: 10 * 3 * 8 * 8 - 1)
    rejected(tmp_path, r"10 images of 8×8 take .* GB.*smaller --image-size")


def test_load_rejects_arguments_without_effect(tmp_path):
    with pytest.raises(DataError, match="needs --data-dir ROOT"):
        load("folder")
    for part in ("train", "validation", "test"):  # another name for val
        write_classes(tmp_path / part, {"a": 2, "b": 1})
    assert len(load("folder", tmp_path).validation) == 3
    rejected(tmp_path, r"validation is the validation split already; drop validation=1", validation=1)
    rejected(tmp_path, "from 1 to 8192 pixels; got 0", image_size=0)
    rejected(tmp_path, "from 1 to 8192 pixels; got 1000000", image_size=10**6)
