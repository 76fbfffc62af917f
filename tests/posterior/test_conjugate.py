"""Every way of `fedpa.infer` is exact where likelihoods are Gaussian, whatever the split.

A new way joins by a row in `WAYS`.
"""

import functools
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.algorithms import ep, laplace, product, pvi, sep
from fedpa.posterior import Posterior, influence
from fedpa.posterior.agreement import warn_of_disagreement
from fedpa.sites import sampled
from tests.federations import trees_equal
from tests.posterior import conjugate
from tests.posterior.conjugate import PRIOR, assert_close, exact, make_examples, make_rounds

SLOTS, EXAMPLES = 7, 40
UNDAMPED = {"damping": 1.0, "newton_rounds": 0}
FEW = {"chains": 2, "draws": 8, "burn_in": 20}
"""Exact from d + 1 draws on: a line is fitted to scores that are one."""
WAYS = {
    "laplace": lambda structure: laplace(structure=structure),
    "pvi": lambda structure: pvi(structure=structure, **UNDAMPED),
}
for _name, _build in {
    "product": product,
    "ep": functools.partial(ep, **UNDAMPED),
    "sep": functools.partial(sep, **UNDAMPED),
}.items():
    for _inner in ("laplace", "variational", "nuts", "hmc"):
        WAYS[f"{_name}-{_inner}"] = lambda structure, build=_build, inner=_inner: build(
            inner=sampled(inner, structure, **FEW) if inner in ("nuts", "hmc") else inner,
            structure=structure,
        )

# Draws cost many seconds of compiling: the shorter suite has them in `test_logistic.py`.
SHORT = {"laplace", "pvi", "product-laplace", "ep-laplace", "sep-laplace"}
ways = pytest.mark.parametrize(
    "way", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in WAYS]
)


@functools.cache
def rounds_of(way, structure, dtype):
    return make_rounds(WAYS[way](structure), num_examples=EXAMPLES, dtype=dtype)


def run(way, sizes, *, structure="dense", dtype=np.float64, seed=0):
    """q after one round from the prior, and the exact posterior."""
    x, y = make_examples(seed, EXAMPLES, orthogonal=structure == "diagonal")
    data = conjugate.stack(conjugate.split(x, y, sizes), EXAMPLES, dtype)
    state, _ = rounds_of(way, structure, dtype)(data, jax.random.key(seed))
    return state.q, exact(x, y)


@st.composite
def splits(draw):
    """40 examples on one to seven clients of any sizes, in any order; the rest are empty."""
    cuts = draw(st.lists(st.integers(0, EXAMPLES), min_size=SLOTS - 1, max_size=SLOTS - 1))
    return np.diff([0, *sorted(cuts), EXAMPLES]).tolist()


@ways
@given(sizes=splits(), seed=st.integers(0, 999))
def test_exact_in_one_round_whatever_the_split(way, sizes, seed):
    """So the prior is counted once, an empty client changes nothing, and order does not matter."""
    with jax.enable_x64(True):
        assert_close(*run(way, sizes, seed=seed), tolerance=1e-6)


@pytest.mark.parametrize(
    "way",
    [
        "laplace",
        "ep-laplace",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("pvi", "product-nuts", "ep-nuts")
        ),
    ],
)
@given(sizes=splits(), seed=st.integers(0, 999))
def test_diagonal_precisions_are_exact_where_the_clients_are_diagonal(way, sizes, seed):
    with jax.enable_x64(True):
        assert_close(*run(way, sizes, structure="diagonal", seed=seed), tolerance=1e-6)


@pytest.mark.parametrize("way", ["ep-laplace", pytest.param("ep-nuts", marks=pytest.mark.long)])
def test_exact_up_to_rounding_in_float32(way):
    assert_close(*run(way, [1, 5, 0, 9, 20, 2, 3], dtype=np.float32), tolerance=1e-3)


@pytest.mark.parametrize("sizes", [[40], [3, 12, 25]])
@pytest.mark.parametrize(
    "method", [laplace(), ep(inner="laplace", damping=1.0, newton_rounds=1)], ids=["laplace", "ep"]
)
def test_a_flat_prior_gives_least_squares(method, sizes, x64):
    x, y = make_examples()
    data = conjugate.stack(conjugate.split(x, y, sizes), EXAMPLES, np.float64)
    rounds = make_rounds(method, num_examples=EXAMPLES, rounds=2, prior=None)
    state, _ = rounds(data, jax.random.key(0))
    assert_close(state.q, exact(x, y, flat=True), tolerance=1e-6)
    assert state.damping == 1  # no round was skipped


# Through `fedpa.infer`, in float32, as users call it.

X, Y = make_examples(3, 60)
CLIENTS = conjugate.split(X, Y, (8, 20, 5, 15, 12))
TRUTH = exact(X, Y)


def infer(clients=CLIENTS, **options):
    settings = {"prior": PRIOR, "method": "ep", "inner": "laplace", "progress": False} | options
    return fedpa.infer(conjugate.log_likelihood, np.zeros(3, np.float32), clients, **settings)


@pytest.fixture(scope="module", name="posterior")
def _posterior():
    return infer()


@pytest.mark.parametrize(
    ("method", "inner"),
    [
        ("laplace", None),
        ("sep", "laplace"),
        *(
            pytest.param(method, inner, marks=pytest.mark.long)
            for method, inner in (("product", "nuts"), ("pvi", None), ("ep", "nuts"))
        ),
    ],
)
def test_infer_gives_the_textbook_posterior(method, inner):
    posterior = infer(method=method, inner=inner)
    assert posterior.converged
    assert_close(posterior.density, TRUTH, tolerance=1e-3)
    np.testing.assert_allclose(
        posterior.covariance(), TRUTH.covariance, atol=2e-3 * TRUTH.sd.max() ** 2
    )


