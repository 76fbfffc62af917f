"""What the posterior correction does: how much of a gain is a longer step, and how much covariance.

Two federations of equal clients, all of whom take part in every round. *Least squares*: ten clients
with designs and optima far apart, whose global optimum is known. *Digits*: a linear classifier of
scikit-learn's 8×8 images dealt to twenty clients with Dirichlet(0.1) label skew, with an L2
regularizer; FedAvg's known hard case.

Every method has its own server rate, tuned over a grid: on the distance itself for least squares,
on held-out validation digits for the classifier. A longer step is thereby given to every method;
`mean`, which sends θ₀ − x̄ and tunes its rate, is FedPA without the covariance, and `mean-scaled` is
the same with steps 1 + (ℓ−1)ρ as long at FedPA's own rates. The posterior deltas' lengths differ by
orders of magnitude, so their grid reaches further down than that of `mean`, whose lowest rate is
one at which it still arrives within the run: passing by the optimum is not arriving there.

Half of the local epochs are burn-in. Without, samples trace the way from θ₀ to the mode, Ŝ is large
along it, and Σ̂⁻¹ takes away the very direction to go.

Samplers with a temperature run at T = n_i, the scale at which Σ̂⁻¹(θ − μ̂) is the gradient, and at
T = 1 with the deviations scaled by √n_i: the same covariance, but a mean that is √n_i times as
sharp. *Calibrated* IASG multiplies the deviations by one number, found before training at the
local modes, such that tr Ŝ is tr A⁻¹ on average. The *oracle* sends A_i(θ − μ_i): exact for least
squares, from the Laplace approximation at each client's mode for the classifier.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.algorithms.exact_posterior import exact_posterior
from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.fedpa import fedpa
from fedpa.algorithms.local_training import LocalTraining, SamplerFactory, local_work
from fedpa.algorithms.mean import mean
from fedpa.algorithms.methods import Method
from fedpa.data.partition import dirichlet_label_skew
from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.figures import COLOURS, MARKERS, new_figure, tidy
from fedpa.experiments.studies.simulation import Clients, equal_clients, simulate
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    distinct,
    draw_runs,
    make_rows,
    new_table,
    values_of,
    where,
)
from fedpa.objectives import least_squares, quadratic
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.least_squares import make_regression
from fedpa.objectives.objective import Objective, client_loss
from fedpa.objectives.quadratic import Quadratic, laplace
from fedpa.samplers import exact, hmc, iasg, nuts, sghmc, sgld
from fedpa.samplers.sampler import Sampler
from fedpa.samplers.sampler import draw as draw_samples
from fedpa.samplers.temperature import Temperature
from fedpa.server import optimizers
from fedpa.server.update import Server
from fedpa.types import Examples, Key, Losses, Params

GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Server rates of the controls."""
WIDE = {
    "least squares": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "digits": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}
"""Of posterior deltas, and of `mean-scaled`, which takes their longest step at their own rates."""
LAST = 20
RHOS = (0.01, 0.1, 1.0)


class Problem(NamedTuple):
    name: str
    clients: Clients
    objective: Objective
    start: Params
    posterior: Callable[[ClientData], Quadratic]
    """A client's: exact, or Laplace at its mode."""
    local: LocalTraining
    learning_rate: float
    """The clients', whichever the sampler."""
    rounds: int
    scores: Callable[[Any], dict[str, jax.Array]]
    """θ → {"tune": lower is better, "shown": what is reported}."""
    shown: str
    """The name of what is reported."""


class Variant(NamedTuple):
    group: str
    """What the method's delta is made of."""
    build: Callable[[Server], Method]
    grid: tuple[float, ...] = GRID


# --- the two federations ---


