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

from fedpa.algorithms import LocalTraining, Method, exact_posterior, fedavg, fedpa, mean_control
from fedpa.algorithms.local_training import SamplerFactory, local_work
from fedpa.data import from_mapping
from fedpa.data.partition import dirichlet_label_skew
from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import choose_looks, style_line
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    draw_means,
    make_rows,
    make_table,
    mean_of,
    simulate_rates,
    split,
    values_of,
    where,
)
from fedpa.objectives import (
    ClientData,
    Objective,
    Quadratic,
    client_loss,
    laplace,
    least_squares,
    make_regression,
    quadratic,
)
from fedpa.samplers import Sampler, exact, hmc, iasg, nuts, sghmc, sgld
from fedpa.samplers import draw as draw_samples
from fedpa.samplers.sampler import Temperature
from fedpa.server import Server
from fedpa.training.simulate import Federation, run_rounds, stack_federation
from fedpa.types import Examples, Key, Losses, Params

GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Server rates of the controls."""
RATE, BATCH = 0.1, 10
"""The clients', whichever the sampler."""
LAST = 20
RHOS = (0.01, 0.1, 1.0)
RIDGE = 0.01
SHOWN = ("shown", "train/correction_cosine", "train/delta_norm")
"""Of a run: what is reported; the angle and the length of clients' deltas."""


class About(NamedTuple):
    """What is known of a problem by its name."""

    rounds: tuple[int, int]
    """At full size, and in quick mode."""
    wide: tuple[float, ...]
    """Server rates of posterior deltas, and of `mean-scaled`, which takes their longest step at
    their own rates."""
    quantity: str
    label: str
    sign: int
    """1 where less is better, −1 where more is."""


ABOUT = {
    "least squares": About(
        (400, 100),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        "distance",
        "distance to the global optimum",
        1,
    ),
    "digits": About(
        (60, 25), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), "test accuracy", "test accuracy", -1
    ),
}


class Problem(NamedTuple):
    clients: Federation
    objective: Objective
    start: Params
    posterior: Callable[[ClientData], Quadratic]
    """A client's: exact, or Laplace at its mode."""
    local: LocalTraining
    scores: Callable[[Any], dict[str, jax.Array]]
    """θ → {"tune": lower is better, "shown": what is reported}."""


class Variant(NamedTuple):
    group: str
    """What the method's delta is made of."""
    build: Callable[[Server], Method]
    grid: tuple[float, ...] = GRID


# --- the two federations ---


def least_squares_problem(seed: int) -> Problem:
    """Ten clients with designs and optima far apart."""
    dim, size, count = 10, 60, 10
    federation = make_regression(
        seed, sizes=[size] * count, dim=dim, noise=1.0, heterogeneity=2.0, skew=2.0
    )
    clients = stack_federation(from_mapping(federation.clients))
    pooled = ClientData(
        jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), clients.data.examples),
        jnp.asarray(size * count, jnp.int32),
    )
    optimum = least_squares.posterior(pooled).mean

    def scores(theta: jax.Array) -> dict[str, jax.Array]:
        distance = jnp.linalg.norm(theta - optimum)
        return {"tune": distance, "shown": distance}

    return Problem(
        clients,
        Objective(least_squares.loss),
        jnp.full(dim, 5.0),
        least_squares.posterior,
        LocalTraining(optax.sgd(RATE), BATCH, epochs=40, samples=20),
        scores,
    )


def _logits(theta: Params, x: Any) -> jax.Array:
    logits: jax.Array = x @ theta["w"] + theta["b"][None, :]
    return logits


def _digits_loss(theta: Params, batch: Examples, key: Key) -> Losses:
    del key
    logits = _logits(theta, batch["x"])
    losses: Losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses


def _ridge(theta: Params) -> jax.Array:
    squared: jax.Array = optax.tree.norm(theta, squared=True)
    return 0.5 * RIDGE * squared


