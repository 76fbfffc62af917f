"""Table 1: what FedPA's client update costs over FedAvg's, by the number of parameters d.

Linear regression, 5 local epochs of 100 steps on batches of 10, one IASG sample per epoch. Timed
are the client updates that federated training runs, compiled:

    fedavg                θ₀ − θ_K, the last iterate
    mean                  FedPA's samples without a solve, θ₀ − x̄: what *sampling* costs
    fedpa, recurrence     Δ̂ = Σ̂⁻¹(θ₀ − x̄) by the paper's dynamic program
    fedpa, gram           the same by an ℓ×ℓ system
    fedpa, dense          the same by a d×d Cholesky solve, the paper's "exact", where it fits

and Δ̂ alone on the ℓ×d samples, which is what the *delta* costs (and the call of a program of its
own: at small d that is most of it, and the parts are more than the whole). All are called in turn,
in one run: an overhead is the median of ratios of calls that follow one another, since times
follow whatever else the machine does. d = 10⁶ goes beyond the paper. Its client has 100 examples
and visits them ten times as often, which is the same arithmetic in a tenth of the memory.
"""

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from threadpoolctl import threadpool_limits

from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Broadcast, ClientUpdate
from fedpa.algorithms.fedpa import fedpa
from fedpa.algorithms.local_training import LocalTraining, local_sampler
from fedpa.algorithms.mean import mean
from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.deltas.posterior import GramState, posterior
from fedpa.deltas.posterior_delta import posterior_delta
from fedpa.deltas.shrinkage import fixed
from fedpa.experiments.report.figures import COLOURS, MARKERS, STYLES, new_figure, tidy
from fedpa.experiments.studies.study import Row, Settings, Study, distinct, new_table, values_of
from fedpa.objectives import least_squares
from fedpa.objectives.client_data import ClientData, client_data
from fedpa.objectives.objective import Objective
from fedpa.samplers.sampler import draw as draw_samples
from fedpa.server.optimizers import sgd
from fedpa.server.update import Server
from fedpa.types import Params

RHO = 0.01
SAMPLES = 5
BATCH = 10
EXAMPLES = 1_000
EXAMPLES_FIT = 4e8
"""Bytes of examples beyond which a client gets a tenth of them."""
ORACLE_UP_TO = 1_000
"""d up to which the deltas are compared with the float64 d×d oracle, which takes O(d³) twice."""
FORMS = ("recurrence", "gram", "dense")
Name = TypeVar("Name", bound=Hashable)


class Size(NamedTuple):
    dims: tuple[int, ...]
    dense_up_to: int
    """d up to which the dense solve is part of it."""
    seconds: float
    """How long one repeat calls all of them in turn."""
    least: int
    """Calls of each in a repeat, at the least."""
    steps: int = 100
    """K: steps of an epoch, averaged into one sample."""


FULL = Size((100, 1_000, 10_000, 100_000, 1_000_000), dense_up_to=10_000, seconds=3.0, least=2)
QUICK = Size((100, 1_000, 10_000), dense_up_to=1_000, seconds=0.7, least=1)


class Published(NamedTuple):
    """The paper's table 1: milliseconds and percent over FedAvg, as printed."""

    fedavg: float
    recurrence: tuple[float, float]
    """The paper's DP."""
    dense: tuple[float, float] | None
    """The paper's exact."""


PUBLISHED = {
    100: Published(72.0, (91.0, 26.0), (82.0, 12.0)),
    1_000: Published(76.0, (92.0, 21.0), (104.0, 36.0)),
    10_000: Published(80.0, (93.0, 16.0), (797.0, 896.0)),
    100_000: Published(149.0, (155.0, 4.0), None),
}


class Problem(NamedTuple):
    objective: Objective
    local: LocalTraining
    theta0: jax.Array
    data: ClientData
    key: Any


class Variant(NamedTuple):
    """A client update, or a delta alone."""

    method: str
    form: str | None = None


