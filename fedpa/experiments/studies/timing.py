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

from fedpa.algorithms import LocalTraining
from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedavg import fedavg_client
from fedpa.algorithms.fedopt import Broadcast
from fedpa.algorithms.local_training import local_sampler
from fedpa.deltas import Delta, DeltaInfo, fixed, mean, posterior, posterior_delta
from fedpa.deltas.posterior import Form, GramState
from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import STYLES, choose_looks, style_line
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    make_rows,
    make_table,
    split,
    values_of,
    where,
)
from fedpa.objectives import ClientData, Objective, client_data, least_squares
from fedpa.samplers import Sampler
from fedpa.samplers import draw as draw_samples
from fedpa.server import Server, sgd
from fedpa.types import Params

RHO = 0.01
SAMPLES = 5
BATCH = 10
EXAMPLES = 1_000
EXAMPLES_FIT = 4e8
"""Bytes of examples beyond which a client gets a tenth of them."""
POSTERIOR: tuple[Form, ...] = ("recurrence", "gram")
FORMS = (*POSTERIOR, "dense")
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


PUBLISHED = {
    "fedavg": {100: (72.0, 0.0), 1_000: (76.0, 0.0), 10_000: (80.0, 0.0), 100_000: (149.0, 0.0)},
    "recurrence": {
        100: (91.0, 26.0),
        1_000: (92.0, 21.0),
        10_000: (93.0, 16.0),
        100_000: (155.0, 4.0),
    },
    "dense": {100: (82.0, 12.0), 1_000: (104.0, 36.0), 10_000: (797.0, 896.0)},
}
"""The paper's table 1, with its DP and its exact: milliseconds and percent over FedAvg."""


class Problem(NamedTuple):
    objective: Objective
    local: LocalTraining
    theta0: jax.Array
    data: ClientData
    key: Any

    def sampler_at(self, rate: jax.Array) -> Sampler:
        """FedPA's sampler."""
        return local_sampler(self.objective, self.local, rate, average=True)


class Variant(NamedTuple):
    """A client update, or a delta alone."""

    method: str
    form: str | None = None


FEDAVG, MEAN = Variant("fedavg"), Variant("mean")
RECURRENCE, GRAM, DENSE = (Variant("fedpa", form) for form in FORMS)


def measure(settings: Settings) -> list[Row]:
    """All rows, dimension by dimension."""
    return measure_sizes(settings, QUICK if settings.quick else FULL)


def measure_sizes(settings: Settings, size: Size) -> list[Row]:
    """All rows at this size."""
    rows: list[Row] = []
    for index, dim in enumerate(size.dims):
        settings.tell(index / len(size.dims), f"d = {dim:,}")
        rows += _measure_dimension(dim, size, settings)
    return rows


def _measure_dimension(dim: int, size: Size, settings: Settings) -> list[Row]:
    problem = least_squares_problem(dim, size.steps, settings.seed)
    theta0, data, key = problem.theta0, problem.data, problem.key
    deltas: dict[str, Delta] = {
        form: posterior(SAMPLES, fixed(RHO), form=form) for form in POSTERIOR
    }
    if dim <= size.dense_up_to:
        deltas["dense"] = dense()
    server = Server(sgd(1.0))
    sampling = {MEAN: mean()} | {Variant("fedpa", form): delta for form, delta in deltas.items()}
    clients = {FEDAVG: fedavg_client(problem.objective, problem.local, server)} | {
        variant: client_update(problem.sampler_at, delta, SAMPLES, server.weighting)
        for variant, delta in sampling.items()
    }
    arguments = (Broadcast(theta0, jnp.ones((), jnp.float32)), data, (), key)
    updates = {variant: _compile(client, *arguments) for variant, client in clients.items()}
    sampler = problem.sampler_at(jnp.ones((), jnp.float32))
    samples, _ = draw_samples(sampler, theta0, data, key, SAMPLES)
    solves = {form: _compile(solve_with(d), theta0, samples) for form, d in deltas.items()}
    calls: dict[Variant, Callable[[], Any]] = {
        variant: functools.partial(update, *arguments) for variant, update in updates.items()
    } | {
        Variant("delta", form): functools.partial(solve, theta0, samples)
        for form, solve in solves.items()
    }
    slow = {variant: call for variant, call in calls.items() if variant.form == "dense"}
    fast = {variant: call for variant, call in calls.items() if variant not in slow}
    taken = interleave(fast, settings.repeats, size.seconds, size.least)
    rows = _compare_times(dim, taken, taken[FEDAVG])
    if slow:
        # Apart, so that the others need not wait for it; with a FedAvg of its own to compare with.
        # One thread: LAPACK's wait for one another, a hundred times longer on a shared machine.
        with threadpool_limits(1, "blas"):
            taken = interleave({FEDAVG: fast[FEDAVG]} | slow, settings.repeats, 0.0, 1)
        rows += _compare_times(dim, taken, taken.pop(FEDAVG))
    truth = posterior_delta(np.asarray(theta0, np.float64), np.asarray(samples, np.float64), RHO)
    for form, solve in solves.items():
        error = np.linalg.norm(np.asarray(solve(theta0, samples), np.float64) - truth)
        about = {"dim": dim, "method": "fedpa", "form": form}
        rows += make_rows(about, {"delta_error": error / np.linalg.norm(truth)})
    for variant, update in updates.items():
        memory = update.memory_analysis()  # beside the arguments
        used = memory.temp_size_in_bytes + memory.output_size_in_bytes
        # One loss for all: they make the same steps.
        values = {"loss": update(*arguments).info.loss, "memory_mib": used / 2**20}
        rows += make_rows({"dim": dim} | variant._asdict(), values)
    return [*rows, *make_rows({"dim": dim, "method": "fedavg"}, {"examples": data.n})]


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


