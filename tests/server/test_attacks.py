"""What clients that lie can do: less than a stated multiple of what honest clients differ by.

Of n results, f are chosen by somebody who knows the others. Let R be the largest distance of an
honest result from the honest mean c. The bounds follow from the definitions, for every attack;
those of geometric median and centered clipping are of their fixed number of passes.
"""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from benchmarks.attacks import (
    ATTACKS,
    CLIENTS,
    LABELS,
    list_aggregations,
    make_digits,
    make_least_squares,
    run_attacks,
)
from fedpa.engines.program import bytes_of_sum
from fedpa.privacy.clipping import joint_norm
from fedpa.server import add_all, parse_aggregation
from fedpa.training.problem import prepare
from fedpa.training.provenance import describe_program
from tests.refusals import refused
from tests.strategies import arrays, powers_of_two

N, DIM = 11, 3
ROUNDING = 1e-4
SENT = [name for place, name in enumerate(ATTACKS) if place != LABELS]


@functools.cache
def compiled(name):
    aggregation = parse_aggregation(name)

    @jax.jit
    def aggregate(rows, weights):
        total, accepted = add_all(aggregation, {"a": rows[:, :2], "b": rows[:, 2]}, weights)
        value = aggregation.value(total)
        return jnp.append(value.mean["a"], value.mean["b"]), value.weight, accepted

    return aggregate


def aggregate(name, rows, weights=None):
    weights = np.ones(len(rows)) if weights is None else weights
    mean, _, accepted = compiled(name)(
        jnp.asarray(rows, jnp.float32), jnp.asarray(weights, jnp.float32)
    )
    assert accepted.all()
    return np.asarray(mean, np.float64)


@functools.cache
def compiled_attack(name):
    return jax.jit(ATTACKS[name])


@st.composite
def rounds(draw, most):
    """(all rows in any order, who lies): an attack by name, or any numbers of any size."""
    malicious = draw(st.integers(0, most))
    scale = draw(powers_of_two(-10, 10))
    rows = (scale * draw(arrays(N, DIM))).astype(np.float32)
    is_liar = np.arange(N) < malicious
    if draw(st.booleans()):
        rows, _ = compiled_attack(draw(st.sampled_from(SENT)))(
            jnp.asarray(rows), jnp.ones(N), jnp.asarray(is_liar)
        )
        rows = np.array(rows)
    else:
        lies = draw(arrays(N, DIM)) * draw(powers_of_two(-20, 120))
        rows[:malicious] = lies[:malicious].astype(np.float32)
    order = draw(st.permutations(range(N)))
    return rows[order], is_liar[order]


def measure(rows, is_liar):
    """c, R, and the largest size of an honest number, for rounding."""
    honest = rows[~is_liar].astype(np.float64)
    center = honest.mean(0)
    return center, np.linalg.norm(honest - center, axis=1).max(), np.abs(honest).max()


def check_distance(name, case, times):
    rows, is_liar = case
    center, radius, size = measure(rows, is_liar)
    off = np.linalg.norm(aggregate(name, rows) - center)
    assert off <= times * radius + ROUNDING * size, (off, radius)


def check_range(name, case):
    """Every coordinate is between the honest clients' smallest and largest."""
    rows, is_liar = case
    found, honest = aggregate(name, rows), rows[~is_liar].astype(np.float64)
    slack = ROUNDING * np.abs(honest).max()
    assert (honest.min(0) - slack <= found).all(), found
    assert (found <= honest.max(0) + slack).all(), found


@given(rounds(most=2))
def test_a_trimmed_mean_is_in_the_honest_range(case):
    check_range("trimmed-mean:0.2", case)