def least_squares_problem(seed: int, rounds: int) -> Problem:
    dim, size, count = 10, 60, 10
    federation = make_regression(
        seed, sizes=[size] * count, dim=dim, noise=1.0, heterogeneity=2.0, skew=2.0
    )
    clients = equal_clients(federation.clients)
    pooled = ClientData(
        jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), clients.data.examples),
        jnp.asarray(size * count, jnp.int32),
    )
    optimum = least_squares.posterior(pooled).mean

    def scores(theta: jax.Array) -> dict[str, jax.Array]:
        distance = jnp.linalg.norm(theta - optimum)
        return {"tune": distance, "shown": distance}

    return Problem(
        "least squares",
        clients,
        Objective(least_squares.loss),
        jnp.full(dim, 5.0),
        least_squares.posterior,
        LocalTraining(optax.sgd(0.1), batch_size=10, epochs=40, samples=20),
        0.1,
        rounds,
        scores,
        "distance",
    )


RIDGE = 0.01


def _logits(theta: Params, x: Any) -> jax.Array:
    return x @ theta["w"] + theta["b"][None, :]


def _digits_loss(theta: Params, batch: Examples, key: Key) -> Losses:
    del key
    logits = _logits(theta, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def _ridge(theta: Params) -> jax.Array:
    return 0.5 * RIDGE * optax.tree.norm(theta, squared=True)


def digits_problem(seed: int, rounds: int) -> Problem:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    x, x_val, y, y_val = train_test_split(x, y, test_size=0.15, random_state=0, stratify=y)
    dealt = dirichlet_label_skew(y, 20, 0.1, seed)
    size = min(map(len, dealt))
    dealt = [rows[:size] for rows in dealt]
    clients = equal_clients(
        {
            # Every example knows its client, whose Laplace approximation is found by it.
            f"client-{i:02d}": {"x": x[rows], "y": y[rows], "client": np.full(size, i, np.int32)}
            for i, rows in enumerate(dealt)
        }
    )
    objective = Objective(_digits_loss, _ridge)
    start = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}

    def approximated(examples: Examples) -> Quadratic:
        data = ClientData(examples, clients.data.n)
        return laplace(objective, data, _mode(objective, data, start), jax.random.key(0))

    stacked = jax.jit(lambda a: jax.lax.map(approximated, a))(clients.data.examples)

    def posterior(data: ClientData) -> Quadratic:
        return jax.tree.map(lambda a: a[data.examples["client"][0]], stacked)

    def accuracy(theta: Params, images: Any, truth: Any) -> jax.Array:
        return jnp.mean((jnp.argmax(_logits(theta, images), -1) == truth).astype(jnp.float32))

    return Problem(
        "digits",
        clients,
        objective,
        start,
        posterior,
        LocalTraining(optax.sgd(0.1), batch_size=10, epochs=10, samples=5),
        0.1,
        rounds,
        lambda theta: {
            "tune": 1 - accuracy(theta, x_val, y_val),
            "shown": accuracy(theta, x_test, y_test),
        },
        "test accuracy",
    )


def _mode(objective: Objective, data: ClientData, start: Params) -> Params:
    """The client's own mode, by Newton's method with halved steps until the loss falls."""
    flat, unravel = ravel_pytree(start)

    def loss(vector: jax.Array) -> jax.Array:
        return client_loss(objective, unravel(vector), data, jax.random.key(0))

    def step(_: Any, vector: jax.Array) -> jax.Array:
        direction = jnp.linalg.solve(jax.hessian(loss)(vector), jax.grad(loss)(vector))
        lengths = 0.5 ** jnp.arange(6, dtype=vector.dtype)
        tried = vector[None] - lengths[:, None] * direction[None]
        return tried[jnp.argmin(jax.vmap(loss)(tried))]

    return unravel(jax.lax.fori_loop(0, 12, step, flat))


# --- the methods ---


