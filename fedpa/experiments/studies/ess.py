"""How good IASG's samples are: figure 4a–c and the effective sample size of appendix B.

Least squares with 500 points in d = 10, 100, 1000 dimensions, mini-batches of 10, and Kish's
ESS = (Σ w_j)² / Σ w_j² with w_j ∝ p(θ_j) = exp(−n f(θ_j)), against (a) burn-in steps, (b) steps per
sample, (c) the learning rate. Beside it:

- the autocorrelation ESS, which does measure mixing, of all chains together, as its share of ℓ
  samples (of ranks and split chains: a transient within one sample would pass for independence);
- Kish's ESS of exact posterior samples. It tends to ℓ (3/4)^{d/2}, and stays little above 1 where
  that is less than 1: samples that get more are not better ones;
- the samples' spread: their variance over the posterior's, in the later half of a chain. Samples
  that all sit at the mode have spread 0 and a Kish's ESS of ℓ, the best there is. IASG's do at
  d = 1000: all points are fitted exactly there, so that gradients have no noise at the mode, and
  the chain comes to rest at it (after which its autocorrelation is that of float32's last digit).

Batches are drawn with replacement. Reshuffled epochs would make the spread smaller still, and
Kish's ESS larger with it: about threefold at d = 10, burn-in 100, 50 steps per sample.

Everything is measured in the posterior's own coordinates. With X = U diag(s) Vᵀ,

    z = diag(s) Vᵀ (θ − μ),   log w = −n (f(θ) − f(μ)) = −½ ‖X (θ − μ)‖² = −½ ‖z‖²,

and z ~ N(0, I) if θ is a posterior sample. At d = 1000 the 500 points leave A singular: z has 500
coordinates, those of the row space, where the exact sampler works, too. The rest of θ stays where
it started, for SGD as for the exact sampler, and changes no weight.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.figures import COLOURS, MARKERS, STYLES, new_figure, tidy
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    draw_band,
    make_rows,
    values_of,
    where,
)
from fedpa.objectives import least_squares
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.samplers import Steps, exact, iasg
from fedpa.samplers.diagnostics import bulk_ess, kish_ess
from fedpa.samplers.sampler import draw_chains
from fedpa.types import Key

POINTS = 500
BATCH = 10
RATES = {10: 0.1, 100: 0.1, 1000: 0.01}
"""The paper's learning rates in (a) and (b), by dimension."""
BURN_IN, STEPS_PER_SAMPLE = 100, 50
"""The paper's, where they are not varied."""
# The paper does not state the following.
NOISE = 1.0
SAMPLES = 100
CHAINS = 4
CHOICES = (
    f"Fixed here, as the paper does not state them: label noise of variance {NOISE:g}, for which "
    f"exp(−n f) is the true posterior; ℓ = {SAMPLES} samples; {CHAINS} chains per problem, from "
    "θ₀ ~ N(0, I) each; mini-batches drawn with replacement, as the theory of IASG assumes; "
    "make_regression's default of 10 informative features."
)


class Sizes(NamedTuple):
    dims: tuple[int, ...]
    burn_ins: tuple[int, ...]
    steps_per_sample: tuple[int, ...]
    learning_rates: dict[int, tuple[float, ...]]
    """By dimension: from too small to divergence."""
    grains: tuple[int, ...]
    """Steps per stored average, see `Point`."""


FULL = Sizes(
    dims=(10, 100, 1000),
    burn_ins=(0, 20, 100, 200, 500, 1000, 2000, 5000),
    steps_per_sample=(1, 3, 10, 20, 50, 100, 200, 500),
    learning_rates={
        10: (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.2),
        100: (0.0003, 0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.15, 0.2),
        1000: (0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.05),
    },
    grains=(1, 10, 100),
)
QUICK = Sizes(
    dims=(10, 100, 1000),
    burn_ins=(0, 100, 1000, 5000),
    steps_per_sample=(10, 50, 100),
    learning_rates={
        10: (0.001, 0.01, 0.1, 0.5, 1.2),
        100: (0.001, 0.01, 0.1, 0.3),
        1000: (0.001, 0.003, 0.01, 0.03),
    },
    grains=(10,),
)