@pytest.mark.parametrize(
    ("method", "inner"),
    [("product", "laplace"), pytest.param("ep", "nuts", marks=pytest.mark.long)],
)
def test_a_client_without_examples_changes_nothing(method, inner):
    """It has no posterior of its own, or the cavity's: no chains are judged there."""
    posterior = infer({**CLIENTS, "empty": {"x": X[:0], "y": Y[:0]}}, method=method, inner=inner)
    assert_close(posterior.density, TRUTH, tolerance=1e-3)
    assert posterior.history[-1]["train/rejected"] == 0


def test_clients_that_return_bring_ep_to_the_exact_posterior():
    """Two of five in a round: sites that are kept make up for who is missing."""
    posterior = infer(clients_per_round=2, rounds=80, tolerance=1e-3)
    assert posterior.converged
    assert len(posterior.history) < 80
    assert_close(posterior.density, TRUTH, tolerance=5e-3)


def test_one_newton_round_is_not_known_to_be_the_mode():
    with pytest.warns(UserWarning, match=r"not converged after 1 round: .* \(tolerance = 0.001\)"):
        posterior = infer(method="laplace", inner=None, rounds=1)
    assert not posterior.converged
    assert_close(posterior.density, TRUTH, tolerance=1e-3)


def test_sep_needs_no_client_to_return():
    """Without sites the cohorts' draws are left: decreasing damping averages them."""
    with pytest.warns(UserWarning, match="not converged"):
        posterior = infer(method="sep", clients_per_round=2, rounds=60, tolerance=1e-9)
    assert not posterior.sites
    assert_close(posterior.density, TRUTH, tolerance=0.35)


@pytest.mark.parametrize(
    "engine", ["per-client", "vectorized", pytest.param("debug", marks=pytest.mark.long)]
)
def test_every_engine_gives_the_same(posterior, engine):
    options = fedpa.engines.EngineOptions()
    other = infer(engine=fedpa.engines.ENGINES[engine](options))
    assert_close(other.density, exact(X, Y), tolerance=1e-3)
    assert other.sites.keys() == posterior.sites.keys()
    for client, site in posterior.sites.items():
        for ours, theirs in zip(
            jax.tree.leaves(site), jax.tree.leaves(other.sites[client]), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.long
def test_an_interrupted_inference_ends_as_one_that_was_not(tmp_path):
    """Bit for bit, the sites of clients included; variational draws and cohorts are random."""
    options = {"clients_per_round": 2, "rounds": 12, "out": tmp_path / "whole"}
    options["recording"] = fedpa.RecordingOptions(checkpoint_every=2)

    def copy(event):
        if event.round == 8:
            shutil.copytree(tmp_path / "whole", tmp_path / "cut")

    with pytest.warns(UserWarning, match="not converged"):
        whole = infer(**options, inner="variational", tolerance=1e-9, callbacks=[copy])
    seen = []
    with pytest.warns(UserWarning, match="not converged"):
        resumed = infer(
            **options | {"out": tmp_path / "cut"},
            inner="variational",
            tolerance=1e-9,
            callbacks=[lambda event: seen.append(event.round)],
        )
    assert seen[0] in (7, 8)
    assert trees_equal(resumed.density, whole.density)
    assert trees_equal(dict(resumed.sites), dict(whole.sites))


def test_leaving_a_client_out_is_inferring_without_it(posterior):
    others = {name: data for name, data in CLIENTS.items() if name != "client-1"}
    x, y = (np.concatenate([data[name] for data in others.values()]) for name in ("x", "y"))
    without = posterior.leave_out("client-1")
    assert_close(without.density, exact(x, y), tolerance=2e-3)
    assert without.sites.keys() == others.keys()


def make_posteriors(seed, shift):
    """A federation of the model, whose fourth client's θ is elsewhere by `shift`."""
    rng = np.random.default_rng(seed)
    sizes = (5, 3, 9, 8, 10, 3, 2)
    theta = conjugate.PRIOR_MEAN + rng.normal(size=3) / np.sqrt(conjugate.PRIOR_PRECISION)
    x = rng.normal(size=(EXAMPLES, 3))
    y = x @ theta + conjugate.NOISE * rng.normal(size=EXAMPLES)
    clients = conjugate.split(x, y, sizes)
    clients["client-3"]["y"] = clients["client-3"]["y"] + clients["client-3"]["x"] @ np.full(
        3, shift
    )
    data = conjugate.stack(clients, EXAMPLES, np.float64)
    state, kept = rounds_of("ep-laplace", "dense", np.float64)(data, jax.random.key(seed))
    sites = {name: jax.tree.map(lambda leaf, i=i: leaf[i], kept) for i, name in enumerate(clients)}
    return Posterior(state.q, np.zeros(3), sites)


def test_clients_that_agree_give_no_warning(x64):
    """Warnings are errors here. p-values of clients against the others are uniform."""
    p_values = []
    for seed in range(20):
        posterior = make_posteriors(seed, shift=0.0)
        warn_of_disagreement(posterior)
        p_values += [row.p_value for row in influence(posterior)]
    # 140 uniform numbers, nearly independent: Kolmogorov's distance at a level of 0.001.
    distance = np.max(np.abs(np.sort(p_values) - np.arange(1, 141) / 141))
    assert distance < 1.95 / np.sqrt(140)


def test_a_client_that_disagrees_is_named(x64):
    for seed in range(5):
        posterior = make_posteriors(seed, shift=3.0)
        with pytest.warns(UserWarning, match="'client-3'"):
            warn_of_disagreement(posterior)