def dense() -> Delta:
    """Δ̂ = (1 + (ℓ−1)ρ) (I + ρ XᵀX)⁻¹ (θ₀ − x̄) as if there were no structure to use.

    Compiled and in the parameters' precision, as the others are.
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


def solve_with(delta: Delta) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(θ₀, ℓ×d samples) → Δ, sample by sample, as a client update runs it."""

    def run(theta0: jax.Array, samples: jax.Array) -> jax.Array:
        state, _ = jax.lax.scan(
            lambda state, sample: (delta.update(state, sample, sample), None),
            delta.init(theta0, jnp.asarray(EXAMPLES, jnp.int32)),
            samples,
        )
        found: jax.Array = delta.value(state)[0]
        return found

    return run


def interleave(
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


def _compare_times(dim: int, taken: Mapping[Variant, np.ndarray], fedavg: np.ndarray) -> list[Row]:
    """Per repeat: milliseconds, and percent of FedAvg's time."""
    rows = []
    for (method, form), seconds in taken.items():
        percent = 100 * np.median(seconds / fedavg, axis=1)
        milliseconds = 1e3 * np.median(seconds, axis=1)
        values = {
            "fedavg": {"milliseconds": milliseconds},
            "mean": {"milliseconds": milliseconds, "sampling_percent": percent - 100},
            "fedpa": {"milliseconds": milliseconds, "overhead_percent": percent - 100},
            "delta": {"delta_milliseconds": milliseconds, "delta_percent": percent},
        }[method]
        # A delta alone is a part of FedPA's update.
        about = {"dim": dim, "method": "fedpa" if method == "delta" else method, "form": form}
        for quantity, by_repeat in values.items():
            for repeat, value in enumerate(by_repeat):
                rows += make_rows(about | {"repeat": repeat}, {quantity: value})
    return rows


def _compile(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile()


# --- drawing: from the rows alone ---

# Lines that lie on one another have marks of different sizes.
SIZES = {FEDAVG: 8.0, RECURRENCE: 6.0, GRAM: 4.0, DENSE: 4.5, MEAN: 4.5}
LOOKS: dict[Variant, dict[str, Any]] = {
    variant: style_line(look) | {"ms": size}
    for (variant, size), look in zip(
        SIZES.items(), choose_looks({str(v): v.method for v in SIZES}).values(), strict=True
    )
}
LABELS = {
    FEDAVG: "FedAvg",
    RECURRENCE: "FedPA, recurrence",
    GRAM: "FedPA, Gram",
    DENSE: "FedPA, dense solve",
}


def draw(rows: Sequence[Row]) -> Figure:
    """Milliseconds at the left, percent over FedAvg at the right."""
    figure = new_figure(9.0, 5.0)
    times, overheads = figure.subplots(1, 2)
    for variant, label in LABELS.items():
        _draw(times, rows, variant, "milliseconds", label, **LOOKS[variant])
    for name, (variant, label) in {
        "fedavg": (FEDAVG, "published: FedAvg"),
        "recurrence": (RECURRENCE, "published: FedPA"),
        "dense": (DENSE, "published: exact"),
    }.items():
        _draw_published(times, name, 0, label, variant)
    times.set_yscale("log")
    tidy(times, "client update, 500 steps", "parameters d", "time (ms)")
    for variant in (RECURRENCE, GRAM):
        _draw(overheads, rows, variant, "overhead_percent", LABELS[variant], **LOOKS[variant])
    sampling = LOOKS[MEAN] | {"linewidth": 1.0}
    _draw(overheads, rows, MEAN, "sampling_percent", "of it: sampling", **sampling)
    for variant, label, marker in [
        (RECURRENCE, "of it: delta, recurrence", "+"),
        (GRAM, "of it: delta, Gram", "x"),
    ]:
        look = LOOKS[variant] | {"linestyle": STYLES[3], "linewidth": 1.0, "marker": marker}
        _draw(overheads, rows, variant, "delta_percent", label, **look)
    _draw_published(overheads, "recurrence", 1, "published: FedPA", RECURRENCE)
    tidy(overheads, "overhead", "parameters d", "time over FedAvg's (%)")
    for axes in (times, overheads):
        axes.set_xscale("log")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
        axes.legend(**below, frameon=False, fontsize=7.5, handlelength=3.5)
    return figure


def _draw(
    axes: Axes, rows: Sequence[Row], variant: Variant, quantity: str, label: str, **look: Any
) -> None:
    """Medians over repeats, with quartiles, against d."""
    by_dim = split(where(rows, **variant._asdict(), quantity=quantity), "dim")
    quartiles = [np.percentile(values_of(own), [25, 50, 75]) for own in by_dim.values()]
    low, middle, high = np.reshape(quartiles, (-1, 3)).T
    axes.plot(list(by_dim), middle, label=label, **{"linewidth": 1.6} | look)
    axes.vlines(list(by_dim), low, high, color=look["color"], linewidth=0.8)


def _draw_published(axes: Axes, name: str, column: int, label: str, variant: Variant) -> None:
    known = {dim: numbers[column] for dim, numbers in PUBLISHED[name].items()}
    hollow = {"linestyle": (0, (1, 3)), "linewidth": 0.9, "ms": 6, "markerfacecolor": "white"}
    axes.plot(list(known), list(known.values()), label=label, **LOOKS[variant] | hollow)


def findings(rows: Sequence[Row]) -> list[Table | str]:
    """Tables of times, of their parts and of memory, and how many examples there were."""
    times, parts, memory, notes = [], [], [], []
    for dim, own in split(rows, "dim").items():
        size = f"{dim:,}"

        def median(variant: Variant, quantity: str, own: list[Row] = own) -> float:
            """Over repeats; not a number where it was not measured."""
            values = values_of(own, **variant._asdict(), quantity=quantity)
            return float(np.median(values)) if values.size else float("nan")

        def quartiles(variant: Variant, own: list[Row] = own) -> str:
            values = values_of(own, **variant._asdict(), quantity="overhead_percent")
            return " … ".join(f"{end:+.1f}" for end in np.percentile(values, [25, 75]))

        forms = (RECURRENCE, GRAM, DENSE)
        pairs = [[median(v, q) for q in ("milliseconds", "overhead_percent")] for v in forms]
        plain = _show_number(median(FEDAVG, "milliseconds"))
        times.append([size, plain, *(_show_overhead(*pair) for pair in pairs)])
        if dim in PUBLISHED["fedavg"]:
            known = [
                PUBLISHED[form].get(dim, (float("nan"), 0.0)) for form in ("recurrence", "dense")
            ]
            exact = [_show_overhead(*pair) for pair in known]
            plain = _show_number(PUBLISHED["fedavg"][dim][0])
            times.append([f"[dim]{cell}" for cell in ("published", plain, exact[0], "–", exact[1])])
        solves = [f"{median(v, 'delta_percent'):+.2f}" for v in (RECURRENCE, GRAM)]
        sampling = f"{median(MEAN, 'sampling_percent'):+.1f}"
        parts.append([size, sampling, *solves, quartiles(RECURRENCE), quartiles(GRAM)])
        error = max(values_of(own, quantity="delta_error"))
        used = [_show_number(median(v, "memory_mib")) for v in (FEDAVG, *forms)]
        memory.append([size, *used, f"{error:.1e}"])
        examples = median(FEDAVG, "examples")
        if examples < EXAMPLES:
            times_as_often = f"visited {EXAMPLES / examples:.0f} times as often"
            notes.append(
                f"d = {size}: {examples:.0f} examples, {times_as_often}; the same arithmetic."
            )
    repeats = len(distinct(rows, "repeat"))
    return [
        make_table(
            f"table 1: a client update, ms (median of {repeats}; over FedAvg)",
            ("d", "FedAvg", "recurrence", "Gram", "dense"),
            times,
            caption="published: the paper's, on its machine; dense: one thread",
        ),
        make_table(
            "time over FedAvg's, %",
            ("d", "sampling", "delta R", "delta G", "whole R", "whole G"),
            parts,
            caption="sampling, delta: medians; whole: quartiles over repeats; R: recurrence, "
            "G: Gram",
        ),
        make_table(
            "memory of the compiled update beside its arguments, MiB",
            ("d", "FedAvg", "recurrence", "Gram", "dense", "error"),
            memory,
            caption="error: the largest relative difference of a form's delta from the float64 one",
        ),
        *notes,
    ]


def _show_overhead(milliseconds: float, percent: float) -> str:
    if np.isnan(milliseconds):
        return "–"
    shown = f"{percent:+,.0f}" if abs(percent) >= 10 else f"{percent:+.1f}"
    return f"{_show_number(milliseconds)} ({shown} %)"


def _show_number(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


STUDY = Study(
    "table 1: what FedPA's client update costs over FedAvg's",
    columns=("dim", "method", "form", "repeat"),
    knob="repeats",
    repeats=(7, 3),
    measure=measure,
    draw=draw,
    findings=findings,
)
