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
import math
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
from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import COLOURS, STYLES, choose_look
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    draw_means,
    make_rows,
    make_table,
    mean_of,
    split,
    values_of,
    where,
)
from fedpa.objectives import ClientData, Objective, least_squares
from fedpa.samplers import Steps, draw_chains, exact, iasg, kish_ess
from fedpa.samplers.diagnostics import bulk_ess
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


def points(sizes: Sizes, dim: int) -> list[tuple[str, Point]]:
    """Every panel's settings."""
    rate = _rate(dim)
    return [
        *(("a", Point(burn_in, STEPS_PER_SAMPLE, rate)) for burn_in in sizes.burn_ins),
        *(("b", Point(BURN_IN, steps, rate)) for steps in sizes.steps_per_sample),
        *(("c", Point(BURN_IN, STEPS_PER_SAMPLE, own)) for own in sizes.learning_rates[dim]),
    ]


def measure(settings: Settings) -> list[Row]:
    """All rows, dimension by dimension."""
    return measure_sizes(settings, QUICK if settings.quick else FULL)


def measure_sizes(settings: Settings, sizes: Sizes) -> list[Row]:
    """All rows at these sizes."""
    costs = np.cumsum([0, *(1 + dim / 200 for dim in sizes.dims)])  # compilation and work, about
    shares = itertools.pairwise(costs / costs[-1])
    return [
        row
        for dim, share in zip(sizes.dims, shares, strict=True)
        for row in _measure_dimension(settings, sizes, dim, *share)
    ]


def _measure_dimension(
    settings: Settings, sizes: Sizes, dim: int, begin: float, end: float
) -> list[Row]:
    problems = [problem(settings.seed, dim, number) for number in range(settings.repeats)]
    key = jax.random.fold_in(jax.random.key(settings.seed), dim)
    start_key, chain_key, exact_key = jax.random.split(key, 3)
    starts = jax.random.normal(start_key, (len(problems), CHAINS, dim))
    rows: list[Row] = []
    for number, z in enumerate(exact_samples(problems, starts, exact_key)):
        rows += make_rows({"dim": dim, "problem": number}, {"kish_exact": np.mean(_kish(z))})
    wanted = points(sizes, dim)
    measured: dict[Point, list[dict[str, float]]] = {}
    runs = _share_runs(sizes, [point for _, point in wanted])
    for done, ((rate, grain, windows), shared) in enumerate(runs.items()):
        text = f"d = {dim}: learning rate {rate:g}, {windows * grain} steps"
        settings.tell(begin + (end - begin) * done / len(runs), text)
        averages = iasg_averages(problems, starts, chain_key, rate, grain, windows)
        for point in shared:
            measured[point] = [
                qualities(one, start, samples_of(stored, grain, point))
                for one, start, stored in zip(problems, np.asarray(starts), averages, strict=True)
            ]
    for panel, point in wanted:
        for number, values in enumerate(measured[point]):
            about = {"panel": panel, "dim": dim, "problem": number} | point._asdict()
            rows += make_rows(about, values)
    return rows


