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

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.deltas.posterior_delta import posterior_delta
from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.figures import COLOURS, MARKERS, STYLES, new_figure, tidy
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    draw_band,
    make_rows,
    new_table,
    values_of,
    where,
)
from fedpa.objectives import least_squares
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.samplers.iasg import iasg
from fedpa.samplers.sampler import Steps
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
QUICK = (
    Case(10, 0.01, 0.1, 50, (2, 10, 100)),
    Case(100, 0.005, 0.1, 100, (2, 10, 100)),
    Case(1000, 0.001, 0.01, 500, (2, 6)),
)


Which = tuple[tuple[str, Any], ...]
"""The columns that tell one estimate from another."""


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
    rows: list[Row] = []
    cases = QUICK if settings.quick else CASES
    starts = 4 if settings.quick else STARTS
    for index, case in enumerate(cases):

        def tell(part: float, doing: str, done: int = index, dim: int = case.dim) -> None:
            settings.tell((done + part) / len(cases), f"d = {dim}: {doing}")

        rows += measure_case(case, settings.seed, settings.repeats, starts, tell)
    return rows


def measure_case(case: Case, seed: int, problems: int, starts: int, tell: Any) -> list[Row]:
    generated = generate(case, seed, problems, starts)
    last = case.per_sample * max(case.counts)
    tell(0.0, f"{problems} problems × {starts} starts × {len(NOISES)} noises, {last:,} steps each")
    chains = run(case, generated, jax.random.key(seed))
    rows: list[Row] = []
    for number, noise in enumerate(NOISES):
        tell(0.4 + 0.6 * number / len(NOISES), f"deltas at noise {noise:g}")
        rows += _deltas(case, generated, chains, number)
    return rows


def generate(case: Case, seed: int, problems: int, starts: int) -> Problems:
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
    objective = Objective(least_squares.loss)
    optimizer = optax.sgd(case.learning_rate)

    def sampler(window: Steps, average: bool) -> Any:
        return iasg(
            objective,
            optimizer,
            batch_size=BATCH,
            window=window,
            order="replacement",
            average=average,
        )

    fine = sampler(Steps(10), average=False)
    coarse = sampler(Steps(case.per_sample, burn_in=BURN_IN), average=True)

    def stream(chosen: Any, num: int, theta: Any, data: ClientData, key: Key) -> Any:
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
    count, starts = problems.theta.shape[:2]
    keys = jax.random.split(root, (count, starts))
    arrays = (problems.x, problems.y, problems.theta, keys)
    # Outermost one after the other: all problems at once would not be faster.
    return Chains(*map(np.asarray, jax.jit(lambda a: jax.lax.map(lambda p: chains(*p), a))(arrays)))


def _deltas(case: Case, problems: Problems, chains: Chains, number: int) -> list[Row]:
    about = {"dim": case.dim, "noise": NOISES[number]}
    errors: dict[Which, list[np.ndarray]] = {}
    norms = []
    for p, (x, y) in enumerate(zip(problems.x, problems.y[:, number], strict=True)):
        gradient_at, trace = _exact(x.astype(np.float64), y.astype(np.float64))
        collected: dict[Which, list[np.ndarray]] = {}
        for s, theta in enumerate(problems.theta[p]):
            exact = gradient_at(theta)
            norms.append(float(np.linalg.norm(exact)))
            chain = Chains(*(part[p, s, number] for part in chains))
            for key, delta in _estimates(case, theta, chain, trace):
                collected.setdefault(key, []).append(delta - exact)
        for key, found in collected.items():
            errors.setdefault(key, []).append(_moments(np.array(found)))
    rows = make_rows(about, {"exact_norm": np.mean(norms)})
    for key, values in errors.items():
        low, high = band_of_mean(np.array(values))
        ends = {"": np.mean(values, axis=0), "_low": low, "_high": high}
        for index, quantity in enumerate(QUANTITIES):
            ends_of = {quantity + end: part[index] for end, part in ends.items()}
            rows += make_rows(about | dict(key), ends_of)
    return rows


def _exact(x: np.ndarray, y: np.ndarray) -> tuple[Any, float]:
    """θ ↦ A(θ − μ), which is the gradient Xᵀ(Xθ − y)/n, and tr A⁺."""
    singular = np.linalg.svd(x, compute_uv=False)
    curvature = singular**2 / len(x)
    kept = curvature > 1e-10 * curvature.max()
    gradient = lambda theta: x.T @ (x @ theta.astype(np.float64) - y) / len(x)  # noqa: E731
    return gradient, float(np.sum(1 / curvature[kept]))


def _moments(errors: np.ndarray) -> np.ndarray:
    """‖mean‖ and ‖covariance‖_F of the errors (starts, d), without forming d×d."""
    mean = errors.mean(0)
    centred = errors - mean
    gram = centred @ centred.T / max(len(errors) - 1, 1)
    return np.array([np.linalg.norm(mean), np.linalg.norm(gram)])