FEDAVG, MEAN = Variant("fedavg"), Variant("mean")


def measure(settings: Settings) -> list[Row]:
    return measured(QUICK if settings.quick else FULL, settings)


def measured(size: Size, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    for index, dim in enumerate(size.dims):

        def tell(doing: str) -> None:
            settings.tell(index / len(size.dims), f"d = {dim:,}: {doing}")

        rows += at_dimension(dim, size, settings, tell)
    return rows


def at_dimension(
    dim: int, size: Size, settings: Settings, tell: Callable[[str], None]
) -> list[Row]:
    """All rows of one d."""
    tell("compiling")
    problem = least_squares_problem(dim, size.steps, settings.seed)
    forms = [form for form in FORMS if form != "dense" or dim <= size.dense_up_to]
    updates = {
        variant: _compiled(client, *_arguments(problem))
        for variant, client in clients(problem, forms).items()
    }
    samples = posterior_samples(problem)
    solves = {
        Variant("delta", form): _compiled(online(delta_of(form)), problem.theta0, samples)
        for form in forms
    }
    calls: dict[Variant, Callable[[], Any]] = {
        variant: functools.partial(update, *_arguments(problem))
        for variant, update in updates.items()
    } | {
        variant: functools.partial(solve, problem.theta0, samples)
        for variant, solve in solves.items()
    }
    tell("timing")
    slow = {variant: call for variant, call in calls.items() if variant.form == "dense"}
    fast = {variant: call for variant, call in calls.items() if variant not in slow}
    rows = _times(dim, interleaved(fast, settings.repeats, size.seconds, size.least))
    if slow:
        # Apart, so that the others need not wait for it; with a FedAvg of its own to compare with.
        # One thread: LAPACK's wait for one another, a hundred times longer on a shared machine.
        tell("timing the dense solve")
        with threadpool_limits(1, "blas"):
            taken = interleaved({FEDAVG: fast[FEDAVG]} | slow, settings.repeats, 0.0, 1)
        rows += _times(dim, taken, omit=FEDAVG)
    truth = reference(problem.theta0, samples)
    for form in forms:
        value = np.asarray(solves[Variant("delta", form)](problem.theta0, samples), np.float64)
        error = float(np.linalg.norm(value - truth) / np.linalg.norm(truth))
        rows.append(_row(dim, Variant("fedpa", form), "delta_error", error))
    for variant, update in updates.items():
        # One for all: they make the same steps.
        loss = float(update(*_arguments(problem)).info.loss)
        rows.append(_row(dim, variant, "loss", loss))
        rows.append(_row(dim, variant, "memory_mib", _mebibytes(update)))
    return [*rows, _row(dim, FEDAVG, "examples", int(problem.data.n))]


def least_squares_problem(dim: int, steps: int, seed: int) -> Problem:
    """y = xᵀθ* + noise, x ~ N(0, I); a rate at which nothing diverges, and θ₀ = 0."""
    rng = np.random.default_rng(seed)
    examples = EXAMPLES if 4 * EXAMPLES * dim <= EXAMPLES_FIT else EXAMPLES // 10
    x = rng.standard_normal((examples, dim), np.float32)
    truth = rng.standard_normal(dim, np.float32) / np.float32(np.sqrt(dim))
    y = x @ truth + rng.standard_normal(examples, np.float32)
    # Batches of b ≪ d examples have curvature ‖x‖²/b ≈ d/b: a twentieth of the largest stable rate.
    rate = 0.1 * BATCH / dim
    return Problem(
        Objective(least_squares.loss),
        LocalTraining(optax.sgd(rate), BATCH, samples=SAMPLES, steps_per_sample=steps),
        jnp.zeros(dim, jnp.float32),
        client_data({"x": x, "y": y}),
        jax.random.key(seed),
    )


def clients(problem: Problem, forms: Sequence[str]) -> dict[Variant, ClientUpdate]:
    """The client updates to compare."""
    objective, local, server = problem.objective, problem.local, Server(sgd(1.0))

    def sampling(form: str) -> ClientUpdate:
        if form == "dense":
            return client_update(
                lambda rate: local_sampler(objective, local, rate, average=True),
                delta_of(form),
                SAMPLES,
                server.weighting,
            )
        return fedpa(local, server, rho=RHO, form=form)(objective).clients[SAMPLING]

    return {
        FEDAVG: fedavg(local, server)(objective).clients[BURN_IN],
        MEAN: mean(local, server)(objective).clients[SAMPLING],
    } | {Variant("fedpa", form): sampling(form) for form in forms}


def delta_of(form: str) -> Delta:
    return dense() if form == "dense" else posterior(SAMPLES, fixed(RHO), form=form)


def dense() -> Delta:
    """Δ̂ = (1 + (ℓ−1)ρ) (I + ρ XᵀX)⁻¹ (θ₀ − x̄) as if there were no structure to use.

    Compiled and in the parameters' precision, as the others are (`solve_densely` is neither).
    """

    def value(state: GramState) -> tuple[Params, DeltaInfo]:
        center = jnp.mean(state.rows, axis=0)
        deviations = state.rows - center[None, :]
        sigma = jnp.eye(center.shape[0], dtype=center.dtype) + RHO * deviations.T @ deviations
        solved = jax.scipy.linalg.solve(sigma, state.theta0 - center, assume_a="pos")
        return (1 + (SAMPLES - 1) * RHO) * solved, DeltaInfo(
            jnp.full((), RHO, jnp.float32), jnp.zeros(())
        )

    return posterior(SAMPLES, fixed(RHO), form="gram")._replace(value=value)


def solve_densely(theta0: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Δ̂ with Σ̂ formed and solved with in float64: what the others' errors are measured against."""
    x = np.asarray(samples, np.float64)
    deviations = x - x.mean(0)
    sigma = np.eye(x.shape[1]) + RHO * deviations.T @ deviations
    b = np.asarray(theta0, np.float64) - x.mean(0)
    return (1 + (len(x) - 1) * RHO) * np.linalg.solve(sigma, b)


def online(delta: Delta) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(θ₀, ℓ×d samples) → Δ, sample by sample, as a client update runs it."""

    def run(theta0: jax.Array, samples: jax.Array) -> jax.Array:
        state, _ = jax.lax.scan(
            lambda state, sample: (delta.update(state, sample, sample), None),
            delta.init(theta0, jnp.asarray(EXAMPLES, jnp.int32)),
            samples,
        )
        return delta.value(state)[0]

    return run


def posterior_samples(problem: Problem) -> jax.Array:
    """The ℓ×d samples that the client update makes."""
    one = jnp.ones((), jnp.float32)
    sampler = local_sampler(problem.objective, problem.local, one, average=True)
    drawn = jax.jit(lambda theta0, data, key: draw_samples(sampler, theta0, data, key, SAMPLES))
    samples, _ = drawn(problem.theta0, problem.data, problem.key)
    return samples


def reference(theta0: jax.Array, samples: jax.Array) -> np.ndarray:
    """Δ̂ in float64: the d×d oracle where it is affordable, the Gram form elsewhere."""
    theta, x = np.asarray(theta0, np.float64), np.asarray(samples, np.float64)
    if theta.size <= ORACLE_UP_TO:
        return solve_densely(theta, x)
    return posterior_delta(theta, x, RHO)


def interleaved(
    calls: Mapping[Name, Callable[[], Any]], repeats: int, seconds: float, least: int
) -> dict[Name, np.ndarray]:
    """Seconds of each call, (repeats, calls in a repeat): all in turn, each first once in turn.

    A repeat takes about `seconds` and calls each at least `least` times.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    once = sum(_seconds(call) for call in calls.values())
    rounds = max(least, round(seconds / once))
    names = list(calls)
    taken = {name: np.zeros(repeats * rounds) for name in names}
    for turn in range(repeats * rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name][turn] = _seconds(calls[name])
    return {name: values.reshape(repeats, rounds) for name, values in taken.items()}


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def _times(dim: int, taken: Mapping[Variant, np.ndarray], omit: Variant | None = None) -> list[Row]:
    """Per repeat: milliseconds, and percent of FedAvg's time."""
    rows = []
    for variant, seconds in taken.items():
        if variant == omit:
            continue
        percent = 100 * np.median(seconds / taken[FEDAVG], axis=1)
        milliseconds = 1e3 * np.median(seconds, axis=1)
        values = {
            "fedavg": {"milliseconds": milliseconds},
            "mean": {"milliseconds": milliseconds, "sampling_percent": percent - 100},
            "fedpa": {"milliseconds": milliseconds, "overhead_percent": percent - 100},
            "delta": {"delta_milliseconds": milliseconds, "delta_percent": percent},
        }[variant.method]
        # A delta alone is a part of FedPA's update.
        owner = variant._replace(method="fedpa") if variant.method == "delta" else variant
        rows += [
            _row(dim, owner, quantity, value) | {"repeat": repeat}
            for quantity, by_repeat in values.items()
            for repeat, value in enumerate(by_repeat)
        ]
    return rows


def _row(dim: int, variant: Variant, quantity: str, value: Any) -> Row:
    named = {"dim": dim, "method": variant.method}
    if variant.form is not None:
        named["form"] = variant.form
    return named | {"quantity": quantity, "value": value}


def _arguments(problem: Problem) -> tuple[Any, ...]:
    message = Broadcast(problem.theta0, jnp.ones((), jnp.float32))
    return message, problem.data, (), problem.key


def _compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile()


def _mebibytes(program: Any) -> float:
    """What a program needs beside its arguments."""
    memory = program.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20


def _repeats(rows: Sequence[Row], dim: int, variant: Variant, quantity: str) -> np.ndarray:
    """Over repeats; empty where it was not measured."""
    return values_of(rows, dim=dim, **variant._asdict(), quantity=quantity)


class Look(NamedTuple):
    label: str
    colour: str
    style: Any
    marker: str
    markersize: float = 4.5
    width: float = 1.6


RECURRENCE, GRAM, DENSE = (Variant("fedpa", form) for form in FORMS)
# Lines that lie on one another have marks of different sizes.
LOOKS = {
    FEDAVG: Look("FedAvg", COLOURS[6], STYLES[0], MARKERS[0], 8.0),
    RECURRENCE: Look("FedPA, recurrence", COLOURS[0], STYLES[1], MARKERS[1], 6.0),
    GRAM: Look("FedPA, Gram", COLOURS[1], STYLES[2], MARKERS[2], 4.0),
    DENSE: Look("FedPA, dense solve", COLOURS[2], STYLES[3], MARKERS[3]),
}


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure(9.0, 5.0)
    left, right = figure.subplots(1, 2)
    _draw_times(left, rows)
    _draw_overheads(right, rows)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=2,
            frameon=False,
            fontsize=7.5,
            handlelength=3.5,
        )
    return figure


def _draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    for variant, look in LOOKS.items():
        _line(axes, rows, variant, "milliseconds", look)
    plain = {dim: p.fedavg for dim, p in PUBLISHED.items()}
    ours = {dim: p.recurrence[0] for dim, p in PUBLISHED.items()}
    exact = {dim: p.dense[0] for dim, p in PUBLISHED.items() if p.dense is not None}
    _published(axes, plain, "published: FedAvg", LOOKS[FEDAVG])
    _published(axes, ours, "published: FedPA", LOOKS[RECURRENCE])
    _published(axes, exact, "published: exact", LOOKS[DENSE])
    axes.set_yscale("log")
    tidy(axes, "client update, 500 steps", "parameters d", "time (ms)")


def _draw_overheads(axes: Axes, rows: Sequence[Row]) -> None:
    _goal(axes, 26.0, 1e2, "26 %")
    _goal(axes, 4.0, 1e5, "4 %")
    for variant in (RECURRENCE, GRAM):
        look = LOOKS[variant]
        _line(axes, rows, variant, "overhead_percent", look)
    sampling = Look("of it: sampling", COLOURS[3], STYLES[4], MARKERS[4], width=1.0)
    _line(axes, rows, MEAN, "sampling_percent", sampling)
    for variant, name, marker in [(RECURRENCE, "recurrence", "+"), (GRAM, "Gram", "x")]:
        look = LOOKS[variant]._replace(label=f"of it: delta, {name}", style=STYLES[3])
        _line(axes, rows, variant, "delta_percent", look._replace(marker=marker, width=1.0))
    known = {dim: p.recurrence[1] for dim, p in PUBLISHED.items()}
    _published(axes, known, "published: FedPA", LOOKS[RECURRENCE])
    tidy(axes, "overhead (grey: goals)", "parameters d", "time over FedAvg's (%)")


def _goal(axes: Axes, percent: float, least: float, text: str) -> None:
    """At most this much, from this d on; named beside the axes, where no data are."""
    axes.hlines(percent, least, 1e6, color="0.75", linewidth=1.0, zorder=0)
    axes.annotate(
        text,
        (1.0, percent),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="0.4",
    )


def _line(axes: Axes, rows: Sequence[Row], variant: Variant, quantity: str, look: Look) -> None:
    """Medians over repeats, with quartiles, against d."""
    by_dim = {dim: _repeats(rows, dim, variant, quantity) for dim in distinct(rows, "dim")}
    by_dim = {dim: values for dim, values in by_dim.items() if values.size}
    if not by_dim:
        return
    quartiles = [np.percentile(values, [25, 50, 75]) for values in by_dim.values()]
    low, middle, high = np.transpose(quartiles)
    axes.plot(
        list(by_dim),
        middle,
        color=look.colour,
        linestyle=look.style,
        linewidth=look.width,
        marker=look.marker,
        markersize=look.markersize,
        label=look.label,
    )
    axes.vlines(list(by_dim), low, high, color=look.colour, linewidth=0.8)


def _published(axes: Axes, known: Mapping[int, float], label: str, look: Look) -> None:
    axes.plot(
        list(known),
        list(known.values()),
        color=look.colour,
        linestyle=(0, (1, 3)),
        linewidth=0.9,
        marker=look.marker,
        markersize=6,
        markerfacecolor="white",
        label=label,
    )


def findings(rows: Sequence[Row]) -> list[Table | str]:
    examples = {dim: _repeats(rows, dim, FEDAVG, "examples")[0] for dim in distinct(rows, "dim")}
    notes = [
        f"d = {dim:,}: {number:.0f} examples, visited {EXAMPLES / number:.0f} times as often; the "
        "same arithmetic."
        for dim, number in examples.items()
        if number < EXAMPLES
    ]
    return [_times_table(rows), _parts_table(rows), _memory_table(rows), *notes, _on_goals(rows)]


def _times_table(rows: Sequence[Row]) -> Table:
    repeats = len(_repeats(rows, distinct(rows, "dim")[0], FEDAVG, "milliseconds"))
    view = new_table(
        f"table 1: a client update, ms (median of {repeats}; over FedAvg)",
        ("d", "FedAvg", "recurrence", "Gram", "dense"),
        caption="published: the paper's, on its machine; dense: one thread",
    )
    for dim in distinct(rows, "dim"):
        plain = _number(_median(rows, dim, FEDAVG, "milliseconds"))
        cells = [
            _with_percent(
                _median(rows, dim, variant, "milliseconds"),
                _median(rows, dim, variant, "overhead_percent"),
            )
            for variant in (RECURRENCE, GRAM, DENSE)
        ]
        view.add_row(f"{dim:,}", plain, *cells)
        if dim in PUBLISHED:
            p = PUBLISHED[dim]
            exact = "–" if p.dense is None else _with_percent(*p.dense)
            known = [_number(p.fedavg), _with_percent(*p.recurrence), "–", exact]
            view.add_row("published", *known, style="dim")
    return view


def _parts_table(rows: Sequence[Row]) -> Table:
    view = new_table(
        "time over FedAvg's, %",
        ("d", "sampling", "delta R", "delta G", "whole R", "whole G"),
        caption="sampling, delta: medians; whole: quartiles over repeats; R: recurrence, G: Gram",
    )
    for dim in distinct(rows, "dim"):
        view.add_row(
            f"{dim:,}",
            f"{_median(rows, dim, MEAN, 'sampling_percent'):+.1f}",
            *[f"{_median(rows, dim, v, 'delta_percent'):+.2f}" for v in (RECURRENCE, GRAM)],
            *[_quartiles(rows, dim, v, "overhead_percent") for v in (RECURRENCE, GRAM)],
        )
    return view


def _memory_table(rows: Sequence[Row]) -> Table:
    view = new_table(
        "memory of the compiled update beside its arguments, MiB",
        ("d", "FedAvg", "recurrence", "Gram", "dense", "error"),
        caption="error: the largest relative difference of a form's delta from the float64 one",
    )
    for dim in distinct(rows, "dim"):
        variants = (FEDAVG, RECURRENCE, GRAM, DENSE)
        errors = values_of(rows, dim=dim, quantity="delta_error")
        memory = [_number(_median(rows, dim, v, "memory_mib")) for v in variants]
        view.add_row(f"{dim:,}", *memory, f"{max(errors):.1e}")
    return view


def _median(rows: Sequence[Row], dim: int, variant: Variant, quantity: str) -> float:
    """Over repeats; not a number where it was not measured."""
    values = _repeats(rows, dim, variant, quantity)
    return float(np.median(values)) if values.size else float("nan")


def _quartiles(rows: Sequence[Row], dim: int, variant: Variant, quantity: str) -> str:
    low, high = np.percentile(_repeats(rows, dim, variant, quantity), [25, 75])
    return f"{low:+.1f} … {high:+.1f}"


def _with_percent(milliseconds: float, percent: float) -> str:
    if np.isnan(milliseconds):
        return "–"
    shown = f"{percent:+,.0f}" if abs(percent) >= 10 else f"{percent:+.1f}"
    return f"{_number(milliseconds)} ({shown} %)"


def _number(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _on_goals(rows: Sequence[Row]) -> str:
    """The slower form, by medians, against what was aimed at; undecided if quartiles disagree."""

    def said(what: str, goal: float, quantity: str, least: int) -> str:
        found = [
            (_median(rows, dim, variant, quantity), dim, variant)
            for dim in distinct(rows, "dim")
            for variant in (RECURRENCE, GRAM)
            if dim >= least
        ]
        if not found:
            return f"{what} at most {goal:g} %: not measured at this size"
        value, dim, variant = max(found)
        low, high = np.percentile(_repeats(rows, dim, variant, quantity), [25, 75])
        verdict = "met" if high <= goal else "missed" if low > goal else "undecided"
        return (
            f"{what} at most {goal:g} %: {verdict}, {value:.1f} % "
            f"({low:.1f} … {high:.1f}; d = {dim:,}, {variant.form})"
        )

    return "Goals, by the slower form: " + "; ".join(
        [
            said("at d ≥ 100,000 the delta", 2.0, "delta_percent", 100_000),
            said("the whole update", 4.0, "overhead_percent", 100_000),
            said("at every d the whole update", 26.0, "overhead_percent", 0),
        ]
    )


STUDY = Study(
    "table 1: what FedPA's client update costs over FedAvg's",
    columns=("dim", "method", "form", "repeat"),
    knob="repeats",
    repeats=(7, 3),
    measure=measure,
    draw=draw,
    findings=findings,
)