@given(rounds(most=(N - 1) // 2))
def test_a_median_is_in_the_honest_range(case):
    check_range("median", case)


@given(rounds(most=2))
def test_bucketing_is_in_the_honest_range(case):
    """Two liars spoil two of six buckets, which a trimmed mean of 0.4 leaves out."""
    check_range("bucketing:2:trimmed-mean:0.4", case)


@given(rounds(most=4))
def test_a_geometric_median_is_as_close_as_its_breakdown_point_says(case):
    """‖z − c‖ ≤ 2 (n − f)/(n − 2f) R for the minimizer; to within R after its passes."""
    malicious = case[1].sum()
    check_distance("geometric-median", case, 2 * (N - malicious) / (N - 2 * malicious) + 1)


@given(rounds(most=4))
def test_multi_krum_is_as_close_as_the_scores_allow(case):
    """A row with the score of an honest one is within 2R √((n − f − 2)/(n − 2f − 1)) of one."""
    f = 4
    times = 1 + 2 * math.sqrt((N - f - 2) / (N - 2 * f - 1))
    check_distance(f"multi-krum:{f}", case, times)


@given(rounds(most=4))
def test_centered_clipping_is_as_close_as_its_passes_allow(case):
    """It starts within 2R √d; each pass moves by at most the median distance to the center.

    That is at most R more than the center's own distance e: e ← 2e + R, three times.
    """
    start = 2 * math.sqrt(DIM)
    check_distance("centered-clipping", case, 8 * start + 7)


@given(rounds(most=4), st.lists(st.integers(1, 10**7), min_size=N, max_size=N))
def test_a_clipped_mean_moves_by_the_liars_share_of_the_weights(case, weights):
    rows, is_liar = case
    bound, q = 2.0, np.array(weights, np.float64)
    wide = rows.astype(np.float64)
    clipped = wide * np.minimum(1, bound / np.maximum(np.linalg.norm(wide, axis=1), 1e-9))[:, None]
    honest = q[~is_liar] @ clipped[~is_liar] / q[~is_liar].sum()
    share = q[is_liar].sum() / q.sum()
    off = np.linalg.norm(aggregate(f"clipped-mean:{bound:g}", rows, weights) - honest)
    assert off <= share * (bound + np.linalg.norm(honest)) + ROUNDING * bound


@pytest.mark.parametrize("name", [*list_aggregations(0.2, N).values()][2:])
def test_claimed_examples_do_not_count(name):
    rows = np.random.default_rng(0).standard_normal((N, DIM))
    weights = np.random.default_rng(1).integers(1, 10**7, N)
    np.testing.assert_allclose(aggregate(name, rows, weights), aggregate(name, rows), rtol=1e-5)


@given(rounds(most=4))
def test_a_clipped_result_is_never_longer_than_its_bound(case):
    """Its sum of one has at most the norm that privacy accounts for; it is refused all the same."""
    for row in case[0]:
        found = aggregate("clipped-mean:0.5", row[None])
        assert float(joint_norm(jnp.asarray(found, jnp.float32))) <= 0.5 * (1 + 1e-5)


# Whole runs of FedAvg.

TIMES = 30
"""Of the error without an attack, at most; without one it is 0.01 to 0.06 on least squares.

The worst measured is 21, of centered clipping under the inner product of 40 %; the weighted mean's
under the sign flip of 10 % is above 50,000."""


def check_runs(share, name, attacks=tuple(ATTACKS)):
    spelled = list_aggregations(share)[name]
    errors = run_attacks(make_least_squares(), spelled, round(share * CLIENTS), attacks)
    allowed = TIMES * max(errors["none"], 0.01)
    assert all(error <= allowed for error in errors.values()), (name, errors)


ROBUST = [name for name in list_aggregations(0.1) if name not in ("weighted mean", "clipped mean")]
WITHSTOOD = [
    (name, share)
    for name in ROBUST
    for share in (0.1, 0.2, 0.4)
    if (name, share) != ("bucketing", 0.4)  # 0.8 of the buckets: beyond its breakdown point
]


@pytest.mark.parametrize("name", ["trimmed mean"])
def test_a_run_under_attack_ends_where_it_would_without(name):
    check_runs(0.2, name)


@pytest.mark.long
@pytest.mark.parametrize(("name", "share"), WITHSTOOD)
def test_every_run_under_attack_ends_where_it_would_without(name, share):
    check_runs(share, name)


def test_one_liar_moves_the_mean_anywhere():
    found = run_attacks(make_least_squares(), "weighted-mean", 2, ("none", "times a million"))
    assert found["none"] < 0.05
    assert not found["times a million"] < 1e6


@pytest.mark.long
@pytest.mark.parametrize("name", ["trimmed mean", "median", "geometric median", "multi-Krum"])
def test_flipped_labels_of_digits_cost_little(name):
    spelled = list_aggregations(0.2)[name]
    found = run_attacks(make_digits(), spelled, 4, ("none", "label flip"))
    assert found["none"] > 0.8
    assert found["label flip"] > found["none"] - 0.1, found


# Refusals.


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("trimmed-mean:0.5", "share = 0.5"),
        ("trimmed-mean:-0.1", "share = -0.1"),
        ("trimmed-mean:nan", "share = nan"),
        ("clipped-mean:0", "bound = 0.0"),
        ("clipped-mean:inf", "bound = inf"),
        ("centered-clipping:-1", "bound = -1.0"),
        ("multi-krum:-1", "malicious = -1"),
        ("bucketing:0:median", "size = 0"),
        ("bucketing:2:trimmed-mean:0.6", "share = 0.6"),
        ("bucketing:2", "aggregation = "),
        ("multi-krum:1.5", "aggregation = "),
        ("clipped-mean", "aggregation = "),
        ("mediam", "median"),
    ],
)
def test_settings_out_of_range_are_refused(text, field):
    with refused(field):
        parse_aggregation(text)


