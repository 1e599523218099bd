import struct
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from lipflow.data import DataError, folder, load

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def write(path, width=8, height=8, seed=0, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def write_classes(root, counts, side=8, start=0):
    """counts images a class; distinct, as each has its own seed."""
    for name, count in counts.items():
        for i in range(count):
            start += 1
            write(root / name / f"{i:03}.png", side, side, seed=start)


def test_pixels_labels_and_order(tmp_path):
    expected = {}
    for seed, (part, name, file) in enumerate(
        [
            ("train", "cat", "b.png"),
            ("train", "cat", "a.png"),
            ("train", "ant", "z.PNG"),
            ("val", "cat", "1.bmp"),
            ("val", "ant", "1.bmp"),
            ("test", "cat", "1.ppm"),
            ("test", "ant", "deeper/1.png"),
        ]
    ):
        expected[part, name, file] = write(tmp_path / part / name / file, 5, 7, seed)
    data = load("folder", tmp_path)
    assert data.class_names == ("ant", "cat")
    assert data.shape == (3, 7, 5)
    assert data.train.labels.tolist() == [0, 1, 1]
    keys = [("train", "ant", "z.PNG"), ("train", "cat", "a.png"), ("train", "cat", "b.png")]
    for image, key in zip(data.train.images, keys, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected[key])
    for split, label, key in (
        (data.validation, 1, ("val", "cat", "1.bmp")),
        (data.test, 0, ("test", "ant", "deeper/1.png")),
    ):
        (image,) = split.images[split.labels == label]
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected[key])


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_the_only_held_out_part_is_for_testing(tmp_path, held_out):
    write_classes(tmp_path / "train", {"a": 20, "b": 20})
    write_classes(tmp_path / held_out, {"a": 3, "b": 2}, start=1000)
    data = load("folder", tmp_path)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [36, 4, 5]
    data = load("folder", tmp_path, validation=10)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [30, 10, 5]


def test_class_folders_alone_are_split_80_10_10(tmp_path):
    write_classes(tmp_path, {"a": 30, "b": 20})
    data = load("folder", tmp_path)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [40, 5, 5]
    assert sorted(data.test.labels.tolist()) == [0, 0, 0, 1, 1]
    images = torch.cat([data.train.images, data.validation.images, data.test.images])
    assert len(images.flatten(1).unique(dim=0)) == 50
    more = load("folder", tmp_path, validation=20)
    assert torch.equal(more.test.images, data.test.images)
    assert len(more.validation) == 20