class Point(NamedTuple):
    """One setting of IASG.

    The chain of Algorithm 4 is the same whatever becomes of its iterates, so settings with one
    learning rate share it: averages of `grain` iterates are stored, and averages of those are the
    samples.
    """

    burn_in: int
    steps_per_sample: int
    learning_rate: float


class Problem(NamedTuple):
    x: Float[Array, "n d"]
    y: Float[Array, " n"]
    axes: Float[np.ndarray, "d r"]
    """V diag(s): z = θ · axes − centre."""
    centre: Float[np.ndarray, " r"]
    """Uᵀy, which is diag(s) Vᵀ μ."""


class Panel(NamedTuple):
    column: str
    """What is varied."""
    x: str
    """Its name on the axis."""
    fixed: str
    """What is not varied."""


PANELS = {
    "a": Panel("burn_in", "burn-in (steps)", "{K} steps per sample, learning rate {rate:g}"),
    "b": Panel("steps_per_sample", "steps per sample", "burn-in {B} steps, learning rate {rate:g}"),
    "c": Panel("learning_rate", "learning rate", "burn-in {B} steps, {K} steps per sample"),
}
MEASURES = {
    "kish": "Kish, IASG",
    "autocorrelation_median": "autocorrelation, IASG: median coordinate",
    "autocorrelation_min": "autocorrelation, IASG: worst coordinate",
}
CALIBRATED = 0.5, 2.0
"""Spreads that count as the posterior's."""
REST = 1e-6
"""A spread below which a chain is at rest."""
MARK = 0.45
"""Where divergence is marked: below any ESS."""


def points(sizes: Sizes, dim: int) -> Iterator[tuple[str, Point]]:
    """Every panel's settings."""
    rate = _rate(dim)
    for burn_in in sizes.burn_ins:
        yield "a", Point(burn_in, STEPS_PER_SAMPLE, rate)
    for steps in sizes.steps_per_sample:
        yield "b", Point(BURN_IN, steps, rate)
    for rate in sizes.learning_rates[dim]:
        yield "c", Point(BURN_IN, STEPS_PER_SAMPLE, rate)


def measure(settings: Settings) -> list[Row]:
    return measure_sizes(settings, QUICK if settings.quick else FULL)


def measure_sizes(settings: Settings, sizes: Sizes) -> list[Row]:
    rows: list[Row] = []
    costs = [1 + dim / 200 for dim in sizes.dims]  # about: compilation and work
    for number, dim in enumerate(sizes.dims):
        begin, end = (sum(costs[:k]) / sum(costs) for k in (number, number + 1))

        def tell(fraction: float, text: str) -> None:
            settings.tell(begin + fraction * (end - begin), f"d = {dim}: {text}")

        rows += _of_dimension(settings, sizes, dim, tell)
    return rows


def _of_dimension(settings: Settings, sizes: Sizes, dim: int, tell: Any) -> list[Row]:
    tell(0.0, "problems and exact samples")
    problems = [problem(settings.seed, dim, number) for number in range(settings.repeats)]
    key = jax.random.fold_in(jax.random.key(settings.seed), dim)
    start_key, chain_key, exact_key = jax.random.split(key, 3)
    starts = jax.random.normal(start_key, (len(problems), CHAINS, dim))
    rows: list[Row] = []
    for number, z in enumerate(exact_samples(problems, starts, exact_key)):
        rows += make_rows({"dim": dim, "problem": number}, {"kish_exact": np.mean(_kish(z))})

    wanted = list(points(sizes, dim))
    found: dict[Point, list[dict[str, float]]] = {}
    runs = _runs(sizes, [point for _, point in wanted])
    for done, ((rate, grain, windows), of_run) in enumerate(runs.items()):
        tell((done + 1) / (len(runs) + 1), f"learning rate {rate:g}, {windows * grain} steps")
        averages = iasg_averages(problems, starts, chain_key, rate, grain, windows)
        for point in of_run:
            found[point] = [
                qualities(one, start, samples_of(stored, grain, point))
                for one, start, stored in zip(problems, np.asarray(starts), averages, strict=True)
            ]
    for panel, point in wanted:
        for number, values in enumerate(found[point]):
            about = {"panel": panel, "dim": dim, "problem": number} | point._asdict()
            rows += make_rows(about, values)
    return rows


