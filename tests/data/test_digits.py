import hashlib
from importlib.resources import files

import numpy as np
import pytest
import torch

from lipflow.data import DataError, load


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_embedded_file_is_the_uci_test_set():
    with np.load(files("lipflow.data") / "digits.npz", allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    assert images.shape == (1797, 8, 8)
    assert images.max() == 16
    # The class counts that UCI publishes for optdigits.tes, and its first image, a zero.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert int(images.sum(dtype=np.int64)) == 561718


@pytest.mark.parametrize("validation", [0, 100, 1000])
def test_load_has_the_same_test_images_for_every_validation_size(digits, validation):
    other = load("digits", validation=validation)
    assert torch.equal(other.test.images, digits.test.images)
    assert torch.equal(other.test.labels, digits.test.labels)
    assert (len(other.train), len(other.validation)) == (1497 - validation, validation)


def test_load_has_the_same_splits_in_every_release(digits):
    """A change here would mix the test images of old runs into the training images of new ones."""
    content = digits.validation.images.numpy().tobytes() + digits.test.images.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest().startswith("648b9a2453250e21")
    images = torch.cat([split.images for split in (digits.train, digits.validation, digits.test)])
    assert len(images.flatten(1).unique(dim=0)) == 1797  # no image is in two splits


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(data_dir="."), "reads no files"),
        (dict(image_size=16), "8×8 and are not resized; got image_size=16"),
    ],
)
def test_load_rejects_arguments_without_effect(arguments, words):
    with pytest.raises(DataError, match=words):
        load("digits", **arguments)
    assert load("digits", image_size=8).shape == (1, 8, 8)
