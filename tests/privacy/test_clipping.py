"""One client moves a round's sum by at most C, and replacing one by at most 2C: every method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.algorithms.fedopt import ClientResult, Sent
from fedpa.objectives import ClientData, Objective, least_squares
from fedpa.precisions.kronecker import Kronecker
from fedpa.privacy.clipping import ROUNDING, AdaptiveClip, adapt, clip_factor, split_noise
from tests.algorithms.test_conformance import CLIENTS, METHODS, SERVER
from tests.refusals import refused
from tests.strategies import arrays, powers_of_two

REFUSED = {"scaffold", "mime", "centralized"}
AVERAGING = [name for name in METHODS if name not in REFUSED]
BUDGET = {"noise_multiplier": 1.0, "delta": 1e-3}
DIM = 3


def layered_loss(params, batch, key):
    """Least squares whose layer is declared, as methods with precisions need."""
    x = fedpa.layer_input(batch["x"], params["w"], params["b"])
    return (x @ params["w"][:, 0] + params["b"][None, 0] - batch["y"]) ** 2


LAYERED = {"w": jnp.zeros((DIM, 1)), "b": jnp.zeros(1)}
EXAMPLES = CLIENTS["client-0000"]


def build(name):
    """(θ, algorithm) of a method, before it is private."""
    layered = "precision" in name
    theta = LAYERED if layered else jnp.zeros(DIM)
    loss = layered_loss if layered else least_squares.loss
    method = METHODS[name]
    if name == "global-precision":
        method = fedpa.global_precision(METHODS["fedavg"], every=2, rank="exact")
    return theta, method(Objective(loss, like=EXAMPLES))


def sent_by(algorithm, theta, phase):
    """The shapes of what a client sends."""
    data = ClientData(jax.tree.map(jnp.asarray, EXAMPLES), jnp.asarray(3, jnp.int32))
    message = algorithm.broadcast(algorithm.init(theta), jnp.asarray(0))
    return jax.eval_shape(
        algorithm.clients[phase], message, data, algorithm.client_init(theta), jax.random.key(0)
    )


SHAPES = {}
for _name in AVERAGING:
    _theta, _algorithm = build(_name)
    for _phase in _algorithm.clients:
        SHAPES[_name, _phase] = _theta, _algorithm, sent_by(_algorithm, _theta, _phase)


def fill(shapes, numbers):
    """A result of these shapes from a few numbers, repeated; not all finite, perhaps."""
    leaves, structure = jax.tree.flatten(shapes)
    filled = [
        jnp.asarray(np.resize(np.roll(numbers, k), leaf.shape), leaf.dtype)
        for k, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, filled)


def add_up(name, phase, results, sizes, clip, **options):
    """Σ c_i u_i r_i as the server has it before the noise, a flat vector in the units of C."""
    theta, algorithm, out = SHAPES[name, phase]
    place = iter(results)

    def client(message, data, state, key):
        return ClientResult(fill(out.result, next(place)), jnp.ones(()), state, ())

    stub = algorithm._replace(clients={phase: client})
    made = fedpa.private(lambda objective: stub, clip=clip, **BUDGET, **options)
    private = made(Objective(least_squares.loss))
    state = private.init(theta)
    message, total = private.broadcast(state, jnp.asarray(0)), None
    accepted = []
    for n in sizes:
        data = ClientData(EXAMPLES, jnp.asarray(n, jnp.int32))
        sent = private.clients[phase](message, data, (), jax.random.key(0))
        total = private.aggregation.init(sent.result, sent.weight) if total is None else total
        total, ok = private.aggregation.add(total, sent.result, sent.weight)
        accepted.append(bool(ok))
    mean = private.aggregation.value(total).mean.result
    scale = options.get("extra_scale", 1.0)
    if isinstance(mean, Sent):
        mean = mean._replace(more=jax.tree.map(lambda x: scale * x, mean.more))
    flat = [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(mean)]
    return np.concatenate(flat), accepted


CASES = st.lists(
    st.tuples(st.builds(np.multiply, powers_of_two(-20, 40), arrays(5)), st.integers(0, 40)),
    min_size=2,
    max_size=4,
)


def list_cases():
    """Methods and phases; what is sent in the form of another's is tried by `make test-all`."""
    seen, cases = set(), []
    for place, (_, _, out) in SHAPES.items():
        form = str(jax.tree.structure(out.result))
        cases.append(pytest.param(*place, marks=[pytest.mark.long] * (form in seen)))
        seen.add(form)
    return cases


