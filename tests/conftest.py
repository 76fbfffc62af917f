"""Strictness for the whole suite: no silent promotion of dtypes or ranks; Hypothesis's profiles."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import fedpa

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# What one test compiles serves the others of this run, in all its processes; nothing is kept.
CACHE = Path(tempfile.gettempdir()) / (
    "fedpa-tests-" + os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
fedpa.configure()  # as the command does


@pytest.fixture(autouse=True)
def _signals():
    """A command that a signal ends leaves signals ignored, and processes begun later inherit it."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        shutil.rmtree(CACHE, ignore_errors=True)


settings.register_profile(
    "fedpa",
    deadline=None,
    derandomize=True,
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Searches at random: a failure prints the example and what reproduces it, and is tried first in
# the next run. HYPOTHESIS_MAX_EXAMPLES makes the search shorter or longer.
settings.register_profile(
    "thorough",
    settings.get_profile("fedpa"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    print_blob=True,
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "500")),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fedpa"))


@pytest.fixture
def x64():
    """Double precision for tests of statements that hold to more than seven digits."""
    with jax.enable_x64(True):
        yield
