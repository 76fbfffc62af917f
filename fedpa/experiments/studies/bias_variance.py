"""Figure 3: bias and variance of the client delta, against local steps and against ρ.

scikit-learn's `make_regression` (500 points, Gaussian design, 10 informative features whose true
coefficients are up to 100), d = 10, 100, 1000. From each of ten starts θ_i ~ N(0, I) of a problem a
client computes Δ̂_i; the exact delta is Δ_i = A(θ_i − μ), A = XᵀX/n, on the row space of A where
that is singular (d = 1000). With errors e_i = Δ̂_i − Δ_i over the starts of a problem,

    bias = ‖mean e_i‖,   variance = ‖Cov e_i‖_F,

and the figure shows their means over problems.

The paper does not state label noise, learning rate, steps per sample, burn-in or the scale of θ,
and they decide the outcome. Here: noise 0, 1 and 22; the rates of figure 4; steps per sample such
that the paper's 5K, 10K and 50K steps make 100 samples; 100 steps of burn-in, which FedPA's axis
does not count; mini-batches drawn with replacement. Beside the paper's fixed ρ stand its controls
(the mean of the samples, and the mean with FedPA's longer step 1 + (ℓ−1)ρ), the calibrated scale
(deviations multiplied so that tr Ŝ = tr A⁺, which only an oracle knows), and OAS and RBLW.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.deltas import posterior_delta
from fedpa.deltas.shrinkage import Rho
from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import COLOURS, PLACES, Look, choose_look, choose_looks
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    draw_line,
    make_rows,
    make_table,
    split,
    values_of,
    where,
)
from fedpa.objectives import ClientData, Objective, least_squares
from fedpa.samplers import Sampler, Steps, iasg
from fedpa.types import Key

POINTS, BATCH, BURN_IN, STARTS = 500, 10, 100, 10
NOISES = (0.0, 1.0, 22.0)
QUANTITIES = ("bias", "variance")
COMPARED = 1.0
"""The noise at which the estimators are compared in the figure: the model's own."""
EARLY = (10, 30, 100)
"""FedAvg's local steps before the first sample would be made."""
RHOS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


class Case(NamedTuple):
    dim: int
    rho: float
    """The paper's."""
    learning_rate: float
    per_sample: int
    counts: tuple[int, ...]
    """ℓ at which the deltas are read."""


CASES = (
    Case(10, 0.01, 0.1, 50, (2, 5, 10, 20, 50, 100)),
    Case(100, 0.005, 0.1, 100, (2, 5, 10, 20, 50, 100)),
    Case(1000, 0.001, 0.01, 500, (2, 5, 10, 20, 50, 100)),
)
QUICK = tuple(
    case._replace(counts=counts)
    for case, counts in zip(CASES, [(2, 10, 100), (2, 10, 100), (2, 6)], strict=True)
)


class Which(NamedTuple):
    """The columns that tell one estimate of a setting from another."""

    panel: str
    estimator: str
    steps: int
    rho: float | None = None


class Problems(NamedTuple):
    x: np.ndarray
    """(problems, n, d)."""
    y: np.ndarray
    """(problems, noises, n)."""
    theta: np.ndarray
    """(problems, starts, d)."""


class Chains(NamedTuple):
    """Of every (problem, start, noise)."""

    early: np.ndarray
    """Iterates after every 10 of the burn-in's steps."""
    samples: np.ndarray
    """(…, ℓ, d): IASG's samples."""
    positions: np.ndarray
    """(…, ℓ, d): the iterate at the end of each sample's window."""


def measure(settings: Settings) -> list[Row]:
    """All rows, dimension by dimension."""
    rows: list[Row] = []
    cases = QUICK if settings.quick else CASES
    starts = 4 if settings.quick else STARTS
    for index, case in enumerate(cases):
        count = f"{settings.repeats} problems × {starts} starts × {len(NOISES)} noises"
        steps = case.per_sample * max(case.counts)
        settings.tell(index / len(cases), f"d = {case.dim}: {count}, {steps:,} steps each")
        problems = generate(case, settings.seed, settings.repeats, starts)
        chains = run(case, problems, jax.random.key(settings.seed))
        for number in range(len(NOISES)):
            rows += _measure_errors(case, problems, chains, number)
    return rows