def _share_runs(sizes: Sizes, wanted: Sequence[Point]) -> dict[tuple[float, int, int], list[Point]]:
    """(learning rate, grain, windows) → the settings to be read off that run.

    Runs of one grain are equally long, so that they compile once.
    """
    by_grain: dict[int, list[Point]] = {}
    for point in dict.fromkeys(wanted):
        common = math.gcd(point.burn_in, point.steps_per_sample)
        grain = max(grain for grain in sizes.grains if common % grain == 0)
        by_grain.setdefault(grain, []).append(point)
    runs: dict[tuple[float, int, int], list[Point]] = {}
    for grain, own in by_grain.items():
        steps = max(point.burn_in + SAMPLES * point.steps_per_sample for point in own)
        for point in own:
            run = (point.learning_rate, grain, steps // grain)
            runs.setdefault(run, []).append(point)
    return runs


def problem(seed: int, dim: int, number: int) -> Problem:
    """A random least squares problem; its 10 informative features are sklearn's default."""
    from sklearn.datasets import make_regression

    state = int(np.random.SeedSequence([seed, dim, number]).generate_state(1)[0])
    x, y = make_regression(n_samples=POINTS, n_features=dim, noise=NOISE, random_state=state)
    # Rounded first: the posterior is that of the numbers the sampler sees.
    x, y = x.astype(np.float32), y.astype(np.float32)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return Problem(jnp.asarray(x), jnp.asarray(y), vt.T * s, u.T @ y.astype(np.float64))


def _client(x: Float[Array, "n d"], y: Float[Array, " n"]) -> ClientData:
    return ClientData({"x": x, "y": y}, jnp.asarray(POINTS, jnp.int32))


def whitened(one: Problem, theta: Any) -> np.ndarray:
    """z of θ, in float64: differences of f are what the weights are made of."""
    z: np.ndarray = np.asarray(theta, np.float64) @ one.axes - one.centre
    return z


def exact_samples(
    problems: Sequence[Problem], starts: Float[Array, "p c d"], key: Key
) -> Iterator[np.ndarray]:
    """z of exact posterior samples (T = 1), (chains, ℓ, r) per problem."""
    sampler = exact(least_squares.posterior, temperature=1.0)
    draw = jax.jit(lambda s, data, k: draw_chains(sampler, s, data, k, SAMPLES)[0])
    keys = jax.random.split(key, len(problems))
    for one, start, own in zip(problems, starts, keys, strict=True):
        yield whitened(one, draw(start, _client(one.x, one.y), own))


def iasg_averages(
    problems: Sequence[Problem],
    starts: Float[Array, "p c d"],
    key: Key,
    rate: float,
    grain: int,
    windows: int,
) -> np.ndarray:
    """Averages of every `grain` iterates from the first on: (problems, chains, windows, d)."""
    x, y = (jnp.stack(arrays) for arrays in zip(*((one.x, one.y) for one in problems), strict=True))
    keys = jax.random.split(key, len(problems))
    return np.asarray(_averages(x, y, starts, keys, jnp.float32(rate), grain, windows))


@functools.partial(jax.jit, static_argnames=("grain", "windows"))
def _averages(x: Any, y: Any, starts: Any, keys: Any, rate: Any, grain: int, windows: int) -> Any:
    sampler = iasg(
        Objective(least_squares.loss),
        optax.sgd(rate),
        batch_size=BATCH,
        window=Steps(grain),
        order="replacement",
    )

    def run_chains(x: Any, y: Any, starts: Any, key: Key) -> Any:
        return draw_chains(sampler, starts, _client(x, y), key, windows)[0]

    return jax.vmap(run_chains)(x, y, starts, keys)


def samples_of(averages: np.ndarray, grain: int, point: Point) -> np.ndarray:
    """The ℓ samples of a setting, (chains, ℓ, d), from averages of `grain` iterates."""
    first, size = point.burn_in // grain, point.steps_per_sample // grain
    used = averages[:, first : first + SAMPLES * size]
    shape = (used.shape[0], SAMPLES, size, used.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):  # a divergence: reported as one
        samples: np.ndarray = used.reshape(shape).mean(axis=2, dtype=np.float64)
    return samples


def qualities(one: Problem, starts: np.ndarray, samples: np.ndarray) -> dict[str, float]:
    """What is measured of one problem's chains: all on the scale of ℓ samples of one chain.

    A chain diverged if a sample is not finite, or if its last has a higher loss than its θ₀ had:
    then nothing else is measured.
    """
    if not np.isfinite(samples).all():
        return {"diverged": 1.0}
    z = whitened(one, samples)
    last, first = z[:, -1], whitened(one, starts)
    if (np.sum(last**2, axis=-1) > np.sum(first**2, axis=-1)).any():
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


def draw(rows: Sequence[Row]) -> Figure:
    """A line of panels for what is varied, a column for each dimension."""
    dims = split(rows, "dim")
    figure = new_figure(3.2 * len(dims) + 0.4, 8.6)
    grid = figure.subplots(len(PANELS), len(dims), sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for line, (name, panel) in zip(grid, PANELS.items(), strict=True):
        for axes, (dim, own) in zip(line, dims.items(), strict=True):
            _draw_panel(axes, where(own, panel=name), panel.column)
            axes.axhline(
                mean_of(own, quantity="kish_exact"),
                color=COLOURS[6],
                linestyle=STYLES[3],
                label="Kish, exact posterior samples",
            )
            fixed = panel.fixed.format(B=BURN_IN, K=STEPS_PER_SAMPLE, rate=_rate(dim))
            label = f"ESS of {SAMPLES} samples" if axes is line[0] else ""
            tidy(axes, f"({name}) d = {dim}\n{fixed}", panel.x, label)
            drawn, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
    look = {"ncols": 2, "fontsize": 8, "frameon": False}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **look)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Row], column: str) -> None:
    for index, (quantity, label) in enumerate(MEASURES.items()):
        # What diverged for every problem has no value here, and its own mark below.
        marks = {"markersize": 4, "markerfacecolor": "white", "markevery": 1}
        look = choose_look(index)
        draw_means(axes, where(rows, quantity=quantity), column, look, label, **marks)
    for x, own in split(rows, column).items():
        if _is_calibrated(_typical_spread(own)):
            label = "filled: samples spread like the posterior, within a factor of 2"
            axes.plot(x, mean_of(own, quantity="kish"), "o", c=COLOURS[0], ms=4, label=label)
        diverged = values_of(own, quantity="diverged")
        if diverged.any():
            axes.plot(x, MARK, "X", c=COLOURS[6], label="number of problems that diverged")
            text, offset = f"{int(diverged.sum())}/{len(diverged)}", "offset points"
            axes.annotate(text, (x, MARK), (0, 5), textcoords=offset, ha="center", fontsize=7)
    if column == "burn_in":
        axes.set_xscale("symlog", linthresh=20, linscale=0.5)  # 0 is one of them
        axes.set_xticks([0, 100, 1000], ["0", "100", "1000"])
        axes.set_xlim(-4, 1.5 * max(distinct(rows, column)))
    else:
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.7 * MARK, 1.5 * SAMPLES)
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])