def _estimates(
    case: Case, theta: np.ndarray, chain: Chains, trace: float
) -> list[tuple[Which, np.ndarray]]:
    """Every delta that one chain gives, by (panel, estimator, local steps, ρ)."""
    found: list[tuple[Which, np.ndarray]] = []

    def add(panel: str, estimator: str, steps: int, delta: np.ndarray, rho: float | None) -> None:
        key = [("panel", panel), ("estimator", estimator), ("steps", steps)]
        found.append((tuple(key if rho is None else [*key, ("rho", rho)]), delta))

    start = theta.astype(np.float64)
    for steps in EARLY:
        add("fedavg", "FedAvg", steps, start - chain.early[steps // 10 - 1], None)
    for count in case.counts:
        steps = case.per_sample * count
        add("fedavg", "FedAvg", BURN_IN + steps, start - chain.positions[count - 1], None)
        samples = chain.samples[:count].astype(np.float64)
        mean, scale = start - samples.mean(0), _calibration(samples, trace)
        estimates = {
            "mean": mean,
            "mean-scaled": (1 + (count - 1) * case.rho) * mean,
            "fixed ρ": posterior_delta(start, samples, case.rho),
            "calibrated, fixed ρ": posterior_delta(start, samples, case.rho, sample_scale=scale),
            "OAS": posterior_delta(start, samples, "oas"),
            "RBLW": posterior_delta(start, samples, "rblw"),
            "calibrated, OAS": posterior_delta(start, samples, "oas", sample_scale=scale),
            "calibrated, RBLW": posterior_delta(start, samples, "rblw", sample_scale=scale),
        }
        for name, delta in estimates.items():
            add("steps", name, steps, delta, case.rho if "fixed" in name else None)
    whole = chain.samples.astype(np.float64)
    steps = case.per_sample * len(whole)
    for rho in RHOS:
        for name, by in [("fixed ρ", 1.0), ("calibrated, fixed ρ", _calibration(whole, trace))]:
            add("rho", name, steps, posterior_delta(start, whole, rho, sample_scale=by), rho)
    return found


def _calibration(samples: np.ndarray, trace: float) -> float:
    """c with c² tr Ŝ = tr A⁺; 1 where the samples are all equal."""
    spread = float(np.sum(np.var(samples, axis=0, ddof=1)))
    return float(np.sqrt(trace / spread)) if spread > 0 else 1.0


# --- drawing: from the rows alone ---

_ESTIMATORS = ["fixed ρ", "mean-scaled", "calibrated, fixed ρ", "calibrated, OAS", "OAS", "mean"]


def draw(rows: Sequence[Row]) -> Figure:
    dims = distinct(rows, "dim")
    figure = new_figure(3.4 * len(dims), 10.6)
    grid = figure.subplots(4, len(dims), squeeze=False)
    for column, dim in enumerate(dims):
        found = where(rows, dim=dim)
        rho = where(found, panel="steps", estimator="fixed ρ")[0]["rho"]
        steps = max(distinct(where(found, panel="rho"), "steps"))
        a, b, c, d = grid[:, column]
        for index, noise in enumerate(distinct(found, "noise")):
            at = where(found, noise=noise)
            _both(a, where(at, panel="fedavg"), "steps", f"noise {noise:g}", index)
            _both(b, where(at, panel="steps", estimator="fixed ρ"), "steps", "", index)
            _both(c, where(at, panel="rho", estimator="fixed ρ"), "rho", "", index)
        for index, name in enumerate(_ESTIMATORS):
            at = where(found, noise=COMPARED, panel="steps", estimator=name)
            _line(d, at, "bias", "steps", name, index)
        tidy(a, f"a. FedAvg, d = {dim:,}", "local steps", "bias (—), variance (- -)")
        tidy(b, f"b. FedPA, ρ = {rho:g}, d = {dim:,}", "local steps", "bias (—), variance (- -)")
        tidy(c, f"c. FedPA, {steps:,} steps, d = {dim:,}", "ρ", "bias (—), variance (- -)")
        tidy(d, f"d. estimators at noise {COMPARED:g}, d = {dim:,}", "local steps", "bias")
        norm = values_of(found, quantity="exact_norm", noise=COMPARED)[0]
        for axes in (a, b, c, d):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.axhline(norm, color="0.6", linewidth=0.8, zorder=0, label="‖exact Δ‖")
    for row in (0, 3):
        handles, labels = grid[row, 0].get_legend_handles_labels()
        grid[row, -1].legend(
            handles,
            labels,
            fontsize=7,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
        )
    return figure


def _both(axes: Axes, rows: Sequence[Row], x: str, label: str, index: int) -> None:
    _line(axes, rows, "bias", x, label, index, style="-")
    _line(axes, rows, "variance", x, "", index, style="--")


def _line(
    axes: Axes,
    rows: Sequence[Row],
    quantity: str,
    x: str,
    label: str,
    index: int,
    style: Any = None,
) -> None:
    mean, *band = (values_of(rows, x, quantity=quantity + end) for end in ("", "_low", "_high"))
    draw_band(
        axes,
        sorted(distinct(rows, x)),
        mean,
        band,
        alpha=0.15,
        color=COLOURS[index],
        linestyle=STYLES[index] if style is None else style,
        marker=MARKERS[index],
        markersize=6.5 - index,  # lines that coincide are seen to
        linewidth=1.3,
        label=label or None,
    )


def findings(rows: Sequence[Row]) -> list[Table | str]:
    columns = ["d", "noise", "‖Δ‖", "estimator", *QUANTITIES]
    table = new_table("from the fewest to the most local steps", columns, left="estimator")
    names = ["FedAvg", "fixed ρ", "mean-scaled", "calibrated, fixed ρ", "calibrated, OAS"]
    for dim, noise, at in _settings(rows):
        norm = values_of(at, quantity="exact_norm")[0]
        for index, name in enumerate(names):
            cells = ["→".join(f"{v:.3g}" for v in ends(at, name, q)) for q in QUANTITIES]
            head = [f"{dim:,}", f"{noise:g}", f"{norm:.3g}"] if index == 0 else ["", "", ""]
            shown = name.replace(", fixed", "")
            table.add_row(*head, shown, *cells, end_section=name == names[-1])
    lines = [f"{claim}: {_verdict(holds(rows, *test))}" for claim, test in CLAIMS.items()]
    lines.append(f"FedAvg's bias grows once past its minimum: {_verdict(past_minimum(rows))}")
    return [table, "The paper's directions, at noise 0, 1 and 22 for d = 10, 100, 1000:", *lines]


CLAIMS = {
    "FedAvg's bias grows from the fewest local steps to the most": ("FedAvg", "bias", 1),
    "FedAvg's variance falls": ("FedAvg", "variance", -1),
    "FedPA's bias falls": ("fixed ρ", "bias", -1),
    "its control's bias falls (mean-scaled)": ("mean-scaled", "bias", -1),
    "with the calibrated scale, FedPA's bias falls": ("calibrated, fixed ρ", "bias", -1),
}
Verdict = tuple[int, int | float, bool]
"""d, noise, and whether the claim holds there."""


def by_steps(rows: Sequence[Row], estimator: str, quantity: str) -> np.ndarray:
    """The values, from the fewest to the most local steps."""
    panel = "fedavg" if estimator == "FedAvg" else "steps"
    return values_of(rows, "steps", panel=panel, estimator=estimator, quantity=quantity)


def ends(rows: Sequence[Row], estimator: str, quantity: str) -> tuple[float, float]:
    """The value at the fewest and at the most local steps."""
    values = by_steps(rows, estimator, quantity)
    return values[0], values[-1]


def past_minimum(rows: Sequence[Row]) -> list[Verdict]:
    """Whether FedAvg's bias ends above its smallest value by more than 1 %."""
    found = [(*at, by_steps(own, "FedAvg", "bias")) for *at, own in _settings(rows)]
    return [(dim, noise, bool(v[-1] > 1.01 * min(v))) for dim, noise, v in found]


def holds(rows: Sequence[Row], estimator: str, quantity: str, sign: int) -> list[Verdict]:
    """Whether the quantity went the claimed way from first to last."""
    found = [(*at, ends(own, estimator, quantity)) for *at, own in _settings(rows)]
    return [(dim, noise, bool(np.sign(b - a) == sign)) for dim, noise, (a, b) in found]


def _settings(rows: Sequence[Row]) -> list[tuple[Any, Any, list[Row]]]:
    """(d, noise, the rows of both)."""
    return [
        (dim, noise, where(rows, dim=dim, noise=noise))
        for dim in distinct(rows, "dim")
        for noise in distinct(where(rows, dim=dim), "noise")
    ]


def _verdict(verdicts: Sequence[Verdict]) -> str:
    count = sum(ok for _, _, ok in verdicts)
    text = f"{count} of {len(verdicts)} settings"
    if 0 < count < len(verdicts):
        not_at = [f"d = {dim:,}, noise {noise:g}" for dim, noise, ok in verdicts if not ok]
        text += f" (not at {'; '.join(not_at)})"
    return text


STUDY = Study(
    summary="figure 3: bias and variance of client deltas",
    columns=("dim", "noise", "panel", "estimator", "steps", "rho"),
    knob="repeats",
    repeats=(10, 3),
    measure=measure,
    draw=draw,
    findings=findings,
)
