import hashlib
from importlib.resources import files

import numpy as np
import pytest
import torch

from lipflow.data import DataError, load


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_the_embedded_file_is_the_uci_test_set():
    with np.load(files("lipflow.data") / "digits.npz", allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    assert images.shape == (1797, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    assert images.max() == 16
    # The class counts UCI publishes for optdigits.tes, and its first image, a zero.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert int(images.sum(dtype=np.int64)) == 561718


def test_sizes_classes_and_levels(digits):
    splits = digits.train, digits.validation, digits.test
    assert [len(split) for split in splits] == [1197, 300, 300]
    assert digits.shape == (1, 8, 8)
    assert digits.class_names == tuple("0123456789")
    images = torch.cat([split.images for split in splits])
    assert images.unique().tolist() == [round(255 * g / 16) for g in range(17)]
    assert len(images.flatten(1).unique(dim=0)) == 1797  # no image is in two splits
    counts = torch.bincount(digits.test.labels)
    assert (counts.min(), counts.max()) == (29, 31)


@pytest.mark.parametrize("validation", [0, 100, 1000])
def test_the_test_images_do_not_depend_on_the_validation_size(digits, validation):
    other = load("digits", validation=validation)
    assert torch.equal(other.test.images, digits.test.images)
    assert torch.equal(other.test.labels, digits.test.labels)
    assert (len(other.train), len(other.validation)) == (1497 - validation, validation)


def test_the_splits_are_the_same_in_every_release(digits):
    """A change here would mix the test images of old runs into the training images of new ones."""
    content = digits.validation.images.numpy().tobytes() + digits.test.images.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest().startswith("648b9a2453250e21")


def test_arguments_that_would_do_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match="reads no files"):
        load("digits", tmp_path)
    with pytest.raises(DataError, match="digits images are 8×8 and are not resized; got image_size=16"):
        load("digits", image_size=16)
    with pytest.raises(DataError, match="cannot hold out 1497 of 1497"):
        load("digits", validation=1497)
    assert load("digits", image_size=8).shape == (1, 8, 8)