class Judgement(NamedTuple):
    """One of the paper's takeaways, by one measure, at one d."""

    text: str
    holds: bool | None
    """None where it can't be judged."""


Takeaway = dict[int, Judgement]
"""By dimension."""


def findings(rows: Sequence[Row]) -> list[Table | str]:
    """The paper's takeaways, where they hold, and what Kish's ESS says of samples."""
    lines = []
    for number, (claim, by_measure) in enumerate(takeaways(rows).items(), start=1):
        cells = [
            [measure, *(judged.text for judged in takeaway.values()), _say_where(takeaway)]
            for measure, takeaway in by_measure.items()
        ]
        lines.append([f"{number} {claim}", *("\n".join(cell) for cell in zip(*cells, strict=True))])
    dims = [f"d = {dim}" for dim in distinct(rows, "dim")]
    table = make_table(
        f"The paper's takeaways: mean ESS of {SAMPLES} samples, and where they hold",
        ["takeaway", "by", *dims, "holds"],
        lines,
        left=["takeaway"],
        caption="1–3: from the smallest value to the largest, of learning rates to the paper's; "
        "↑ ↓ where a 95 % interval of the log-ratio over problems is above or below 0, else ≈. "
        "5: largest mean over smallest, of the values tried in (a), (b), (c). 6: at the paper's "
        f"settings, (b) with {STEPS_PER_SAMPLE} steps per sample.",
    )
    return [table, _say_kish(rows), *_say_rest(rows), CHOICES]


def takeaways(rows: Sequence[Row]) -> dict[str, dict[str, Takeaway]]:
    """Claim → measure → what was measured of it."""
    dims = split(rows, "dim")
    measures = {"Kish": "kish", "autocorr.": "autocorrelation_median"}

    def judge_each(judge: Callable[..., Judgement], *more: str) -> dict[str, Takeaway]:
        return {
            measure: {dim: judge(own, quantity, *more) for dim, own in dims.items()}
            for measure, quantity in measures.items()
        }

    return {
        "more burn-in is better": judge_each(_judge_rise, "a"),
        "more steps per sample are better": judge_each(_judge_rise, "b"),
        "too small a learning rate is worse": judge_each(_judge_rise, "c"),
        "too large a one diverges": {
            "": {dim: _judge_divergence(own) for dim, own in dims.items()}
        },
        "it matters most": judge_each(_judge_sensitivity),
        "more dimensions are worse": {
            measure: _judge_dimensions(dims, quantity) for measure, quantity in measures.items()
        },
    }


def _judge_rise(rows: Sequence[Row], quantity: str, panel: str) -> Judgement:
    at = split(where(rows, panel=panel), PANELS[panel].column)
    last = _rate(rows[0]["dim"]) if panel == "c" else list(at)[-1]
    before, after = (_by_problem(at[x], quantity) for x in (next(iter(at)), last))
    direction = find_direction(before, after)
    return Judgement(f"{_mean(before)} → {_mean(after)} {direction}", direction == "↑")


def _judge_divergence(rows: Sequence[Row]) -> Judgement:
    diverged = where(rows, panel="c", quantity="diverged", value=1.0)
    if not diverged:
        return Judgement("no", False)
    return Judgement(f"from {min(row['learning_rate'] for row in diverged):g} on", True)