@pytest.mark.parametrize("counts", [dict.fromkeys("abcdefghijkl", 5), {"a": 90, "b": 3}, dict.fromkeys("abc", 15)])
def test_a_tenth_of_each_class_and_at_least_one_image_is_held_out(tmp_path, counts):
    write_classes(tmp_path, counts)
    data = load("folder", tmp_path)
    for split in (data.validation, data.test):
        held = torch.bincount(split.labels, minlength=len(counts)).tolist()
        assert held == [max(1, (count + 5) // 10) for count in counts.values()]
    assert set(data.train.labels.tolist()) == set(range(len(counts)))


@pytest.mark.parametrize("parts", [[""], ["train", "test"], ["train", "val", "test"]], ids=len)
def test_the_first_of_the_held_out_images_are_of_all_classes(tmp_path, parts):
    for i, part in enumerate(parts):
        write_classes(tmp_path / part, dict.fromkeys("abcd", 80), start=1000 * i)
    data = load("folder", tmp_path)
    for split in (data.validation, data.test):
        assert set(split.labels[: len(split) // 2].tolist()) == {0, 1, 2, 3}
    again = load("folder", tmp_path)
    assert torch.equal(again.test.images, data.test.images)
    assert torch.equal(again.test.labels, data.test.labels)


def test_a_digest_is_of_the_images_their_labels_and_the_names_of_classes(tmp_path):
    write_classes(tmp_path, {"a": 10, "b": 10})
    parts = ("train", "validation", "test")
    data = load("folder", tmp_path)
    seen = {data.digest(part) for part in parts}
    assert {load("folder", tmp_path).digest(part) for part in parts} == seen
    relabelled = replace(data.test, labels=1 - data.test.labels)
    for other in (replace(data, test=relabelled), replace(data, class_names=("a", "c"))):
        assert other.digest("test") not in seen
    write(tmp_path / "a" / "more.png", seed=99)
    assert load("folder", tmp_path).digest("train") not in seen
    assert replace(data, test=data.test.take(torch.arange(0))).digest("test") not in seen


def test_hidden_and_other_files_are_skipped(tmp_path):
    write_classes(tmp_path, {"a": 10, "b": 10})
    write(tmp_path / "a" / "._000.png")
    write(tmp_path / "a" / ".thumbnails" / "000.png")
    write(tmp_path / ".cache" / "000.png")
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "README").write_text("not a class")
    data = load("folder", tmp_path)
    assert data.class_names == ("a", "b")
    assert sum(map(len, (data.train, data.validation, data.test))) == 20


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_other_modes_become_rgb(tmp_path, mode):
    write_classes(tmp_path, {"a": 5, "b": 5})
    suffix = "tif" if mode == "CMYK" else "png"
    (tmp_path / "a" / "000.png").unlink()
    Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).convert(mode).save(tmp_path / "a" / f"000.{suffix}")
    assert load("folder", tmp_path).shape == (3, 8, 8)
    assert folder._pixels(tmp_path / "a" / f"000.{suffix}", None).min() == 255


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(tmp_path, mode):
    """Black on nothing, as icons and signatures are, is black on white, and not black on black."""
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
def test_resizing_keeps_the_proportions_and_the_middle(tmp_path, width, height, size):
    """A ramp along the longer side is resampled exactly, but for rounding and where the kernel meets the edge."""
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


def test_a_photograph_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held turned by a quarter
    sideways = write(tmp_path / "x.png", 5, 8, exif=exif)
    upright = folder._pixels(tmp_path / "x.png", None)
    assert np.array_equal(upright.transpose(1, 2, 0), np.rot90(sideways, -1))


def test_images_of_several_sizes_need_an_image_size(tmp_path):
    write_classes(tmp_path, {"a": 5, "b": 5})
    write(tmp_path / "b" / "wide.png", 12, 8)
    with pytest.raises(DataError, match=r"wide\.png is 8×12 and .*\d{3}\.png 8×8; give --image-size"):
        load("folder", tmp_path)
    assert load("folder", tmp_path, image_size=6).shape == (3, 6, 6)


@pytest.mark.parametrize("damage", ["text", "empty", "cut"])
def test_a_broken_image_is_named(tmp_path, damage):
    write_classes(tmp_path, {"a": 5, "b": 5}, side=32)
    broken = tmp_path / "b" / "003.png"
    content = broken.read_bytes()
    broken.write_bytes({"text": b"hello", "empty": b"", "cut": content[: len(content) // 2]}[damage])
    with pytest.raises(DataError, match=r"b/003\.png cannot be read as an image .*repair or remove it"):
        load("folder", tmp_path)


def _png_of_16_bits(path):
    """Pillow reads it, by its high bytes, and calls it RGB."""
    rows = (b"\0" + struct.pack(">24H", *range(1000, 1024))) * 8
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert Image.open(path).mode == "RGB"


DEEP = {
    "deep.png, grey": lambda path: Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(path),
    "deep.png": _png_of_16_bits,
    "deep.ppm": lambda path: path.write_bytes(b"P6 2 2 65535\n" + b"\x00\x01" * 12),
}


@pytest.mark.parametrize("name", DEEP)
def test_sixteen_bits_are_refused(tmp_path, name):
    path = tmp_path / name.split(",")[0]
    DEEP[name](path)
    with pytest.raises(DataError, match=rf"{path.name} has pixels of mode .*convert it to 8 bits"):
        folder._pixels(path, None)


@pytest.mark.parametrize("maximum", [255, 15])
def test_a_pixmap_of_bytes_is_read(tmp_path, maximum):
    (tmp_path / "x.ppm").write_bytes(b"P6 2 2 %d\n" % maximum + b"\x01" * 12)
    assert folder._pixels(tmp_path / "x.ppm", None).shape == (3, 2, 2)


def test_more_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    write_classes(tmp_path, {"a": 5, "b": 5})
    monkeypatch.setattr(folder, "_installed_memory", lambda: 10 * 3 * 8 * 8 - 1)
    with pytest.raises(DataError, match=r"10 images of 8×8 take .* GB.*smaller --image-size"):
        load("folder", tmp_path)


def refused(tmp_path, message, **arguments):
    with pytest.raises(DataError, match=message):
        load("folder", tmp_path, **arguments)


LAYOUTS = {  # images of each class in each folder, and words of the refusal
    "no classes": ({}, "one folder of images a class, of two classes or more; it has 0 folders"),
    "one class": ({"": {"a": 4}}, "it has 1 folder"),
    "few images": ({"": {"a": 4, "b": 2}}, "b has 2 of the 3 images that a class needs to be in every split"),
    "few to hold out": (
        {"train": {"a": 9, "b": 1}, "val": {"a": 1, "b": 1}},
        "train/b has 1 of the 2 images that a class needs to be in every split",
    ),
    "no training images": ({"val": {"a": 1, "b": 1}}, "has val/; it needs train/"),
    "training images alone": ({"train": {"a": 10, "b": 10}}, "has train/; it needs train/ and val/"),
    "val twice": (
        {part: {"a": 1, "b": 1} for part in ("train", "val", "validation")},
        "has train/ and val/ and validation/; it needs",
    ),
    "an empty class": ({"": {"a": 10, "b": 10, "empty": 0}}, r"empty has no images \(\.png, \.jpg"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_are_refused(tmp_path, name):
    parts, words = LAYOUTS[name]
    for part, counts in parts.items():
        write_classes(tmp_path / part, counts)
        for label, count in counts.items():
            if not count:
                (tmp_path / part / label).mkdir()
                (tmp_path / part / label / ".hidden.png").touch()
    refused(tmp_path, words)


def test_arguments_that_would_do_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match="needs --data-dir ROOT"):
        load("folder")
    for part in ("train", "validation", "test"):  # another name for val
        write_classes(tmp_path / part, {"a": 2, "b": 1})
    assert len(load("folder", tmp_path).validation) == 3
    refused(tmp_path, r"validation is the validation split already; drop validation=1", validation=1)
    refused(tmp_path, "positive number of pixels; got 0", image_size=0)


@pytest.mark.parametrize("classes", [{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1}])
def test_splits_with_other_classes_are_refused(tmp_path, classes):
    write_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_classes(tmp_path / "test", classes)
    refused(tmp_path, "test and the training split differ in the class '[bc]'")


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_classes(tmp_path, {"a": 5, "b": 5})
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused(tmp_path, r"needs Pillow: pip install pillow")