DATA = {f"c{i}": {"x": np.eye(3, dtype=np.float32), "y": np.ones(3, np.float32)} for i in range(8)}


def method_of(aggregation, **settings):
    local = fedpa.LocalTraining(0.1, batch_size=3)
    return fedpa.fedavg(
        local, fedpa.Server(fedpa.server.sgd(1.0), aggregation=aggregation, **settings)
    )


LOSS = fedpa.objectives.least_squares.loss
PACKED = fedpa.data.from_mapping(DATA)
SPELLED = [*list_aggregations(0.2).values()]


def simulate(method, **settings):
    return fedpa.simulate(
        LOSS, np.zeros(3), DATA, method, rounds=1, clients_per_round=6, **settings
    )


def fit(method, clients=DATA, size=6, **settings):
    return fedpa.fit(
        LOSS,
        np.zeros(3),
        clients,
        method,
        rounds=1,
        clients_per_round=size,
        progress=False,
        **settings,
    )


@pytest.mark.parametrize("run", [fit, simulate])
def test_cohorts_that_are_too_small_are_refused_before_any_work(run, tmp_path):
    settings = {"out": tmp_path / "run"} if run is fit else {"seeds": 1}
    with refused("clients_per_round = 6", "7"):
        run(method_of(fedpa.server.multi_krum(2)), **settings)
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_in_memory_is_refused_before_any_client_runs(monkeypatch):
    monkeypatch.setattr("fedpa.engines.machine.count_free_bytes", lambda device: 100)
    with refused("6 clients", "clipped_mean"):
        fit(method_of(fedpa.server.median()))


def test_memory_is_that_of_all_results_or_of_one():
    sent = jax.eval_shape(lambda: (jnp.zeros(1000), jnp.zeros(())))
    sizes = {name: bytes_of_sum(parse_aggregation(name), sent, 10) for name in SPELLED}
    of_one = {"weighted-mean", "clipped-mean:1"}
    assert sizes == {name: 4004 * (1 if name in of_one else 10) for name in SPELLED}


@pytest.mark.long
def test_the_estimate_counts_results_that_are_kept():
    theta = np.zeros(10_000, np.float32)
    clients = {f"c{i}": np.ones((2, 10_000), np.float32) for i in range(10)}
    memory = {
        name: fedpa.estimate(
            lambda theta, batch, key: (batch @ theta) ** 2,
            theta,
            clients,
            method_of(parse_aggregation(name)),
            clients_per_round=10,
        )
        .phases["training"]
        .memory
        for name in ("weighted-mean", "median")
    }
    assert memory["median"] >= memory["weighted-mean"] + 7 * theta.nbytes


@pytest.mark.parametrize(
    ("sizes", "weighting", "warns"),
    [((3, 1), "examples", True), ((3, 3), "examples", False), ((3, 1), "uniform", False)],
)
def test_unequal_clients_are_warned_of_where_weights_are_ignored(sizes, weighting, warns):
    unequal = {str(n): {k: v[:n] for k, v in DATA["c0"].items()} for n in sizes}
    method = method_of(fedpa.server.median(), weighting=weighting)
    data = fedpa.data.from_mapping(unequal)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(fedpa.Objective(LOSS), np.zeros(3, np.float32), data, method, 1)
    assert any("ignores weights" in str(one.message) for one in caught) == warns


@pytest.mark.parametrize("aggregation", [fedpa.server.clipped_mean(1.0), fedpa.server.median()])
def test_means_alone_are_made_private_or_averaged_as_precisions(aggregation):
    method = method_of(aggregation)
    private = fedpa.private(method, clip=1.0, noise_multiplier=1.0, delta=1e-3)
    for refusing in (private, fedpa.global_precision(method)):
        with pytest.raises(fedpa.FedpaError, match=r"^aggregation = "):
            refusing(fedpa.Objective(LOSS))


def test_an_update_far_longer_than_the_others_is_counted_and_named():
    clients = {**DATA, "c3": {**DATA["c3"], "y": np.full(3, 1e4, np.float32)}}
    with pytest.warns(UserWarning, match=r"client c3: .* times as long as"):
        result = fit(method_of(fedpa.server.median()), clients, size=8)
    assert result.history[0]["train/outliers"] == 1


def test_a_run_with_another_aggregation_is_not_resumed(tmp_path):
    """Functions can't be compared: a probe of a few clients tells their settings apart."""
    probes = {
        name: describe_program(
            method_of(parse_aggregation(name)),
            prepare(
                fedpa.Objective(LOSS),
                np.zeros(3, np.float32),
                PACKED,
                method_of(parse_aggregation(name)),
                None,
            ),
        )
        for name in (
            "trimmed-mean:0.2",
            "trimmed-mean:0.4",
            "clipped-mean:0.01",
            "clipped-mean:0.02",
        )
    }
    assert len(set(probes.values())) == 4, probes