def problem(seed: int, dim: int, number: int) -> Problem:
    """A random least squares problem; its 10 informative features are sklearn's default."""
    from sklearn.datasets import make_regression

    state = int(np.random.SeedSequence([seed, dim, number]).generate_state(1)[0])
    x, y = make_regression(n_samples=POINTS, n_features=dim, noise=NOISE, random_state=state)
    # Rounded first: the posterior is that of the numbers the sampler sees.
    x, y = x.astype(np.float32), y.astype(np.float32)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return Problem(jnp.asarray(x), jnp.asarray(y), vt.T * s, u.T @ y.astype(np.float64))


def whitened(one: Problem, theta: Any) -> np.ndarray:
    """z of θ, in float64: differences of f are what the weights are made of."""
    return np.asarray(theta, np.float64) @ one.axes - one.centre


def exact_samples(
    problems: Sequence[Problem], starts: Float[Array, "p c d"], key: Key
) -> Iterator[np.ndarray]:
    """z of exact posterior samples (T = 1), (chains, ℓ, r) per problem."""
    sampler = exact(least_squares.posterior, temperature=1.0)
    draw = jax.jit(lambda s, data, k: draw_chains(sampler, s, data, k, SAMPLES)[0])
    keys = jax.random.split(key, len(problems))
    for one, start, own in zip(problems, starts, keys, strict=True):
        yield whitened(one, draw(start, ClientData(_examples(one), _n()), own))


def iasg_averages(
    problems: Sequence[Problem],
    starts: Float[Array, "p c d"],
    key: Key,
    rate: float,
    grain: int,
    windows: int,
) -> np.ndarray:
    """Averages of every `grain` iterates from the first on: (problems, chains, windows, d)."""
    examples = jax.tree.map(lambda *arrays: jnp.stack(arrays), *map(_examples, problems))
    keys = jax.random.split(key, len(problems))
    return np.asarray(_averages(examples, starts, keys, jnp.float32(rate), grain, windows))


@functools.partial(jax.jit, static_argnames=("grain", "windows"))
def _averages(
    examples: Any, starts: Any, keys: Any, rate: jax.Array, grain: int, windows: int
) -> Any:
    sampler = iasg(
        Objective(least_squares.loss),
        optax.sgd(rate),
        batch_size=BATCH,
        window=Steps(grain),
        order="replacement",
    )

    def chains(examples: Any, starts: Any, key: Key) -> Any:
        return draw_chains(sampler, starts, ClientData(examples, _n()), key, windows)[0]

    return jax.vmap(chains)(examples, starts, keys)


def samples_of(averages: np.ndarray, grain: int, point: Point) -> np.ndarray:
    """The ℓ samples of a setting, (chains, ℓ, d), from averages of `grain` iterates."""
    first, size = point.burn_in // grain, point.steps_per_sample // grain
    used = averages[:, first : first + SAMPLES * size]
    shape = (used.shape[0], SAMPLES, size, used.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):  # a divergence: reported as one
        return used.reshape(shape).mean(axis=2, dtype=np.float64)