def variants(problem: Problem, quick: bool) -> dict[str, Variant]:
    scale, wide = calibration(problem), WIDE[problem.name]

    def posterior(**options: Any) -> Callable[[Server], Method]:
        return lambda server: fedpa(problem.local, server, **options)

    def uncorrected(**options: Any) -> Callable[[Server], Method]:
        return lambda server: mean(problem.local, server, **options)

    found = {
        "FedAvg": Variant("control", lambda server: fedavg(problem.local, server)),
        "mean": Variant("control", uncorrected()),
        "oracle": Variant("oracle", lambda server: exact_posterior(problem.posterior, server)),
    }
    for rho in RHOS[-1:] if quick else RHOS:
        found[f"FedPA ρ={rho:g}"] = Variant("IASG", posterior(rho=rho), wide)
        if not quick:
            found[f"mean-scaled ρ={rho:g}"] = Variant("control", uncorrected(rho=rho), wide)
    if not quick:
        for rule in ("oas", "rblw"):
            found[f"FedPA {rule.upper()}"] = Variant("IASG", posterior(rho=rule), wide)
    calibrated: tuple[Any, ...] = (1.0,) if quick else (1.0, "oas", "rblw")
    for rule in calibrated:
        name = "ρ=1" if rule == 1.0 else rule.upper()
        found[f"FedPA {name}, calibrated"] = Variant(
            "IASG, calibrated", posterior(rho=rule, sample_scale=scale), wide
        )
    for name, factory in samplers(problem).items():
        if quick and (problem.name, name) != ("least squares", "exact T=1 ×√n"):
            continue
        by = "sqrt-n" if "×√n" in name else "none"
        found[f"FedPA {name}"] = Variant(
            "other samplers", posterior(rho=1.0, sample_scale=by, sampler=factory), wide
        )
        found[f"mean {name}"] = Variant("control", uncorrected(sampler=factory))
    return found


def samplers(problem: Problem) -> dict[str, SamplerFactory]:
    """Every sampler at T = n_i and, its deviations to be scaled by √n_i, at T = 1."""
    rate, batch = problem.learning_rate, problem.local.batch_size
    window = local_work(problem.local).window

    def langevin(objective: Objective, t: Temperature) -> Sampler:
        return sgld(objective, rate, batch_size=batch, window=window, temperature=t)

    def underdamped(objective: Objective, t: Temperature) -> Sampler:
        return sghmc(
            objective, rate / 4, batch_size=batch, window=window, temperature=t, friction=0.3
        )

    def leapfrog(objective: Objective, t: Temperature) -> Sampler:
        return hmc(objective, rate, window=window, temperature=t, integration_steps=5)

    def no_u_turn(objective: Objective, t: Temperature) -> Sampler:
        return nuts(objective, rate, window=window, temperature=t, max_doublings=3)

    def independent(objective: Objective, t: Temperature) -> Sampler:
        return exact(problem.posterior, t)

    built = {"SGLD": langevin, "SGHMC": underdamped, "HMC": leapfrog, "NUTS": no_u_turn}
    if problem.name == "least squares":
        # Not for the classifier: 650×650 spectra of every client in every round.
        built["exact"] = independent

    def factory(make: Callable[..., Sampler], t: Temperature) -> SamplerFactory:
        return lambda objective, _: make(objective, t)

    temperatures: dict[str, Temperature] = {"T=n": "n", "T=1 ×√n": 1.0}
    return {
        f"{name} {mark}": factory(make, t)
        for name, make in built.items()
        for mark, t in temperatures.items()
    }


def calibration(problem: Problem) -> float:
    """One number c with c² tr Ŝ = tr A⁻¹ on average over clients, IASG started at their modes."""
    local, n = problem.local, problem.clients.data.n
    sampler = iasg(problem.objective, local.optimizer, batch_size=local.batch_size)
    _, unravel = ravel_pytree(problem.start)

    def traces(examples: Examples, key: Key) -> tuple[jax.Array, jax.Array]:
        data = ClientData(examples, n)
        q = problem.posterior(data)
        samples, _ = draw_samples(sampler, unravel(q.mean), data, key, local_work(local).samples)
        flat = jax.vmap(lambda t: ravel_pytree(t)[0])(samples)
        wanted = jnp.trace(quadratic.covariance(q, q.n))
        return jnp.sum(jnp.var(flat, axis=0, ddof=1)), wanted

    examples = problem.clients.data.examples
    keys = jax.random.split(jax.random.key(0), len(problem.clients.hashes))
    spread, wanted = jax.jit(lambda a: jax.lax.map(lambda p: traces(*p), a))((examples, keys))
    return float(jnp.sqrt(jnp.mean(wanted) / jnp.mean(spread)))


