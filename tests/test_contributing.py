"""The sampler worked through in CONTRIBUTING.md passes what it says it passes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.samplers import draw
from tests.samplers.gaussian import HESSIAN, check_gaussian, target

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def test_the_worked_sampler_passes_the_gaussian_test():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {"__name__": "contributed"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    t = target(capacity=64)
    sampler = names["metropolis"](t.objective, step_size=1.0, steps=5)
    check_gaussian(sampler, t.data, t.posterior.mean, np.linalg.inv(HESSIAN), num=20_000)
    empty = t.data._replace(n=jnp.asarray(0, jnp.int32))
    samples, infos = draw(sampler, jnp.array([4.0, 4.0]), empty, jax.random.key(0), 3)
    np.testing.assert_array_equal(samples, 4.0)
    assert infos.acceptance.shape == (3,)
