"""Conformal sets: the threshold's rank by brute force, and the guarantee by simulation."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from fedpa.data import from_mapping
from fedpa.errors import DataError
from fedpa.metrics import (
    calibrate_sets,
    conformal_sets,
    conformal_threshold,
    make_evaluator,
    sketch_scores,
)
from fedpa.objectives import Likelihood
from tests.refusals import refused

LIKELIHOOD = Likelihood(lambda params, batch: batch["f"])
SCORES = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4)


@given(SCORES, st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 0.9]))
def test_the_rank_by_brute_force(clients, alpha):
    """The lowest score with at least (1 − α)(N + K) scores up to it."""
    every = sorted(score for client in clients for score in client)
    needed = (1 - Fraction(str(alpha))) * (len(every) + len(clients))
    enough = [s for s in every if sum(other <= s for other in every) >= needed]
    sketches = [sketch_scores(np.array(client, float)) for client in clients]
    assert conformal_threshold(sketches, alpha) == (enough[0] if enough else math.inf)


@given(SCORES, st.integers(1, 4))
def test_a_sketch_replaces_scores_by_higher_ones(clients, size):
    for client in clients:
        sketch = sketch_scores(np.array(client, float), size)
        assert len(sketch.scores) == min(size, len(client))
        assert sketch.counts.sum() == len(client)
        stands = np.repeat(sketch.scores, sketch.counts)
        assert (stands >= np.sort(client)).all()
        assert set(sketch.scores) <= set(client)
        assert stands[-1:].tolist() == sorted(client)[-1:]


def test_coverage_is_guaranteed_for_the_mixture_of_clients():
    """Clients differ in their sizes and their scores; 4,000 repetitions, ±4 standard errors."""
    rng, alpha = np.random.default_rng(0), 0.2
    sizes, shapes = np.array([3, 10, 40]), np.array([0.5, 1.0, 3.0])
    total = sizes.sum() + len(sizes)
    hits = {None: [], 5: []}
    for _ in range(4_000):
        scores = [rng.beta(a, 1, n) for n, a in zip(sizes, shapes, strict=True)]
        client = rng.choice(len(sizes), p=(sizes + 1) / total)
        new = rng.beta(shapes[client], 1)
        for size in hits:
            sketches = [sketch_scores(own, size or 1_000) for own in scores]
            hits[size].append(new <= conformal_threshold(sketches, alpha))
    noise = 4 * math.sqrt(alpha * (1 - alpha) / 4_000)
    assert 1 - alpha - noise < np.mean(hits[None]) < 1 - alpha + len(sizes) / total + noise
    assert np.mean(hits[5]) > 1 - alpha - noise  # a coarse sketch covers more, never less
    assert np.mean(hits[5]) >= np.mean(hits[None])


def make_clients(likelihood, sizes=(4, 0, 9)):
    rng = np.random.default_rng(1)
    shape = (3,) if likelihood.ignored is None else (2, 3)
    return {
        str(k): {
            "f": rng.normal(size=(n, *shape)).astype(np.float32),
            "y": rng.integers(0, 3, (n, *shape[:-1])).astype(np.int32),
        }
        for k, n in enumerate(sizes)
    }


@pytest.mark.parametrize("ignored", [None, 0])
def test_sets_of_a_federation(ignored):
    likelihood = LIKELIHOOD._replace(ignored=ignored)
    clients = make_clients(likelihood)
    p = {name: softmax(client["f"].astype(float), axis=-1) for name, client in clients.items()}
    counted = {name: client["y"] != ignored for name, client in clients.items()}
    own = {
        name: 1 - np.take_along_axis(p[name], client["y"][..., None], axis=-1)[..., 0]
        for name, client in clients.items()
    }
    sketches = [sketch_scores(own[name][counted[name]]) for name in ("0", "2")]  # "1" has none
    expected = conformal_threshold(sketches, 0.3)
    found = calibrate_sets(likelihood, None, from_mapping(clients), 0.3, batch_size=3)
    assert found == pytest.approx(expected, rel=1e-5)

    threshold = expected + 1e-4  # between two scores
    evaluate = make_evaluator(conformal_sets(likelihood, threshold), from_mapping(clients), 5)
    evaluation = evaluate(None)
    inside = np.concatenate([(1 - p[name] <= threshold)[counted[name]] for name in clients])
    covered = np.concatenate([(own[name] <= threshold)[counted[name]] for name in clients])
    assert evaluation.values == pytest.approx(
        {"coverage": covered.mean(), "set_size": inside.sum(axis=1).mean()}
    )
    for place, name in ((0, "0"), (2, "2")):
        mine = (own[name] <= threshold)[counted[name]].mean()
        assert evaluation.by_client["coverage"][place] == pytest.approx(mine)
    assert math.isnan(evaluation.by_client["coverage"][1])


def test_draws_are_averaged():
    f = np.float32([[[9, 0], [0, 9]]] * 9)
    data = from_mapping({"a": {"f": f, "y": np.zeros(9, np.int32)}})
    found = calibrate_sets(
        LIKELIHOOD, None, data, outputs=lambda params, batch: batch["f"].swapaxes(0, 1)
    )
    assert found == pytest.approx(0.5)


def test_an_infinite_threshold_takes_all_classes():
    batch = {"f": jnp.array([[0.0, -jnp.inf, 1.0]]), "y": jnp.array([1])}
    each = conformal_sets(LIKELIHOOD, math.inf).measure(None, batch).each
    assert {name: float(v[0]) for name, v in each.items()} == {
        "labels": 1.0,
        "covered": 1.0,
        "size": 3.0,
    }


def test_what_has_no_guarantee_is_refused():
    for alpha in (0, 1, -0.1, float("nan"), True, "0.1"):
        with refused(f"alpha = {alpha!r}"):
            conformal_threshold([sketch_scores(np.ones(3))], alpha)
    with refused("sketches"):
        conformal_threshold([], 0.1)
    with refused("size = 0"):
        sketch_scores(np.ones(3), 0)
    with refused("scores"):
        sketch_scores(np.array([1.0, np.nan]))
    with refused("link = 'sigmoid'"):
        conformal_sets(LIKELIHOOD._replace(link="sigmoid"), 0.5)
    ignoring = LIKELIHOOD._replace(ignored=0)
    clients = make_clients(ignoring)
    for client in clients.values():
        client["y"][:] = 0
    with refused("3 clients", kind=DataError):
        calibrate_sets(ignoring, None, from_mapping(clients))