# --- measuring ---


def measure(settings: Settings) -> list[Row]:
    settings.tell(0.0, "the federations, and their posteriors")
    rounds = (100, 25) if settings.quick else (400, 60)
    problems = [
        least_squares_problem(settings.seed, rounds[0]),
        digits_problem(settings.seed, rounds[1]),
    ]
    jobs = [
        (problem, name, variant)
        for problem in problems
        for name, variant in variants(problem, settings.quick).items()
    ]
    rows: list[Row] = []
    for number, (problem, name, variant) in enumerate(jobs):
        settings.tell(number / len(jobs), f"{problem.name}: {name}")
        rows += _run(problem, name, variant, settings)
    return rows


def _run(problem: Problem, name: str, variant: Variant, settings: Settings) -> list[Row]:
    grid = variant.grid[::2] if settings.quick else variant.grid
    seeds = [settings.seed + k for k in range(settings.repeats)]
    pairs = [(seed, rate) for seed in seeds for rate in grid]

    def one(seed: jax.Array, rate: jax.Array, clients: Clients) -> Any:
        server = Server(optimizers.sgd(1.0), schedule=lambda t: rate)
        algorithm = variant.build(server)(problem.objective)
        root = jax.random.key(seed)
        path = simulate(algorithm, problem.start, clients, root, problem.rounds)
        return jax.vmap(problem.scores)(path.theta) | {
            "cosine": path.infos.correction_cosine,
            "length": path.infos.delta_norm,
        }

    values = jax.jit(jax.vmap(one, in_axes=(0, 0, None)))(
        jnp.asarray([seed for seed, _ in pairs], jnp.uint32),
        jnp.asarray([rate for _, rate in pairs]),
        problem.clients,  # an argument, not a constant that the compiler would work on
    )
    shape = (len(seeds), len(grid), problem.rounds)
    found = {key: np.asarray(value, np.float64).reshape(shape) for key, value in values.items()}
    return _rows(problem, name, variant, grid, found)