def _judge_sensitivity(rows: Sequence[Row], quantity: str) -> Judgement:
    ratios = []
    for name, panel in PANELS.items():
        at = split(where(rows, panel=name, quantity=quantity), panel.column)
        means = [mean_of(own) for own in at.values()] or [1.0]
        ratios.append(max(means) / min(means))
    return Judgement(", ".join(map(_short, ratios)), ratios[2] > max(ratios[:2]))


def _judge_dimensions(dims: dict[int, list[Row]], quantity: str) -> Takeaway:
    at = {
        dim: _by_problem(where(own, panel="b", steps_per_sample=STEPS_PER_SAMPLE), quantity)
        for dim, own in dims.items()
    }
    falls = [find_direction(*pair) == "↓" for pair in itertools.pairwise(at.values())]
    return {
        dim: Judgement(_mean(values), holds)
        for (dim, values), holds in zip(at.items(), [None, *falls], strict=True)
    }


def find_direction(before: dict[int, float], after: dict[int, float]) -> str:
    """By a 95 % interval of the mean log-ratio over problems."""
    both = sorted(set(before) & set(after))
    if len(both) < 2:
        return "≈"
    low, high = band_of_mean(np.log([after[k] / before[k] for k in both]))
    return "↑" if low > 0 else "↓" if high < 0 else "≈"


def _say_where(takeaway: Takeaway) -> str:
    judged = {dim: judged.holds for dim, judged in takeaway.items() if judged.holds is not None}
    if all(judged.values()):
        return "yes"
    return ", ".join(str(dim) for dim, holds in judged.items() if holds) or "no"


def _say_kish(rows: Sequence[Row]) -> str:
    """Where Kish's ESS is above the exact samples', and what samples get the most of it."""
    settings, better, best = 0, list[float](), []
    for dim, own in split(rows, "dim").items():
        reference = mean_of(own, quantity="kish_exact")
        converged = _find_converged(own)
        settings += len(converged)
        better += [spread for kish, spread in converged.values() if kish > reference]
        if converged:
            (burn_in, steps, rate), (kish, spread) = max(converged.items(), key=lambda c: c[1][0])
            best.append(
                f"at d = {dim} {kish:.3g} (exact: {reference:.3g}) with burn-in {burn_in}, {steps} "
                f"steps per sample, learning rate {rate:g}, where that variance is {spread:.2g} of "
                "the posterior's"
            )
    off = sum(not _is_calibrated(spread) for spread in better)
    return (
        f"By Kish's ESS, IASG's samples are better than exact ones at {len(better)} of {settings} "
        f"settings; at {off} of these their variance (later half of a chain) is less than half or "
        f"more than twice the posterior's. It is largest {'; '.join(best)}."
    )


def _say_rest(rows: Sequence[Row]) -> list[str]:
    """Where the autocorrelation is that of rounding errors."""
    places = []
    for dim, own in split(rows, "dim").items():
        resting = sum(spread < REST for _, spread in _find_converged(own).values())
        places += [f"{resting} settings at d = {dim}"] * bool(resting)
    if not places:
        return []
    return [
        f"At {', '.join(places)} the chains have come to rest at the mode, where gradients have no "
        f"noise: variance below {REST:g} of the posterior's, whatever the autocorrelation of what "
        "is left."
    ]


def _find_converged(rows: Sequence[Row]) -> dict[Any, tuple[float, float]]:
    """Setting → Kish's ESS and spread, over problems; without those where every one diverged."""
    return {
        point: (mean_of(own, quantity="kish"), _typical_spread(own))
        for point, own in split(rows, *Point._fields).items()
        if where(own, quantity="kish")
    }


def _typical_spread(rows: Sequence[Row]) -> float:
    """The geometric mean over problems; not a number where every one diverged."""
    spreads = values_of(rows, quantity="spread")
    return float(np.exp(np.mean(np.log(spreads)))) if len(spreads) else math.nan


def _is_calibrated(spread: float) -> bool:
    low, high = CALIBRATED
    return low <= spread <= high


def _by_problem(rows: Sequence[Row], quantity: str) -> dict[int, float]:
    return {row["problem"]: row["value"] for row in where(rows, quantity=quantity)}


def _mean(by_problem: dict[int, float]) -> str:
    return _short(float(np.mean(list(by_problem.values())))) if by_problem else "none"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


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
