"""Strategies for property tests whose counterexamples shrink to numbers checked by hand.

A drawn seed does not shrink: the smallest failure of `default_rng(seed)` is as many numbers of 16
digits as the largest. Here entries are sixteenths, exact in every precision, and often equal or 0:
ties, singular matrices and clients that agree come up, which Gaussian numbers never give.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

SIXTEENTHS = st.integers(-4, 4).map(float) | st.integers(-64, 64).map(lambda number: number / 16)
"""Numbers from −4 to 4, whole ones where they will do."""


def powers_of_two(low: int, high: int) -> st.SearchStrategy[float]:
    """Magnitudes 2^low … 2^high; the simplest is 1."""
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


def arrays(*shape: int, dtype=np.float64) -> st.SearchStrategy[np.ndarray]:
    """Arrays of sixteenths; every entry is drawn for itself."""
    return hnp.arrays(dtype, shape, elements=SIXTEENTHS, fill=st.nothing())


def labels(classes: int, *shape: int) -> st.SearchStrategy[np.ndarray]:
    """Arrays of labels from 0, int32."""
    return hnp.arrays(np.int32, shape, elements=st.integers(0, classes - 1), fill=st.nothing())


def label_sequences(classes: int, most: int) -> st.SearchStrategy[np.ndarray]:
    """The labels of 1 to `most` examples, in any order."""
    return st.lists(st.integers(0, classes - 1), min_size=1, max_size=most).map(np.array)


@st.composite
def starts_and_samples(draw, ells=(1, 2, 3, 6), dims=(1, 2, 5)):
    """(θ₀, ℓ × d samples): coordinates of one scale or of many, θ₀ among the samples or far off."""
    ell, dim = draw(st.sampled_from(ells)), draw(st.sampled_from(dims))
    scales = draw(hnp.arrays(np.float64, dim, elements=powers_of_two(-10, 10)))
    samples = scales * draw(arrays(ell, dim))
    samples += draw(powers_of_two(-7, 10)) * draw(arrays(dim) | st.just(np.zeros(dim)))
    somewhere = st.builds(np.multiply, powers_of_two(-7, 10), arrays(dim))
    theta0 = draw(somewhere | st.sampled_from(range(ell)).map(lambda row: samples[row]))
    return theta0, samples


@st.composite
def regressions(draw, most, dim):
    """{"x": (n, d), "y": (n,)}, n from 1 to `most`: repeated rows and singular XᵀX among them."""
    n = draw(st.integers(1, most))
    return {"x": draw(arrays(n, dim)), "y": draw(arrays(n))}