def _rows(
    problem: Problem,
    name: str,
    variant: Variant,
    grid: Sequence[float],
    found: dict[str, np.ndarray],
) -> list[Row]:
    tune = np.where(np.isfinite(found["tune"]), found["tune"], np.inf)[:, :, -LAST:].mean((0, 2))
    best = int(np.argmin(tune))
    about = {
        "problem": problem.name,
        "method": name,
        "group": variant.group,
        "server_rate": grid[best],
    }
    rows: list[Row] = []
    for rate, value in zip(grid, tune, strict=True):
        rows += make_rows(about | {"server_rate": rate}, {"tuning": min(value, 1e9)})
    every = max(problem.rounds // 25, 1)
    for run in range(found["shown"].shape[0]):
        of_run = about | {"run": run}
        shown, cosine, length = (found[key][run, best] for key in ("shown", "cosine", "length"))
        for t in range(problem.rounds):
            if t == 0 or (t + 1) % every == 0:
                rows += make_rows(of_run | {"round": t + 1}, {problem.shown: shown[t]})
        last = {
            "final": shown[-LAST:].mean(),
            "angle": np.degrees(np.arccos(np.clip(cosine[-LAST:], -1, 1))).mean(),
            "length": length[-LAST:].mean(),
        }
        rows += make_rows(of_run, last)
    return rows


# --- drawing: from the rows alone ---

HIGHER_IS_BETTER = {"least squares": False, "digits": True}


def draw(rows: Sequence[Row]) -> Figure:
    problems = distinct(rows, "problem")
    figure = new_figure(11.5, 5.2 * len(problems))
    grid = figure.subplots(len(problems), 2, squeeze=False, width_ratios=[1.0, 1.35])
    for (curves, bars), problem in zip(grid, problems, strict=True):
        found = where(rows, problem=problem)
        _curves(curves, found, problem)
        _finals(bars, found, problem)
    return figure


def _curves(axes: Axes, rows: Sequence[Row], problem: str) -> None:
    quantity = next(r["quantity"] for r in rows if "round" in r)
    for index, name in enumerate(_chosen(rows, problem)):
        draw_runs(axes, where(rows, method=name, quantity=quantity), index, name)
    word = "distance to the global optimum" if problem == "least squares" else quantity
    tidy(axes, f"{problem}: tuned server rates, mean and 95 % band", "round", word)
    if problem == "least squares":
        axes.set_yscale("log")
    axes.legend(fontsize=7, frameon=False)


def _chosen(rows: Sequence[Row], problem: str) -> list[str]:
    """FedAvg, the mean, FedPA at ρ = 1, the best of the rest of each group, the oracle."""
    names = ["FedAvg", "mean", "FedPA ρ=1"]
    for group in ("IASG, calibrated", "other samplers"):
        members = distinct(where(rows, group=group), "method")
        names += sorted(members, key=lambda m: _badness(rows, m, problem))[:1]
    return [*names, "oracle"]


def _badness(rows: Sequence[Row], method: str, problem: str) -> float:
    value = float(np.mean(values_of(rows, method=method, quantity="final")))
    return -value if HIGHER_IS_BETTER[problem] else value


def _finals(axes: Axes, rows: Sequence[Row], problem: str) -> None:
    """Every method's final value, and the angle between its deltas and FedAvg's."""
    names = sorted(distinct(rows, "method"), key=lambda m: _badness(rows, m, problem))
    groups = distinct(rows, "group")
    shown = set()
    for position, name in enumerate(names):
        values = values_of(rows, method=name, quantity="final")
        group = groups.index(where(rows, method=name)[0]["group"])
        low, high = band_of_mean(values)
        axes.errorbar(
            values.mean(),
            position,
            xerr=[[max(values.mean() - low, 0)], [max(high - values.mean(), 0)]],
            marker=MARKERS[group],
            color=COLOURS[group],
            linestyle="none",
            markersize=5,
            label=None if group in shown else groups[group],
        )
        shown.add(group)
        angle = np.mean(values_of(rows, method=name, quantity="angle"))
        axes.annotate(
            f"{angle:.0f}°",
            (1.01, position),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color="0.35",
            va="center",
        )
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    word = "distance to the global optimum" if problem == "least squares" else "test accuracy"
    tidy(
        axes, f"{problem}: mean of the last {LAST} rounds, best first; angle at the right", word, ""
    )
    axes.tick_params(axis="y", labelsize=7)
    if problem == "least squares":
        axes.set_xlim(left=-0.05)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=5)


def findings(rows: Sequence[Row]) -> list[Table | str]:
    tables: list[Table | str] = []
    for problem in distinct(rows, "problem"):
        found = where(rows, problem=problem)
        word = "distance" if problem == "least squares" else "accuracy"
        table = new_table(
            f"{problem}: mean of the last {LAST} rounds (± std over seeds)",
            ["method", word, "server rate", "angle", "‖Δ‖"],
            left="method",
        )
        for name in sorted(distinct(found, "method"), key=lambda m: _badness(found, m, problem)):
            values, angle, length = (
                values_of(found, method=name, quantity=q) for q in ("final", "angle", "length")
            )
            rate = where(found, method=name, quantity="final")[0]["server_rate"]
            table.add_row(
                name,
                f"{np.mean(values):.4g} ± {np.std(values, ddof=min(len(values) - 1, 1)):.2g}",
                f"{rate:.3g}",
                f"{np.mean(angle):.0f}°",
                f"{np.mean(length):.3g}",
            )
        tables.append(table)
    tables.append(
        "Angle: between a client's delta and θ₀ − θ_K of the same chain (0° for methods without "
        "one). Server rates are tuned, so `mean` already has the longer step: what FedPA adds to "
        "`mean` with the same samples is covariance."
    )
    return tables


STUDY = Study(
    summary="ours: longer step or covariance",
    columns=("problem", "group", "method", "server_rate", "run", "round"),
    knob="seeds",
    repeats=(3, 1),
    measure=measure,
    draw=draw,
    findings=findings,
)