def digits_problem(seed: int) -> Problem:
    """A linear classifier of digits, dealt to twenty clients with label skew."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    x, x_val, y, y_val = train_test_split(x, y, test_size=0.15, random_state=0, stratify=y)
    dealt = dirichlet_label_skew(y, 20, 0.1, seed)
    size = min(map(len, dealt))
    dealt = [rows[:size] for rows in dealt]
    examples = {
        # Every example knows its client, whose Laplace approximation is found by it.
        f"client-{i:02d}": {"x": x[rows], "y": y[rows], "client": np.full(size, i, np.int32)}
        for i, rows in enumerate(dealt)
    }
    clients = stack_federation(from_mapping(examples))
    objective = Objective(_digits_loss, _ridge)
    start = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}

    def approximated(examples: Examples) -> Quadratic:
        data = ClientData(examples, clients.data.n)
        return laplace(objective, data, _mode(objective, data, start), jax.random.key(0))

    stacked = jax.jit(lambda a: jax.lax.map(approximated, a))(clients.data.examples)

    def posterior(data: ClientData) -> Quadratic:
        own: Quadratic = jax.tree.map(lambda a: a[data.examples["client"][0]], stacked)
        return own

    def accuracy(theta: Params, images: Any, truth: Any) -> jax.Array:
        return jnp.mean((jnp.argmax(_logits(theta, images), -1) == truth).astype(jnp.float32))

    def scores(theta: Params) -> dict[str, jax.Array]:
        tune = 1 - accuracy(theta, x_val, y_val)
        return {"tune": tune, "shown": accuracy(theta, x_test, y_test)}

    local = LocalTraining(optax.sgd(RATE), BATCH, epochs=10, samples=5)
    return Problem(clients, objective, start, posterior, local, scores)


def _mode(objective: Objective, data: ClientData, start: Params) -> Params:
    """The client's own mode, by Newton's method with halved steps until the loss falls."""
    flat, unravel = ravel_pytree(start)

    def loss(vector: jax.Array) -> jax.Array:
        return client_loss(objective, unravel(vector), data, jax.random.key(0))

    def step(_: Any, vector: jax.Array) -> jax.Array:
        direction = jnp.linalg.solve(jax.hessian(loss)(vector), jax.grad(loss)(vector))
        lengths = 0.5 ** jnp.arange(6, dtype=vector.dtype)
        tried: jax.Array = vector[None] - lengths[:, None] * direction[None]
        return tried[jnp.argmin(jax.vmap(loss)(tried))]

    return unravel(jax.lax.fori_loop(0, 12, step, flat))


# --- the methods ---


def variants(name: str, problem: Problem, quick: bool) -> dict[str, Variant]:
    """The methods to compare on a problem, by name."""
    local, wide = problem.local, ABOUT[name].wide
    scale = calibration(problem)

    def posterior(group: str, **options: Any) -> Variant:
        return Variant(group, lambda server: fedpa(local, server, **options), wide)

    def control(grid: tuple[float, ...] = GRID, **options: Any) -> Variant:
        return Variant("control", lambda server: mean_control(local, server, **options), grid)

    chosen = {
        "FedAvg": Variant("control", lambda server: fedavg(local, server)),
        "mean": control(),
        "oracle": Variant("oracle", lambda server: exact_posterior(problem.posterior, server)),
    }
    for rho in RHOS[-1:] if quick else RHOS:
        chosen[f"FedPA ρ={rho:g}"] = posterior("IASG", rho=rho)
        if not quick:
            chosen[f"mean-scaled ρ={rho:g}"] = control(wide, rho=rho)
    rules = () if quick else ("oas", "rblw")
    for rule in rules:
        chosen[f"FedPA {rule.upper()}"] = posterior("IASG", rho=rule)
    for rule in (1.0, *rules):
        shown = "ρ=1" if rule == 1.0 else str(rule).upper()
        chosen[f"FedPA {shown}, calibrated"] = posterior(
            "IASG, calibrated", rho=rule, sample_scale=scale
        )
    samplers = [] if quick else ["SGLD", "SGHMC", "HMC", "NUTS"]
    if name == "least squares":
        # Not for the classifier: 650×650 spectra of every client in every round.
        samplers.append("exact")
    for sampler in samplers:
        for mark, temperature, by in TEMPERATURES[-1:] if quick else TEMPERATURES:
            factory = sampler_at(problem, sampler, temperature)
            chosen[f"FedPA {sampler} {mark}"] = posterior(
                "other samplers", rho=1.0, sample_scale=by, sampler=factory
            )
            chosen[f"mean {sampler} {mark}"] = control(sampler=factory)
    return chosen


TEMPERATURES: tuple[tuple[str, Temperature, str], ...] = (
    ("T=n", "n", "none"),
    ("T=1 ×√n", 1.0, "sqrt-n"),
)
"""Name, T and `sample_scale`: the same covariance in two ways."""


def sampler_at(problem: Problem, name: str, temperature: Temperature) -> SamplerFactory:
    """The named sampler at this temperature, in the place of IASG."""
    work: dict[str, Any] = {"window": local_work(problem.local).window, "temperature": temperature}

    def build(objective: Objective, rate: Any) -> Sampler:
        if name == "SGLD":
            return sgld(objective, RATE, batch_size=BATCH, **work)
        if name == "SGHMC":
            return sghmc(objective, RATE / 4, batch_size=BATCH, friction=0.3, **work)
        if name == "HMC":
            return hmc(objective, RATE, integration_steps=5, **work)
        if name == "NUTS":
            return nuts(objective, RATE, max_doublings=3, **work)
        return exact(problem.posterior, temperature)

    return build


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
    """All rows, problem by problem."""
    settings.tell(0.0, "the federations, and their posteriors")
    problems = {
        "least squares": least_squares_problem(settings.seed),
        "digits": digits_problem(settings.seed),
    }
    jobs = [
        (name, problem, method, variant)
        for name, problem in problems.items()
        for method, variant in variants(name, problem, settings.quick).items()
    ]
    rows: list[Row] = []
    for number, (name, problem, method, variant) in enumerate(jobs):
        settings.tell(number / len(jobs), f"{name}: {method}")
        about = {"problem": name, "method": method, "group": variant.group}
        rows += _run(about, problem, variant, settings)
    return rows


def _run(about: Row, problem: Problem, variant: Variant, settings: Settings) -> list[Row]:
    grid = variant.grid[::2] if settings.quick else variant.grid
    rounds = ABOUT[about["problem"]].rounds[settings.quick]

    def score(server: Server, theta: Params, key: Key, clients: Federation) -> Any:
        algorithm = variant.build(server)(problem.objective)
        path = run_rounds(algorithm, theta, clients, key, rounds, evaluate=problem.scores)
        return path.metrics

    runs = [(problem.start, settings.seed + k) for k in range(settings.repeats)]
    values = simulate_rates(score, runs, grid, problem.clients)
    tune = np.where(np.isfinite(values["tune"]), values["tune"], np.inf)[:, :, -LAST:].mean((0, 2))
    best = int(np.argmin(tune))
    rows: list[Row] = []
    for rate, value in zip(grid, tune, strict=True):
        rows += make_rows(about | {"server_rate": rate}, {"tuning": min(value, 1e9)})
    every = max(rounds // 25, 1)
    for run in range(settings.repeats):
        of_run = about | {"server_rate": grid[best], "run": run}
        shown, cosine, length = (values[key][run, best] for key in SHOWN)
        for t in range(rounds):
            if t == 0 or (t + 1) % every == 0:
                quantity = ABOUT[about["problem"]].quantity
                rows += make_rows(of_run | {"round": t + 1}, {quantity: shown[t]})
        last = {
            "final": shown[-LAST:].mean(),
            "angle": np.degrees(np.arccos(np.clip(cosine[-LAST:], -1, 1))).mean(),
            "length": length[-LAST:].mean(),
        }
        rows += make_rows(of_run, last)
    return rows


# --- drawing: from the rows alone ---


def draw(rows: Sequence[Row]) -> Figure:
    """Curves of some methods, final values of all, a line per problem."""
    problems = split(rows, "problem")
    figure = new_figure(11.5, 5.2 * len(problems))
    grid = figure.subplots(len(problems), 2, squeeze=False, width_ratios=[1.0, 1.35])
    for (curves, finals), (problem, own) in zip(grid, problems.items(), strict=True):
        _draw_curves(curves, own, problem)
        _draw_finals(finals, own, problem)
    return figure


def _rank(rows: Sequence[Row], problem: str) -> list[str]:
    """The methods by their final values, the best first."""
    final = {name: mean_of(own) for name, own in _split_by_method(rows, "final").items()}
    return sorted(final, key=lambda name: ABOUT[problem].sign * final[name])


METHODS = {
    "FedAvg": "fedavg",
    "mean": "mean",
    "mean-scaled": "mean-scaled",
    "FedPA": "fedpa",
    "oracle": "centralized",
}
"""First word of a name → the method whose look it has."""


def _family(name: str) -> str:
    return name.split()[0]


def _split_by_method(rows: Sequence[Row], quantity: str) -> dict[str, list[Row]]:
    return split(where(rows, quantity=quantity), "method")


def _draw_curves(axes: Axes, rows: Sequence[Row], problem: str) -> None:
    """FedAvg, the mean, FedPA at ρ = 1, the best of the rest of each group, the oracle."""
    quantity, label = ABOUT[problem].quantity, ABOUT[problem].label
    names = ["FedAvg", "mean", "FedPA ρ=1"]
    for group in ("IASG, calibrated", "other samplers"):
        names += _rank(where(rows, group=group), problem)[:1]
    looks = choose_looks({name: METHODS[_family(name)] for name in [*names, "oracle"]})
    for name, look in looks.items():
        draw_means(axes, where(rows, method=name, quantity=quantity), "round", look, name)
    tidy(axes, f"{problem}: tuned server rates, mean and 95 % band", "round", label)
    if problem == "least squares":
        axes.set_yscale("log")
    axes.legend(fontsize=7, frameon=False)


def _draw_finals(axes: Axes, rows: Sequence[Row], problem: str) -> None:
    """Every method's final value, and the angle between its deltas and FedAvg's."""
    names, finals = _rank(rows, problem), _split_by_method(rows, "final")
    for family, look in choose_looks(METHODS).items():
        members = [name for name in names if _family(name) == family]
        values = [values_of(finals[name]) for name in members]
        means = np.array([value.mean() for value in values])
        highs = np.array([band_of_mean(value)[1] for value in values])
        axes.errorbar(
            means,
            [names.index(name) for name in members],
            xerr=np.maximum(highs - means, 0),
            **style_line(look) | {"linestyle": "none"},
            markersize=5,
            label=family,
        )
    for position, name in enumerate(names):
        axes.annotate(
            f"{mean_of(rows, method=name, quantity='angle'):.0f}°",
            (1.01, position),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color="0.35",
            va="center",
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    title = f"{problem}: mean of the last {LAST} rounds, best first; angle at the right"
    tidy(axes, title, ABOUT[problem].label, "")
    axes.tick_params(axis="y", labelsize=7)
    if problem == "least squares":
        axes.set_xlim(left=-0.05)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=5)


def findings(rows: Sequence[Row]) -> list[Table | str]:
    """Every method's final value, angle and length."""
    tables: list[Table | str] = []
    for problem, own in split(rows, "problem").items():
        lines = []
        for name in _rank(own, problem):
            of_method = where(own, method=name)
            final = where(of_method, quantity="final")
            values = values_of(final)
            spread = np.std(values, ddof=min(len(values) - 1, 1))
            lines.append(
                [
                    name,
                    f"{np.mean(values):.4g} ± {spread:.2g}",
                    f"{final[0]['server_rate']:.3g}",
                    f"{mean_of(of_method, quantity='angle'):.0f}°",
                    f"{mean_of(of_method, quantity='length'):.3g}",
                ]
            )
        columns = ["method", ABOUT[problem].quantity.split()[-1], "server rate", "angle", "‖Δ‖"]
        title = f"{problem}: mean of the last {LAST} rounds (± std over seeds)"
        tables.append(make_table(title, columns, lines, left=["method"]))
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
