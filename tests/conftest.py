"""Strictness for the whole suite: no silent promotion of dtypes or ranks, fixed examples."""

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "fedpa",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fedpa")


@pytest.fixture
def x64():
    """Double precision for tests of statements that hold to more than seven digits."""
    with jax.enable_x64(True):
        yield