def qualities(one: Problem, starts: np.ndarray, samples: np.ndarray) -> dict[str, float]:
    """What is measured of one problem's chains: all on the scale of ℓ samples of one chain.

    A chain diverged if a sample is not finite, or if its last has a higher loss than its θ₀ had:
    then nothing else is measured.
    """
    if not np.isfinite(samples).all():
        return {"diverged": 1.0}
    z = whitened(one, samples)
    excess = lambda z: np.sum(z**2, axis=-1)  # noqa: E731
    if (excess(z[:, -1]) > excess(whitened(one, starts))).any():
        return {"diverged": 1.0}
    mixing = bulk_ess(z) / len(z)
    return {
        "diverged": 0.0,
        "kish": float(np.mean(_kish(z))),
        "autocorrelation_median": float(np.median(mixing)),
        "autocorrelation_min": float(np.min(mixing)),
        "spread": float(np.mean(np.var(z[:, SAMPLES // 2 :], axis=1, ddof=1))),
    }


def _kish(z: np.ndarray) -> np.ndarray:
    return kish_ess(-0.5 * np.sum(z**2, axis=-1))


def _runs(sizes: Sizes, wanted: Sequence[Point]) -> dict[tuple[float, int, int], list[Point]]:
    """(learning rate, grain, windows) → the settings to be read off that run.

    Runs of one grain are equally long, so that they compile once.
    """
    grains = {
        point: max(
            grain
            for grain in sizes.grains
            if point.burn_in % grain == 0 and point.steps_per_sample % grain == 0
        )
        for point in dict.fromkeys(wanted)
    }
    steps = {
        grain: max(
            point.burn_in + SAMPLES * point.steps_per_sample
            for point, own in grains.items()
            if own == grain
        )
        for grain in set(grains.values())
    }
    runs: dict[tuple[float, int, int], list[Point]] = {}
    for point, grain in grains.items():
        run = (point.learning_rate, grain, steps[grain] // grain)
        runs.setdefault(run, []).append(point)
    return runs


def _examples(one: Problem) -> dict[str, jax.Array]:
    return {"x": one.x, "y": one.y}


def _n() -> jax.Array:
    return jnp.asarray(POINTS, jnp.int32)


def draw(rows: Sequence[Row]) -> Figure:
    dims = distinct(rows, "dim")
    figure = new_figure(3.2 * len(dims) + 0.4, 8.6)
    grid = figure.subplots(len(PANELS), len(dims), sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for line, (name, panel) in zip(grid, PANELS.items(), strict=True):
        for axes, dim in zip(line, dims, strict=True):
            _draw_panel(axes, where(rows, dim=dim), name)
            fixed = panel.fixed.format(B=BURN_IN, K=STEPS_PER_SAMPLE, rate=_rate(dim))
            label = f"ESS of {SAMPLES} samples" if axes is line[0] else ""
            tidy(axes, f"({name}) d = {dim}\n{fixed}", panel.x, label)
            drawn, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
    column = PANELS[name].column
    own = where(rows, panel=name)
    at = {x: where(own, **{column: x}) for x in distinct(own, column)}
    for number, (quantity, label) in enumerate(MEASURES.items()):
        # What diverged for every problem has no value here, and its own mark below.
        values = {x: values_of(of_x, quantity=quantity) for x, of_x in at.items()}
        values = {x: of_x for x, of_x in values.items() if len(of_x)}
        bands = np.array([_interval(of_x) for of_x in values.values()]).reshape(-1, 2)
        draw_band(
            axes,
            list(values),
            [of_x.mean() for of_x in values.values()],
            (bands[:, 0], bands[:, 1]),
            color=COLOURS[number],
            linestyle=STYLES[number],
            marker=MARKERS[number],
            markersize=4,
            markerfacecolor="white",
            label=label,
        )
    for x, of_x in at.items():
        spreads, diverged = values_of(of_x, quantity="spread"), values_of(of_x, quantity="diverged")
        if len(spreads) and _is_calibrated(_typical(spreads)):
            axes.plot(
                x,
                values_of(of_x, quantity="kish").mean(),
                color=COLOURS[0],
                linestyle="none",
                marker=MARKERS[0],
                markersize=4,
                label="filled: samples spread like the posterior, within a factor of 2",
            )
        if diverged.any():
            axes.plot(
                x,
                MARK,
                color=COLOURS[6],
                linestyle="none",
                marker=MARKERS[6],
                label="diverged: so many of the problems",
            )
            axes.annotate(
                f"{int(diverged.sum())}/{len(diverged)}",
                (x, MARK),
                (0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    axes.axhline(
        float(values_of(rows, quantity="kish_exact").mean()),
        color=COLOURS[6],
        linestyle=STYLES[3],
        label="Kish, exact posterior samples",
    )
    if column == "burn_in":
        axes.set_xscale("symlog", linthresh=20, linscale=0.5)  # 0 is one of them
        axes.set_xticks([0, 100, 1000], ["0", "100", "1000"])
        axes.set_xlim(-4, 1.5 * max(at))
    else:
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.7 * MARK, 1.5 * SAMPLES)
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])


class Takeaway(NamedTuple):
    """One of the paper's, by one measure."""

    cells: list[str]
    """By dimension."""
    holds: dict[int, bool]
    """By the dimensions it can be judged at."""


def findings(rows: Sequence[Row]) -> list[Table | str]:
    dims = distinct(rows, "dim")
    table = Table(
        title=f"The paper's takeaways: mean ESS of {SAMPLES} samples, and where they hold",
        caption="1–3: from the smallest value to the largest, of learning rates to the paper's; "
        "↑ ↓ where a 95 % interval of the log-ratio over problems is above or below 0, else ≈. "
        "5: largest mean over smallest, of the values tried in (a), (b), (c). 6: at the paper's "
        f"settings, (b) with {STEPS_PER_SAMPLE} steps per sample.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("takeaway")
    for heading in ("by", *(f"d = {dim}" for dim in dims), "holds"):
        table.add_column(heading, no_wrap=True)
    for number, (claim, by_measure) in enumerate(takeaways(rows, dims).items(), start=1):
        lines = [
            [measure, *takeaway.cells, _verdict(takeaway.holds)]
            for measure, takeaway in by_measure.items()
        ]
        table.add_row(
            f"{number} {claim}", *("\n".join(cells) for cells in zip(*lines, strict=True))
        )
    return [table, _on_kish(rows, dims), *_at_rest(rows, dims), CHOICES]


def takeaways(rows: Sequence[Row], dims: Sequence[int]) -> dict[str, dict[str, Takeaway]]:
    """Claim → measure → what was measured of it."""
    measures = {"Kish": "kish", "autocorr.": "autocorrelation_median"}

    def by_measure(judge: Callable[[str], Takeaway]) -> dict[str, Takeaway]:
        return {measure: judge(quantity) for measure, quantity in measures.items()}

    return {
        "more burn-in is better": by_measure(lambda q: _rising(rows, dims, "a", q)),
        "more steps per sample are better": by_measure(lambda q: _rising(rows, dims, "b", q)),
        "too small a learning rate is worse": by_measure(lambda q: _rising(rows, dims, "c", q)),
        "too large a one diverges": {"": _diverging(rows, dims)},
        "it matters most": by_measure(lambda q: _most_sensitive(rows, dims, q)),
        "more dimensions are worse": by_measure(lambda q: _falling_with_d(rows, dims, q)),
    }


def _rising(rows: Sequence[Row], dims: Sequence[int], panel: str, quantity: str) -> Takeaway:
    column = PANELS[panel].column
    cells, holds = [], {}
    for dim in dims:
        own = where(rows, panel=panel, dim=dim)
        xs = distinct(own, column)
        last = _rate(dim) if panel == "c" else xs[-1]
        before, after = (_by_problem(where(own, **{column: x}), quantity) for x in (xs[0], last))
        direction = _direction(before, after)
        cells.append(f"{_mean(before)} → {_mean(after)} {direction}")
        holds[dim] = direction == "↑"
    return Takeaway(cells, holds)


def _diverging(rows: Sequence[Row], dims: Sequence[int]) -> Takeaway:
    first = {
        dim: min(
            (
                row["learning_rate"]
                for row in where(rows, panel="c", dim=dim, quantity="diverged")
                if row["value"]
            ),
            default=None,
        )
        for dim in dims
    }
    cells = ["no" if rate is None else f"from {rate:g} on" for rate in first.values()]
    return Takeaway(cells, {dim: rate is not None for dim, rate in first.items()})


def _most_sensitive(rows: Sequence[Row], dims: Sequence[int], quantity: str) -> Takeaway:
    cells, holds = [], {}
    for dim in dims:
        ratios = {}
        for name, panel in PANELS.items():
            own = where(rows, panel=name, dim=dim, quantity=quantity)
            xs = distinct(own, panel.column)
            means = [values_of(own, **{panel.column: x}).mean() for x in xs]
            ratios[name] = max(means) / min(means) if means else 1.0
        cells.append(", ".join(_short(ratio) for ratio in ratios.values()))
        holds[dim] = max(ratios, key=lambda name: ratios[name]) == "c"
    return Takeaway(cells, holds)


def _falling_with_d(rows: Sequence[Row], dims: Sequence[int], quantity: str) -> Takeaway:
    at = {
        dim: _by_problem(
            where(rows, panel="b", dim=dim, steps_per_sample=STEPS_PER_SAMPLE), quantity
        )
        for dim in dims
    }
    return Takeaway(
        [_mean(values) for values in at.values()],
        {dim: _direction(at[less], at[dim]) == "↓" for less, dim in itertools.pairwise(dims)},
    )


def _direction(before: dict[int, float], after: dict[int, float]) -> str:
    """By a 95 % interval of the mean log-ratio over problems."""
    both = sorted(set(before) & set(after))
    if len(both) < 2:
        return "≈"
    low, high = _interval(np.log([after[k] / before[k] for k in both]))
    return "↑" if low > 0 else "↓" if high < 0 else "≈"


def _on_kish(rows: Sequence[Row], dims: Sequence[int]) -> str:
    """Where Kish's ESS is above the exact samples', and what samples get the most of it."""
    settings, above, off, best = 0, 0, 0, []
    for dim in dims:
        reference = float(np.mean(values_of(where(rows, dim=dim), quantity="kish_exact")))
        converged = _converged(where(rows, dim=dim))
        better = [quality for quality in converged.values() if quality.kish > reference]
        settings += len(converged)
        above += len(better)
        off += sum(not _is_calibrated(quality.spread) for quality in better)
        if converged:
            point, quality = max(converged.items(), key=lambda item: item[1].kish)
            best.append(
                f"at d = {dim} {quality.kish:.3g} (exact: {reference:.3g}) with burn-in "
                f"{point.burn_in}, {point.steps_per_sample} steps per sample, learning rate "
                f"{point.learning_rate:g}, where that variance is {quality.spread:.2g} of the "
                "posterior's"
            )
    return (
        f"By Kish's ESS, IASG's samples are better than exact ones at {above} of {settings} "
        f"settings; at {off} of these their variance (later half of a chain) is less than half or "
        f"more than twice the posterior's. It is largest {'; '.join(best)}."
    )


def _at_rest(rows: Sequence[Row], dims: Sequence[int]) -> list[str]:
    """Where the autocorrelation is that of rounding errors."""
    resting = {
        dim: sum(quality.spread < REST for quality in _converged(where(rows, dim=dim)).values())
        for dim in dims
    }
    places = ", ".join(
        f"{number} settings at d = {dim}" for dim, number in resting.items() if number
    )
    if not places:
        return []
    return [
        f"At {places} the chains have come to rest at the mode, where gradients have no noise: "
        f"variance below {REST:g} of the posterior's, whatever the autocorrelation of what is left."
    ]


class Quality(NamedTuple):
    kish: float
    spread: float


def _converged(rows: Sequence[Row]) -> dict[Point, Quality]:
    """Means over problems, by setting; without those where every problem diverged."""
    own = [row for row in rows if "panel" in row]
    found = {}
    for point in dict.fromkeys(Point(*(row[name] for name in Point._fields)) for row in own):
        # A setting that is part of several panels has equal values in each.
        at = where(own, **point._asdict())
        kish, spread = (values_of(at, quantity=name) for name in Quality._fields)
        if len(kish):
            found[point] = Quality(float(np.mean(kish)), _typical(spread))
    return found


def _verdict(holds: dict[int, bool]) -> str:
    if all(holds.values()):
        return "yes"
    return ", ".join(f"{dim}" for dim in holds if holds[dim]) or "no"


def _by_problem(rows: Sequence[Row], quantity: str) -> dict[int, float]:
    return {row["problem"]: float(row["value"]) for row in rows if row["quantity"] == quantity}


def _mean(by_problem: dict[int, float]) -> str:
    return _short(float(np.mean(list(by_problem.values())))) if by_problem else "none"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = band_of_mean(values[:, None])
    return float(low[0]), float(high[0])


def _typical(spreads: np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(spreads))))


def _is_calibrated(spread: float) -> bool:
    low, high = CALIBRATED
    return low <= spread <= high


def _rate(dim: int) -> float:
    """The learning rate of (a) and (b)."""
    return RATES.get(dim, 0.1)


STUDY = Study(
    summary="how good IASG's samples are (figure 4)",
    columns=("panel", "dim", "burn_in", "steps_per_sample", "learning_rate", "problem"),
    knob="repeats",
    repeats=(10, 3),
    measure=measure,
    draw=draw,
    findings=findings,
)