@pytest.mark.parametrize(("name", "phase"), list_cases())
@given(
    rows=CASES,
    clip=powers_of_two(-6, 6),
    cap=st.none() | st.integers(1, 30).map(float),
    extra_scale=powers_of_two(-4, 1),
)
def test_the_sum_moves_by_at_most_the_clipping_norm(name, phase, rows, clip, cap, extra_scale):
    results, sizes = [row for row, _ in rows], [n for _, n in rows]
    options = {"weight_cap": cap, "extra_scale": extra_scale}
    whole, _ = add_up(name, phase, results, sizes, clip, **options)
    rounding = 4e-6 * clip * len(rows)
    fewer, _ = add_up(name, phase, results[1:], sizes[1:], clip, **options)
    assert np.linalg.norm(whole - fewer) <= clip + rounding
    other, _ = add_up(name, phase, [-results[0], *results[1:]], sizes, clip, **options)
    assert np.linalg.norm(whole - other) <= 2 * clip + rounding


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rejected_client_counts_as_zero(bad):
    good, others = [np.ones(5), np.full(5, bad), np.ones(5)], [np.ones(5), np.ones(5)]
    with_bad, accepted = add_up("fedavg", "training", good, [4, 4, 4], 1.0)
    without, _ = add_up("fedavg", "training", others, [4, 4], 1.0)
    np.testing.assert_array_equal(with_bad, without)
    assert accepted == [True, False, True]


def test_the_clipped_norm_is_that_of_all_that_is_sent():
    """Of global precision: Δ and the exact factors, not Δ alone."""
    phase = next(phase for name, phase in SHAPES if phase.endswith("with precision"))
    total, _ = add_up("global-precision", phase, [np.ones(5)], [4], 0.25)
    assert np.linalg.norm(total) == pytest.approx(0.25, rel=1e-5)
    assert np.linalg.norm(total[: DIM + 1]) < 0.2


def test_weights_are_uniform_or_capped():
    small = [np.full(5, 1e-3)]
    alone = np.linalg.norm(add_up("fedavg", "training", small, [4], 1.0)[0])
    for n, cap, weight in [(40, None, 1), (0, None, 0), (4, 16.0, 0.25), (40, 16.0, 1)]:
        total, _ = add_up("fedavg", "training", small, [n], 1.0, weight_cap=cap)
        assert np.linalg.norm(total) == pytest.approx(weight * alone, rel=1e-5, abs=1e-12)


@given(norm=powers_of_two(-30, 30) | st.just(np.inf) | st.just(0.0), clip=powers_of_two(-10, 10))
def test_the_factor_is_never_above_one_nor_the_norm_above_the_bound(norm, clip):
    c = float(clip_factor(jnp.float32(norm), jnp.float32(clip)))
    assert 0 <= c <= 1
    if np.isfinite(norm):
        assert c * norm <= clip
        assert c == 1 or norm > clip * (1 - 2 * ROUNDING)


@given(z=powers_of_two(-3, 3), ratio=st.floats(0.51, 20))
def test_results_and_counts_together_are_one_mechanism(z, ratio):
    """Two Gaussian mechanisms of z₁ and z₂ are one of (z₁⁻² + z₂⁻²)^{−1/2}."""
    count_noise = ratio * z
    z_delta = split_noise(z, count_noise)
    assert (z_delta**-2 + (2 * count_noise) ** -2) ** -0.5 == pytest.approx(z)


def test_adaptive_clipping_finds_the_quantile():
    norms = np.linspace(0.1, 4.1, 101)
    clip, settings = jnp.float32(0.01), AdaptiveClip(0.01, quantile=0.8)
    for _ in range(200):
        share = jnp.float32(np.mean(norms <= float(clip)))
        clip = adapt(clip, share, settings)
    assert float(clip) == pytest.approx(np.quantile(norms, 0.8), abs=0.15)
    assert float(adapt(clip, jnp.float32(np.nan), settings)) == float(clip)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_that_cant_be_private_are_refused_by_name(name):
    with refused(f"method = {name!r}"):
        fedpa.private(METHODS[name], clip=1.0, **BUDGET)(Objective(least_squares.loss))