def generate(case: Case, seed: int, problems: int, starts: int) -> Problems:
    """Random problems, at every noise, and starts."""
    from sklearn.datasets import make_regression

    x, y = [], []
    rng = np.random.default_rng([seed, case.dim])
    for _ in range(problems):
        # The labels' noise is added here: one design and one noise, at three scales.
        design, labels = make_regression(
            POINTS, case.dim, n_informative=10, random_state=int(rng.integers(2**31))
        )
        unit = rng.standard_normal(POINTS)
        x.append(design)
        y.append([labels + noise * unit for noise in NOISES])
    theta = rng.standard_normal((problems, starts, case.dim))
    return Problems(*(np.asarray(a, np.float32) for a in (x, y, theta)))


def run(case: Case, problems: Problems, root: Key) -> Chains:
    """Local SGD from every start: vectorized over problems, starts and noises."""

    def sampler(window: Steps, average: bool) -> Sampler:
        return iasg(
            Objective(least_squares.loss),
            optax.sgd(case.learning_rate),
            batch_size=BATCH,
            window=window,
            order="replacement",
            average=average,
        )

    fine = sampler(Steps(10), average=False)
    coarse = sampler(Steps(case.per_sample, burn_in=BURN_IN), average=True)

    def stream(chosen: Sampler, num: int, theta: Any, data: ClientData, key: Key) -> Any:
        def step(state: Any, _: None) -> Any:
            state, theta_s, _ = chosen.sample(state, data)
            return state, (theta_s, chosen.position(state))

        return jax.lax.scan(step, chosen.init(theta, data, key), None, length=num)[1]

    def one(x: Any, y: Any, theta: Any, key: Key) -> Any:
        # One key, one trajectory: the two samplers only read it at other steps.
        data = ClientData({"x": x, "y": y}, jnp.asarray(POINTS, jnp.int32))
        early, _ = stream(fine, BURN_IN // 10, theta, data, key)
        samples, positions = stream(coarse, max(case.counts), theta, data, key)
        return Chains(early, samples, positions)

    noises = jax.vmap(one, in_axes=(None, 0, None, None))
    chains = jax.vmap(noises, in_axes=(None, None, 0, 0))
    arrays = (*problems, jax.random.split(root, problems.theta.shape[:2]))
    # Outermost one after the other: all problems at once would not be faster.
    return Chains(*map(np.asarray, jax.jit(lambda a: jax.lax.map(lambda p: chains(*p), a))(arrays)))


def _measure_errors(case: Case, problems: Problems, chains: Chains, number: int) -> list[Row]:
    """Bias and variance of every estimate at one noise, over problems."""
    about = {"dim": case.dim, "noise": NOISES[number]}
    moments: dict[Which, list[np.ndarray]] = {}
    norms = []
    for p, (x, y) in enumerate(zip(problems.x, problems.y[:, number], strict=True)):
        x, y = x.astype(np.float64), y.astype(np.float64)
        curvature = np.linalg.svd(x, compute_uv=False) ** 2 / len(x)
        trace = float(np.sum(1 / curvature[curvature > 1e-10 * curvature.max()]))  # tr A⁺
        errors: dict[Which, list[np.ndarray]] = {}
        for s, theta in enumerate(problems.theta[p].astype(np.float64)):
            exact = x.T @ (x @ theta - y) / len(x)  # A(θ − μ) is the gradient
            norms.append(float(np.linalg.norm(exact)))
            chain = Chains(*(part[p, s, number].astype(np.float64) for part in chains))
            for which, delta in _estimate(case, theta, chain, trace):
                errors.setdefault(which, []).append(delta - exact)
        for which, own in errors.items():
            moments.setdefault(which, []).append(_moments(np.array(own)))
    rows = make_rows(about, {"exact_norm": np.mean(norms)})
    for which, values in moments.items():
        low, high = band_of_mean(np.array(values))
        ends = {"": np.mean(values, axis=0), "_low": low, "_high": high}
        for index, quantity in enumerate(QUANTITIES):
            measured = {quantity + end: part[index] for end, part in ends.items()}
            rows += make_rows(about | which._asdict(), measured)
    return rows


def _moments(errors: np.ndarray) -> np.ndarray:
    """‖mean‖ and ‖covariance‖_F of the errors (starts, d), without forming d×d."""
    mean = errors.mean(0)
    centred = errors - mean
    gram = centred @ centred.T / max(len(errors) - 1, 1)
    return np.array([np.linalg.norm(mean), np.linalg.norm(gram)])


def _estimate(
    case: Case, start: np.ndarray, chain: Chains, trace: float
) -> Iterator[tuple[Which, np.ndarray]]:
    """Every delta that one chain gives."""
    for steps in EARLY:
        yield Which("fedavg", "FedAvg", steps), start - chain.early[steps // 10 - 1]
    for count in case.counts:
        steps = case.per_sample * count
        last = chain.positions[count - 1]
        yield Which("fedavg", "FedAvg", BURN_IN + steps), start - last
        samples = chain.samples[:count]
        mean, scale = start - samples.mean(0), _calibration(samples, trace)
        yield Which("steps", "mean", steps), mean
        yield Which("steps", "mean-scaled", steps), (1 + (count - 1) * case.rho) * mean
        rules: dict[str, Rho] = {"fixed ρ": case.rho, "OAS": "oas", "RBLW": "rblw"}
        for name, rho in rules.items():
            shown = case.rho if name == "fixed ρ" else None
            for before, by in [("", 1.0), ("calibrated, ", scale)]:
                delta = posterior_delta(start, samples, rho, sample_scale=by)
                yield Which("steps", before + name, steps, shown), delta
    steps = case.per_sample * len(chain.samples)
    scale = _calibration(chain.samples, trace)
    for rho in RHOS:
        for name, by in [("fixed ρ", 1.0), ("calibrated, fixed ρ", scale)]:
            delta = posterior_delta(start, chain.samples, rho, sample_scale=by)
            yield Which("rho", name, steps, rho), delta


def _calibration(samples: np.ndarray, trace: float) -> float:
    """c with c² tr Ŝ = tr A⁺; 1 where the samples are all equal."""
    spread = float(np.sum(np.var(samples, axis=0, ddof=1)))
    return float(np.sqrt(trace / spread)) if spread > 0 else 1.0


# --- drawing: from the rows alone ---

_ESTIMATORS = {
    "fixed ρ": "fedpa",
    "mean-scaled": "mean-scaled",
    "calibrated, fixed ρ": "fedpa",
    "calibrated, OAS": "fedpa-oas",
    "OAS": "fedpa-oas",
    "mean": "mean",
}
"""Estimator → the method that sends it."""


def draw(rows: Sequence[Row]) -> Figure:
    """A column per dimension: FedAvg, FedPA by steps, FedPA by ρ, and the estimators."""
    dims = split(rows, "dim")
    figure = new_figure(3.4 * len(dims), 10.6)
    grid = figure.subplots(4, len(dims), squeeze=False)
    for (a, b, c, d), (dim, own) in zip(grid.T, dims.items(), strict=True):
        fixed = where(own, estimator="fixed ρ")
        rho = where(fixed, panel="steps")[0]["rho"]
        steps = max(distinct(where(own, panel="rho"), "steps"))
        along_steps, along_rho = where(fixed, panel="steps"), where(fixed, panel="rho")
        panels = [
            (a, f"a. FedAvg, d = {dim:,}", where(own, panel="fedavg"), "steps", "fedavg"),
            (b, f"b. FedPA, ρ = {rho:g}, d = {dim:,}", along_steps, "steps", "fedpa"),
            (c, f"c. FedPA, {steps:,} steps, d = {dim:,}", along_rho, "rho", "fedpa"),
        ]
        for axes, title, shown, x, method in panels:
            by_noise = split(shown, "noise")
            for index, (noise, at) in enumerate(by_noise.items()):
                # A method's colour, the darker the more noise.
                look = choose_look(PLACES[method])._replace(marker=index)
                shade = _shade(COLOURS[look.colour], index / (len(by_noise) - 1 or 1))
                label = f"noise {noise:g}"
                _draw(axes, at, "bias", x, index, look, label, linestyle="-", color=shade)
                _draw(axes, at, "variance", x, index, look, linestyle="--", color=shade)
            tidy(axes, title, "ρ" if x == "rho" else "local steps", "bias (—), variance (- -)")
        for index, (name, look) in enumerate(choose_looks(_ESTIMATORS).items()):
            at = where(own, noise=COMPARED, panel="steps", estimator=name)
            label = f"FedPA, {name}" if _ESTIMATORS[name].startswith("fedpa") else name
            _draw(d, at, "bias", "steps", index, look, label)
        tidy(d, f"d. estimators at noise {COMPARED:g}, d = {dim:,}", "local steps", "bias")
        norm = values_of(own, quantity="exact_norm", noise=COMPARED)[0]
        for axes in (a, b, c, d):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.axhline(norm, color="0.6", linewidth=0.8, zorder=0, label="‖exact Δ‖")
    for axes in grid[:, -1]:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    quantity: str,
    x: str,
    index: int,
    look: Look,
    label: str = "",
    **style: Any,
) -> None:
    mean, *band = (values_of(rows, x, quantity=quantity + end) for end in ("", "_low", "_high"))
    # Smaller and smaller marks: lines that coincide are seen to.
    sizes = {"markersize": 7.5 - index, "markevery": 1, "linewidth": 1.3}
    draw_line(axes, sorted(distinct(rows, x)), mean, band, look, label, **sizes | style)


def _shade(colour: str, darkness: float) -> tuple[float, ...]:
    """A colour from half white (darkness 0) over itself to half black (1)."""
    towards, share = (1.0, 1 - 2 * darkness) if darkness < 0.5 else (0.0, 2 * darkness - 1)
    return tuple(part + 0.5 * share * (towards - part) for part in to_rgb(colour))


def findings(rows: Sequence[Row]) -> list[Table | str]:
    """From the fewest to the most local steps, and whether the paper's directions hold."""
    names = ["FedAvg", "fixed ρ", "mean-scaled", "calibrated, fixed ρ", "calibrated, OAS"]
    lines: list[list[str]] = []
    for (dim, noise), own in split(rows, "dim", "noise").items():
        head = [f"{dim:,}", f"{noise:g}", f"{values_of(own, quantity='exact_norm')[0]:.3g}"]
        for name in names:
            cells = ["→".join(f"{v:.3g}" for v in ends(own, name, q)) for q in QUANTITIES]
            lines.append([*head, name.replace(", fixed", ""), *cells])
            head = ["", "", ""]
        lines.append([])
    columns = ["d", "noise", "‖Δ‖", "estimator", *QUANTITIES]
    title = "from the fewest to the most local steps"
    said = [f"{claim}: {_say(holds(rows, *test))}" for claim, test in CLAIMS.items()]
    said.append(f"FedAvg's bias grows once past its minimum: {_say(past_minimum(rows))}")
    return [
        make_table(title, columns, lines, left=["estimator"]),
        "The paper's directions, at noise 0, 1 and 22 for d = 10, 100, 1000:",
        *said,
    ]


CLAIMS = {
    "FedAvg's bias grows from the fewest local steps to the most": ("FedAvg", "bias", 1),
    "FedAvg's variance falls": ("FedAvg", "variance", -1),
    "FedPA's bias falls": ("fixed ρ", "bias", -1),
    "its control's bias falls (mean-scaled)": ("mean-scaled", "bias", -1),
    "with the calibrated scale, FedPA's bias falls": ("calibrated, fixed ρ", "bias", -1),
}
Verdicts = dict[tuple[int, int | float], bool]
"""(d, noise) → whether a claim holds there."""


def by_steps(rows: Sequence[Row], estimator: str, quantity: str) -> np.ndarray:
    """The values, from the fewest to the most local steps."""
    panel = "fedavg" if estimator == "FedAvg" else "steps"
    return values_of(rows, "steps", panel=panel, estimator=estimator, quantity=quantity)


def ends(rows: Sequence[Row], estimator: str, quantity: str) -> tuple[float, float]:
    """The value at the fewest and at the most local steps."""
    values = by_steps(rows, estimator, quantity)
    return values[0], values[-1]


def past_minimum(rows: Sequence[Row]) -> Verdicts:
    """Whether FedAvg's bias ends above its smallest value by more than 1 %."""
    curves = {
        at: by_steps(own, "FedAvg", "bias") for at, own in split(rows, "dim", "noise").items()
    }
    return {at: bool(values[-1] > 1.01 * min(values)) for at, values in curves.items()}


def holds(rows: Sequence[Row], estimator: str, quantity: str, sign: int) -> Verdicts:
    """Whether the quantity went the claimed way from first to last."""
    settings = split(rows, "dim", "noise")
    return {
        at: bool(np.sign(np.subtract(*ends(own, estimator, quantity))) == -sign)
        for at, own in settings.items()
    }


def _say(verdicts: Verdicts) -> str:
    failed = [f"d = {dim:,}, noise {noise:g}" for (dim, noise), ok in verdicts.items() if not ok]
    text = f"{len(verdicts) - len(failed)} of {len(verdicts)} settings"
    return text + f" (not at {'; '.join(failed)})" if 0 < len(failed) < len(verdicts) else text


STUDY = Study(
    summary="figure 3: bias and variance of client deltas",
    columns=("dim", "noise", "panel", "estimator", "steps", "rho"),
    knob="repeats",
    repeats=(10, 3),
    measure=measure,
    draw=draw,
    findings=findings,
)
