"""Figure 1: two clients, two dimensions. Where the methods go, and how close they come.

Least squares with 100 points each; the designs' covariances have eigenvalues (10, 0.5) rotated by
π/6 and (8, 0.5) by −π/4, the true optima are (−3, 2) and (4, 3), labels have unit noise. Batch 10
and client rate 0.01, so that 10 local steps are one epoch. FedPA makes 100 steps of burn-in and a
sample of every 10 (ρ = 1), so that 100 samples take 1,100 steps: FedAvg with as many is the fair
pair, and `mean-IASG-100`, which sends θ₀ − x̄ of the same samples, the control.

Every method's server rate is tuned over `GRID` by the mean distance to the global optimum over the
last 20 rounds: the largest rate within 1 % of the best. (So the control has its longer step, too.)
The grid has no rate so small that a method would still be on its way: passing by the optimum is not
arriving there.

MB-SGD averages the 10 mini-batch gradients of one epoch, which is the full gradient: it has neither
bias nor noise here, and makes one step a round.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.algorithms import (
    LocalTraining,
    Method,
    exact_posterior,
    fedavg,
    fedpa,
    mb_sgd,
    mean_control,
)
from fedpa.data import from_mapping
from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import COLOURS, Look, choose_looks
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    draw_means,
    make_rows,
    make_table,
    mean_of,
    simulate_rates,
    split,
    values_of,
    where,
)
from fedpa.objectives import Objective, Quadratic, client_data, global_posterior, least_squares
from fedpa.samplers import exact
from fedpa.server import Server
from fedpa.training.simulate import run_rounds, stack_federation
from fedpa.types import Key

POINTS, BATCH, RATE = 100, 10, 0.01
DESIGNS = [((10, 0.5), np.pi / 6, (-3, 2)), ((8, 0.5), -np.pi / 4, (4, 3))]
"""Eigenvalues, rotation and true optimum of each client."""
STARTS = [(-10, -10), (10, -10), (-10, 10), (10, 10), (0, -12)]
GRID = (0.01, 0.03, 0.1, 0.3, 1.0)
QUICK_GRIDS = {"FedPA": (0.03, 0.1, 0.3), "FedAvg": (1.0,), "": (0.3, 1.0)}
"""By the first letters of the method: in fewer rounds FedAvg needs large rates to arrive."""
LAST = 20
ROUNDS, QUICK_ROUNDS = 1_000, 80
EVERY = 20
"""Rounds between the stored points of a curve."""
PATHS = {"FedAvg-1100": "FedAvg", "FedPA-IASG-100": "FedPA"}
"""Whose paths the animation shows, and what it calls them."""
PATH_ROUNDS = 120
CLIENTS = ("0.35", "0.6")
"""The clients' greys: colours are the methods'."""


class Entry(NamedTuple):
    local_steps: int
    build: Callable[[Server], Method]


def clients(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Client by client: a 100×2 normal array, scaled and rotated; then 100 normals of noise."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for index, (eigenvalues, angle, optimum) in enumerate(DESIGNS):
        c, s = np.cos(angle), np.sin(angle)
        x = rng.standard_normal((POINTS, 2)) * np.sqrt(eigenvalues) @ np.array([[c, s], [-s, c]])
        y = x @ np.array(optimum) + rng.standard_normal(POINTS)
        drawn[f"client-{index}"] = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return drawn


def methods() -> dict[str, Entry]:
    """The methods to compare, by name."""

    def local(burn_in: int, samples: int) -> LocalTraining:
        # An epoch is 10 steps: one sample per epoch is one per 10 steps.
        return LocalTraining(
            optax.sgd(RATE), batch_size=BATCH, epochs=burn_in + samples, samples=samples
        )

    def with_iasg(samples: int) -> Callable[[Server], Method]:
        return lambda server: fedpa(local(10, samples), server, rho=1.0)

    def with_exact(samples: int) -> Callable[[Server], Method]:
        def sampler(objective: Objective, rate: Any) -> Any:
            return exact(least_squares.posterior)

        return lambda server: fedpa(local(0, samples), server, rho=1.0, sampler=sampler)

    return {
        "MB-SGD": Entry(10, lambda server: mb_sgd(local(0, 1), server)),
        "FedAvg-10": Entry(10, lambda server: fedavg(local(0, 1), server)),
        "FedAvg-100": Entry(100, lambda server: fedavg(local(0, 10), server)),
        "FedAvg-1100": Entry(1100, lambda server: fedavg(local(0, 110), server)),
        "FedPA-IASG-10": Entry(200, with_iasg(10)),
        "FedPA-IASG-100": Entry(1100, with_iasg(100)),
        "FedPA-exact-10": Entry(0, with_exact(10)),
        "FedPA-exact-100": Entry(0, with_exact(100)),
        "mean-IASG-100": Entry(1100, lambda server: mean_control(local(10, 100), server)),
        "exact deltas": Entry(0, lambda server: exact_posterior(least_squares.posterior, server)),
    }


def measure(settings: Settings) -> list[Row]:
    """All rows: of the landscape, then of every method."""
    examples = clients(settings.seed)
    quadratics = [least_squares.posterior(client_data(c)) for c in examples.values()]
    optimum = np.asarray(global_posterior(quadratics).mean)
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    # Pairs (start, seed): every seed from the first start, and each with its own start.
    pairs = [(0, k) for k in range(settings.repeats)]
    pairs += [(k, k) for k in range(1, min(settings.repeats, len(STARTS)))]
    runs = [(jnp.asarray(STARTS[k], jnp.float32), settings.seed + seed) for k, seed in pairs]
    rows = _landscape(quadratics, optimum)
    federation = stack_federation(from_mapping(examples))
    entries = methods()
    costs = np.cumsum([0, *(20 + entry.local_steps for entry in entries.values())])
    for cost, (name, entry) in zip(costs, entries.items(), strict=False):
        grid: Sequence[float] = GRID
        if settings.quick:
            grid = next(rates for start, rates in QUICK_GRIDS.items() if name.startswith(start))
        settings.tell(cost / costs[-1], f"{name}: {len(runs)} runs × {len(grid)} server rate(s)")

        def trace(server: Server, theta: Any, key: Key, entry: Entry = entry) -> Any:
            algorithm = entry.build(server)(Objective(least_squares.loss))
            path = run_rounds(
                algorithm, theta, federation, key, rounds, evaluate=lambda theta: {"θ": theta}
            )
            return path.metrics["θ"]

        paths = simulate_rates(trace, runs, grid)
        about = {"method": name, "local_steps": entry.local_steps}
        rows += _rows(about, paths, pairs, grid, optimum)
    return rows


def _landscape(quadratics: Sequence[Quadratic], optimum: np.ndarray) -> list[Row]:
    """What the contours need: optima and Hessians."""
    rows = []
    for index, q in enumerate(quadratics):
        h = np.asarray(q.hessian)
        values = {"x": q.mean[0], "y": q.mean[1], "h11": h[0, 0], "h12": h[0, 1], "h22": h[1, 1]}
        rows += make_rows({"method": f"client {index + 1}"}, values)
    return [*rows, *make_rows({"method": "global"}, dict(zip(("x", "y"), optimum, strict=True)))]


def _rows(
    about: Row,
    paths: np.ndarray,
    runs: Sequence[tuple[int, int]],
    grid: Sequence[float],
    optimum: np.ndarray,
) -> list[Row]:
    """Final distances at every rate; curves and paths at the best."""
    distances = np.linalg.norm(paths - optimum, axis=-1)  # (runs, rates, rounds)
    distances = np.where(np.isfinite(distances), distances, np.inf)
    final = distances[:, :, -LAST:].mean(-1)
    scores = final.mean(0)
    best = int(np.flatnonzero(scores <= 1.01 * scores.min())[-1])
    rows: list[Row] = []
    for r, (start, seed) in enumerate(runs):
        run = about | {"start": start, "run": seed}
        for g, rate in enumerate(grid):
            final_distance = {"final_distance": min(final[r, g], 1e9)}
            rows += make_rows(run | {"server_rate": rate}, final_distance)
        if start != seed:
            continue  # the curves are those of the runs with a start of their own
        tuned = run | {"server_rate": grid[best]}
        for t in range(distances.shape[-1]):
            if t < 20 or (t + 1) % EVERY == 0:
                rows += make_rows(tuned | {"round": t + 1}, {"distance": distances[r, best, t]})
        if about["method"] in PATHS and start == 0:
            for t, (x, y) in enumerate(paths[r, best, :PATH_ROUNDS]):
                rows += make_rows(tuned | {"round": t + 1}, {"x": x, "y": y})
    return rows


# --- drawing: from the rows alone ---


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure(10.5, 3.6)
    left, middle, right = figure.subplots(1, 3)
    _contours(left, rows)
    left.plot(*STARTS[0], marker="P", color="0.2", linestyle="none", label="first start")
    left.legend(fontsize=7, frameon=True, framealpha=0.9, loc="lower right")
    tidy(left, "client objectives and their optima", "θ₁", "θ₂")
    by_method = split(where(rows, quantity="distance"), "method")
    looks = _choose_looks(by_method)
    for axes, title, starts in [
        (middle, "MB-SGD and FedAvg", ("MB", "FedAvg")),
        (right, "FedPA (ρ = 1) and its control", ("FedPA", "mean")),
    ]:
        members = [name for name in by_method if name.startswith(starts)]
        for name in members:
            draw_means(axes, by_method[name], "round", looks[name], name)
        tidy(axes, title, "round", "distance to the global optimum\n(mean and 95 % band)")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.001, 100)
        axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=2)
    return figure


def _choose_looks(names: Iterable[str]) -> dict[str, Look]:
    named = {"MB": "mb-sgd", "FedAvg": "fedavg", "FedPA": "fedpa", "mean": "mean"}
    return choose_looks({name: named.get(name.split("-")[0]) for name in names})


def _read(rows: Sequence[Row], method: str, *quantities: str) -> list[float]:
    """One number for each quantity."""
    return [values_of(rows, method=method, quantity=quantity)[0] for quantity in quantities]


def _contours(axes: Axes, rows: Sequence[Row]) -> None:
    grid = np.stack(np.meshgrid(np.linspace(-13, 13, 150), np.linspace(-13, 13, 150)), axis=-1)
    names = [m for m in distinct(rows, "method") if m.startswith("client")]
    for index, name in enumerate(names):
        x, y, a, b, c = _read(rows, name, "x", "y", "h11", "h12", "h22")
        offset = grid - np.array([x, y])
        value = 0.5 * np.einsum("ijk,kl,ijl->ij", offset, np.array([[a, b], [b, c]]), offset)
        levels = np.max(value) * np.array([0.0015, 0.01, 0.04, 0.1, 0.25, 0.5])
        axes.contour(
            grid[..., 0],
            grid[..., 1],
            value,
            levels=levels,
            colors=CLIENTS[index],
            linewidths=0.8,
            linestyles=["-", "--"][index],
        )
        axes.plot(
            x,
            y,
            "o^"[index],
            color=CLIENTS[index],
            label=f"{name}: contours ({['solid', 'dashed'][index]}), optimum",
            ls="none",
        )
    optimum = _read(rows, "global", "x", "y")
    # Above the paths, which end there.
    axes.plot(*optimum, "*k", markersize=11, label="global optimum", ls="none", zorder=3)
    axes.set_aspect("equal")
    axes.set_xlim(-13, 13)
    axes.set_ylim(-13, 13)


def findings(rows: Sequence[Row]) -> list[Table | str]:
    """Final distances by server rate."""
    grid = sorted(distinct(rows, "server_rate"))

    def show(value: float) -> str:
        return "div." if value > 1e3 else f"{value:.2g}" if value >= 1e-3 else "<0.001"

    lines = []
    for result in results(rows):
        cells = [show(result.by_rate[rate]) if rate in result.by_rate else "" for rate in grid]
        edge = "*" if result.rate == min(result.by_rate) else ""
        lines.append([result.method, *cells, show(result.tuned), f"{result.rate:g}{edge}"])
    table = make_table(
        f"distance to the global optimum, mean of the last {LAST} rounds, by server rate",
        ["method", *(f"{rate:g}" for rate in grid), "tuned", "at"],
        lines,
        left=["method"],
    )
    runs = len(distinct(where(rows, quantity="final_distance", start=0), "run"))
    return [
        table,
        f"By server rate: from the first start, mean over {runs} seed(s). Tuned: at the tuned "
        "rate, each seed from a start of its own; div.: diverges; *: the smallest rate tried. "
        "FedAvg-1100 and FedPA-IASG-100 make equally many local steps; mean-IASG-100 is "
        "FedPA-IASG-100 without the covariance.",
    ]


class Result(NamedTuple):
    method: str
    by_rate: dict[float, float]
    """Server rate → final distance from the first start, mean over seeds."""
    tuned: float
    """At the tuned rate, every seed from a start of its own."""
    rate: float


def results(rows: Sequence[Row]) -> list[Result]:
    """What came of each method."""
    collected = []
    for name, final in split(where(rows, quantity="final_distance"), "method").items():
        by_rate = {rate: mean_of(own, start=0) for rate, own in split(final, "server_rate").items()}
        rate = where(rows, method=name, quantity="distance")[0]["server_rate"]
        own = [r["value"] for r in where(final, server_rate=rate) if r["start"] == r["run"]]
        collected.append(Result(name, by_rate, float(np.mean(own)), rate))
    return collected


def animation(rows: Sequence[Row]) -> dict[str, bytes]:
    """`toy.gif`: the server's path over the contours, FedAvg against FedPA."""
    from PIL import Image  # with matplotlib, which draws with it

    figure = new_figure(7.6, 4.6)
    optimum = np.array(_read(rows, "global", "x", "y"))
    looks, drawn = _choose_looks(PATHS), []
    for axes, name in zip(figure.subplots(1, 2), PATHS, strict=True):
        _contours(axes, rows)
        tidy(axes, "", "θ₁", "θ₂")
        colour = COLOURS[looks[name].colour]
        line = axes.plot([], [], "o-", color=colour, linewidth=1.2, markersize=2.5)[0]
        xy = [values_of(rows, "round", method=name, quantity=q) for q in ("x", "y")]
        drawn.append((axes, line, PATHS[name], np.array([STARTS[0], *zip(*xy, strict=True)])))
    figure.legend(
        *axes.get_legend_handles_labels(),
        fontsize=8,
        frameon=False,
        loc="outside lower center",
        ncols=3,
    )
    longest = max(len(path) for *_, path in drawn)
    images = []
    for t in [*range(30), *range(30, longest, 3)]:
        for axes, line, title, path in drawn:
            line.set_data(path[: t + 1, 0], path[: t + 1, 1])
            away = np.linalg.norm(path[t] - optimum)
            words = f"{title}, 1,100 local steps a round\nround {t}: {away:.2f} from the optimum ★"
            axes.set_title(words, fontsize=9, loc="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=80)
        images.append(Image.open(buffer).convert("RGB"))
    # The last frame has every colour; with one palette a frame is stored as its changes.
    palette = images[-1].quantize(64, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    output = io.BytesIO()
    times = [90] * (len(images) - 1) + [2_500]
    images[0].save(
        output, format="GIF", save_all=True, append_images=images[1:], duration=times, loop=0
    )
    return {"toy.gif": output.getvalue()}


STUDY = Study(
    summary="figure 1: two clients in two dimensions",
    columns=("method", "local_steps", "server_rate", "start", "run", "round"),
    knob="seeds",
    repeats=(5, 2),
    measure=measure,
    draw=draw,
    findings=findings,
    extras=animation,
)