def refuse_method(method, *anchors):
    made = fedpa.private(method, clip=1.0, **BUDGET)
    with refused(*anchors):
        algorithm = made(Objective(least_squares.loss, prior=fedpa.normal_prior(sd=1.0)))
        algorithm.init(jnp.zeros(DIM))


def test_methods_of_other_kinds_are_refused():
    refuse_method(fedpa.algorithms.ep(), "method = 'ep'")
    refuse_method(fedpa.algorithms.laplace(), "method = 'laplace'")
    private = fedpa.private(METHODS["fedavg"], clip=1.0, **BUDGET)
    refuse_method(private, "method = 'private'")
    switching = fedpa.switch_at_plateau(
        lambda rounds: fedpa.fedpa(
            fedpa.LocalTraining(0.1, 4, epochs=2), SERVER, rho=0.1, burn_in_rounds=rounds
        )
    )
    refuse_method(switching, "burn_in_rounds = 'auto'")
    mean = SERVER.aggregation
    robust = SERVER._replace(aggregation=mean._replace(value=lambda total: mean.value(total)))
    refuse_method(fedpa.fedavg(fedpa.LocalTraining(0.1, 4), robust), "aggregation = Aggregation")


@pytest.mark.parametrize(
    ("settings", "anchor"),
    [
        ({"clip": 0.0}, "clip = 0.0"),
        ({"clip": -1}, "clip = -1"),
        ({"clip": AdaptiveClip(0.0)}, "clip = 0.0"),
        ({"clip": AdaptiveClip(1.0, quantile=1.0)}, "clip_quantile = 1.0"),
        ({"clip": AdaptiveClip(1.0, rate=-0.1)}, "clip_rate = -0.1"),
        ({"clip": AdaptiveClip(1.0, count_noise=0.5)}, "count_noise = 0.5"),
        ({"noise_multiplier": 0}, "noise_multiplier = 0"),
        ({"delta": 1.5}, "delta = 1.5"),
        ({"weight_cap": 0.0}, "weight_cap = 0.0"),
        ({"extra_scale": 0.0}, "extra_scale = 0.0"),
        ({"max_epsilon": -1.0}, "max_epsilon = -1.0"),
        ({"bands": 0}, "bands = 0"),
        ({"bands": 2}, "bands = 2"),
        ({"bands": 2, "sampling": "cyclic", "clip": AdaptiveClip(1.0)}, "bands = 2"),
        ({"sampling": "all"}, "sampling = 'all'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, anchor):
    with refused(anchor):
        fedpa.private(METHODS["fedavg"], **{"clip": 1.0, **BUDGET, **settings})


def test_what_noise_makes_of_a_matrix_is_repaired():
    """Symmetric and positive semidefinite; without noise, the nearest."""
    a = jnp.asarray([[[2.0, 1.0], [0.0, -1.0]]])
    values, vectors = np.linalg.eigh(np.array([[2.0, 0.5], [0.5, -1.0]]))
    expected = vectors @ np.diag(np.maximum(values, 0)) @ vectors.T
    np.testing.assert_allclose(Kronecker(a).denoise(0.0).blocks[0], expected, atol=1e-6)
    diagonal = Kronecker(jnp.asarray([[[3.0]], [[-1.0]]]))
    assert diagonal.denoise(0.5).blocks.tolist() == [[[3.0]], [[0.0]]]


def test_noise_alone_leaves_hardly_a_precision_and_a_signal_stays():
    """The edge of the noise's spectrum is where its largest eigenvalue is."""
    size, sd = 120, 0.3
    noise = sd * np.random.default_rng(0).normal(size=(1, size, size))
    alone = Kronecker(jnp.asarray(noise, jnp.float32)).denoise(sd)
    assert np.trace(alone.blocks[0]) < 0.02 * np.abs(np.linalg.eigvalsh(noise[0])).sum()
    direction = np.ones((size, 1)) / np.sqrt(size)
    signal = 40 * sd * np.sqrt(size) * direction @ direction.T
    found = Kronecker(jnp.asarray(noise + signal, jnp.float32)).denoise(sd).blocks[0]
    assert float(direction[:, 0] @ np.asarray(found) @ direction[:, 0]) > 0.9 * np.trace(signal)
