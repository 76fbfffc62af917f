"""Bayesian logistic regression: EP and PVI against NUTS on the pooled data, over the grid.

`python -m benchmarks.posterior_grid docs/posterior.csv` writes all ways' errors.
"""

import pytest

from benchmarks.posterior_grid import GRID, Cell, measure


def cells(short):
    """All of the grid, `short` alone in the shorter suite."""
    return pytest.mark.parametrize(
        "cell", [pytest.param(cell, marks=[pytest.mark.long] * (cell != short)) for cell in GRID]
    )


@cells(short=None)
def test_ep_has_the_moments_of_pooled_nuts(cell):
    (row,) = measure(cell, ["ep"])
    assert row.converged
    assert row.mean_error < 0.1
    assert row.sd_error < 0.1


@cells(short=Cell(5, 5, "separable"))
def test_pvi_is_the_pooled_variational_gaussian(cell):
    (row,) = measure(cell, ["pvi"])
    assert row.converged
    assert row.mean_error < 0.1
    assert row.sd_error < 0.15
    assert row.variational_sd_error < 0.02
