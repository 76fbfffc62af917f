"""Bayesian logistic regression: EP and PVI against NUTS on the pooled data, over the grid.

`python -m benchmarks.posterior_grid docs/posterior.csv` writes all ways' errors.
"""

import pytest

from benchmarks.posterior_grid import GRID, Cell, measure

SHORT = [Cell(5, 5, "label"), Cell(5, 5, "separable")]
cells = pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.long] * (cell not in SHORT)) for cell in GRID]
)


@cells
def test_ep_has_the_moments_of_pooled_nuts(cell):
    (row,) = measure(cell, ["ep"])
    assert row.converged
    assert row.mean_error < 0.1
    assert row.sd_error < 0.1


@cells
def test_pvi_is_the_pooled_variational_gaussian(cell):
    (row,) = measure(cell, ["pvi"])
    assert row.converged
    assert row.mean_error < 0.1
    assert row.sd_error < 0.15
    assert row.variational_sd_error < 0.02
