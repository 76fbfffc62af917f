import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.experiments.models.resnet import (
    crop_middle,
    crop_randomly,
    prepare_pictures,
    standardize,
)

KEY = jax.random.key(0)
CROPPED = jax.jit(crop_randomly)
PREPARED = jax.jit(prepare_pictures)

# No two pixels are alike: row and column can be read off.
PICTURE = np.stack(
    [*np.meshgrid(np.arange(32), np.arange(32), indexing="ij"), np.full((32, 32), 7)], axis=-1
).astype(np.uint8)


def place(crop):
    """Row, column and whether mirrored; checks that it is a crop of PICTURE."""
    row, first, last = int(crop[0, 0, 0]), int(crop[0, 0, 1]), int(crop[0, -1, 1])
    column, mirrored = min(first, last), first > last
    expected = PICTURE[row : row + 24, column : column + 24]
    np.testing.assert_array_equal(crop, expected[:, ::-1] if mirrored else expected)
    return row, column, mirrored


def test_every_crop_is_of_the_picture_or_its_mirror_and_all_occur_alike():
    n = 5000
    crops = CROPPED(jnp.broadcast_to(jnp.asarray(PICTURE), (n, 32, 32, 3)), KEY)
    assert crops.dtype == jnp.uint8
    places = [place(crop) for crop in np.asarray(crops)]
    counts = {which: places.count(which) for which in set(places)}
    assert len(counts) == 9 * 9 * 2
    mean = n / 162
    # A χ² of 161 degrees of freedom: six standard deviations.
    assert sum((count - mean) ** 2 / mean for count in counts.values()) < 161 + 6 * np.sqrt(322)


def test_pictures_draw_each_for_themselves():
    pictures = np.broadcast_to(PICTURE, (20, 32, 32, 3))
    crops = CROPPED(jnp.asarray(pictures), KEY)
    assert len({place(crop) for crop in np.asarray(crops)}) > 10
    np.testing.assert_array_equal(CROPPED(jnp.asarray(pictures[:7]), KEY), crops[:7])
    others = np.concatenate([pictures[:7], 255 - pictures[7:]])
    np.testing.assert_array_equal(CROPPED(jnp.asarray(others), KEY)[:7], crops[:7])
    assert np.any(CROPPED(jnp.asarray(pictures), jax.random.key(1)) != crops)


def test_evaluation_takes_the_middle():
    picture = jnp.asarray(PICTURE)[None]
    assert place(np.asarray(crop_middle(picture)[0])) == (4, 4, False)
    expected = standardize(crop_middle(picture))  # in one program, sums may be in another order
    np.testing.assert_allclose(PREPARED(picture, None), expected, rtol=1e-5)


@pytest.mark.parametrize("key", [None, KEY])
def test_standardised_after_the_crop(key):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    x = np.asarray(PREPARED(jnp.asarray(pictures), key), np.float64)
    assert x.shape == (3, 24, 24, 3)
    np.testing.assert_allclose(x.mean((1, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(x.std((1, 2, 3)), 1, atol=1e-5)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("colour", [0, 255])
def test_a_picture_of_one_colour_is_zeros(key, colour):
    pictures = jnp.full((2, 32, 32, 3), colour, jnp.uint8)
    np.testing.assert_array_equal(PREPARED(pictures, key), np.zeros((2, 24, 24, 3)))


def test_a_nearly_black_picture_is_divided_by_the_least_deviation():
    """One pixel of 1: the deviation is below 1/√N, which stands in for it."""
    crop = np.zeros((1, 24, 24, 3), np.uint8)
    crop[0, 5, 6, 1] = 1
    n = crop.size
    expected = (crop - 1 / n) * np.sqrt(n)
    assert np.std(crop) < n**-0.5
    np.testing.assert_allclose(standardize(jnp.asarray(crop)), expected, rtol=1e-5)
