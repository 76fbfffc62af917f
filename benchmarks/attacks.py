"""What clients that lie do to each aggregation: least squares, and digits with 20 clients.

    python -m benchmarks.attacks docs/results/attacks.csv

Clients that lie know all honest results. Each attack runs with 10, 20 and 40 % of them, and with
none; each aggregation is told the true share where it asks for one. Least squares: distance of θ to
the optimum of the honest clients. Digits: accuracy on the test split. Nothing is random but the
data and the mini-batches, whose seeds are fixed.
"""

import argparse
import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array

import fedpa
from fedpa.algorithms.methods import Method
from fedpa.atomic_write import write_atomically
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.objectives import ClientData, Objective

CLIENTS = 20
SHARES = (0.1, 0.2, 0.4)
ROUNDS = 30
FAR = 3e38
"""Close to the largest number of float32."""

Attack = Callable[[Any, Any, Array], tuple[Any, Any]]
"""(results stacked on axis 0, weights, who lies) → results and weights as they are sent."""


def _moments(rows: Array, is_liar: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of the honest rows, coordinate by coordinate."""
    honest = (~is_liar).reshape(-1, *[1] * (rows.ndim - 1))
    number = jnp.maximum(jnp.sum(~is_liar), 1).astype(rows.dtype)
    mean = jnp.sum(jnp.where(honest, rows, 0), axis=0) / number
    square = jnp.sum(jnp.where(honest, (rows - mean[None]) ** 2, 0), axis=0) / number
    return mean, jnp.sqrt(square)


def _change(change: Callable[[Array, Array], Array]) -> Attack:
    """An attack on results alone; `change` gives what liars send, for all rows."""

    def attack(rows: Any, weights: Any, is_liar: Array) -> tuple[Any, Any]:
        def lie(x: Array) -> Array:
            lies = jnp.broadcast_to(change(x, is_liar), x.shape)
            return jnp.where(is_liar.reshape(-1, *[1] * (x.ndim - 1)), lies, x)

        return jax.tree.map(lie, rows), weights

    return attack


def _little(x: Array, is_liar: Array) -> Array:
    """ALIE: as far from the mean as is inconspicuous (Baruch et al. 2019, Algorithm 3)."""
    number = jnp.asarray(len(is_liar), x.dtype)
    liars = jnp.sum(is_liar).astype(x.dtype)
    needed = jnp.floor(number / 2 + 1) - liars
    z = ndtri(jnp.clip((number - liars - needed) / (number - liars), 0.5, 0.99))
    mean, sd = _moments(x, is_liar)
    return (mean - z * sd)[None]


def _claim(rows: Any, weights: Any, is_liar: Array) -> tuple[Any, Any]:
    """The sign flipped, and ten million examples claimed."""
    rows, _ = ATTACKS["sign flip"](rows, weights, is_liar)
    return rows, jax.tree.map(lambda q: jnp.where(is_liar, jnp.full_like(q, 1e7), q), weights)


ATTACKS: dict[str, Attack] = {
    "none": lambda rows, weights, is_liar: (rows, weights),
    "sign flip": _change(lambda x, is_liar: -10 * x),
    "times a million": _change(lambda x, is_liar: 1e6 * x),
    "end of float32": _change(lambda x, is_liar: jnp.full_like(x, FAR)),
    # Xie et al. 2020: the mean's inner product with the honest one becomes negative.
    "inner product": _change(lambda x, is_liar: (-5 * _moments(x, is_liar)[0])[None]),
    "a little": _change(_little),
    "claimed examples": _claim,
    "label flip": lambda rows, weights, is_liar: (rows, weights),
}
LABELS = [*ATTACKS].index("label flip")
"""That one changes the liars' data."""


def list_aggregations(share: float, clients: int = CLIENTS) -> dict[str, str]:
    """Each aggregation as it is given on the command line, for a share of malicious clients."""
    malicious = round(share * clients)
    return {
        "weighted mean": "weighted-mean",
        "clipped mean": "clipped-mean:1",
        "centered clipping": "centered-clipping",
        "trimmed mean": f"trimmed-mean:{share:g}",
        "median": "median",
        "geometric median": "geometric-median",
        "multi-Krum": f"multi-krum:{malicious}",
        "bucketing": f"bucketing:2:trimmed-mean:{min(2 * share, 0.49):g}",
    }


class Marked(NamedTuple):
    """What a client sends, and whether it lies."""

    result: Any
    is_liar: Array


def attack_method(method: Method, attack: Attack) -> Method:
    """The method, whose clients with `lies` among their examples attack."""

    def build(objective: Objective) -> fedpa.Algorithm:
        algorithm = method(objective)
        inner = algorithm.aggregation
        kept = fedpa.server.keep_results(lambda rows, present: rows)

        def mark(client: Any) -> Any:
            def update(message: Any, data: ClientData, state: Any, key: Any) -> Any:
                out = client(message, data, state, key)
                lies = jnp.any(data.examples["lies"] > 0).astype(jnp.float32)
                return out._replace(result=Marked(out.result, lies))

            return update

        def value(total: Any) -> fedpa.server.Aggregate:
            rows, is_liar = total.results
            rows, weights = attack(rows, total.weights, is_liar > 0)
            return inner.value(fedpa.server.add_all(inner, rows, weights)[0])

        return algorithm._replace(
            clients={name: mark(client) for name, client in algorithm.clients.items()},
            aggregation=kept._replace(value=value, least_clients=inner.least_clients),
        )

    return build


def mark_liars(clients: Mapping[str, Any], malicious: int) -> dict[str, Any]:
    """The clients, the first of which lie."""
    return {
        name: {**arrays, "lies": np.full(len(arrays["y"]), float(place < malicious), np.float32)}
        for place, (name, arrays) in enumerate(clients.items())
    }


class Setting(NamedTuple):
    """A federation with a loss."""

    clients: Mapping[str, Any]
    loss: Any
    theta: Any
    local: fedpa.LocalTraining
    flip: Callable[[Array], Array]
    """Labels → flipped labels."""
    measure: Callable[[Any, int], Array]
    """(θ, how many lie) → what the table has."""


def run_attacks(
    setting: Setting, aggregation: str, malicious: int, attacks: Sequence[str] = tuple(ATTACKS)
) -> dict[str, float]:
    """What is measured after `ROUNDS` rounds of FedAvg under each attack, in one program."""
    clients = mark_liars(setting.clients, malicious)
    stacked = [fedpa.objectives.client_data(one, len(one["y"])) for one in clients.values()]
    data: Any = jax.tree.map(lambda *arrays: jnp.stack(arrays), *stacked)
    server = fedpa.Server(
        fedpa.server.sgd(1.0), aggregation=fedpa.server.parse_aggregation(aggregation)
    )
    method = fedpa.fedavg(setting.local, server)

    def run(index: Array) -> Array:
        def attack(rows: Any, weights: Any, is_liar: Array) -> tuple[Any, Any]:
            chosen: Any = jax.lax.switch(index, [*ATTACKS.values()], rows, weights, is_liar)
            return chosen

        algorithm = attack_method(method, attack)(Objective(setting.loss))
        lies, y = data.examples["lies"] > 0, data.examples["y"]
        y = jnp.where(lies & (index == LABELS), setting.flip(y), y)
        flipped = ClientData({**data.examples, "y": y}, data.n)

        def step(state: Any, t: Array) -> tuple[Any, None]:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), len(clients))
            cohort = fedpa.algorithms.Cohort(flipped, keys)
            return fedpa.fed_round(algorithm, state, cohort, t)[0], None

        state, _ = jax.lax.scan(step, algorithm.init(setting.theta), jnp.arange(ROUNDS))
        return setting.measure(algorithm.parameters(state), malicious)

    places = jnp.asarray([[*ATTACKS].index(name) for name in attacks])
    values = jax.jit(jax.vmap(run))(places)
    return dict(zip(attacks, np.asarray(values).tolist(), strict=True))


def make_least_squares() -> Setting:
    """20 clients of 20 examples, whose optima differ a little."""
    made = fedpa.objectives.make_regression(
        0, sizes=[20] * CLIENTS, dim=5, heterogeneity=0.1, noise=0.1, skew=0.5
    )
    clients = [*made.clients.values()]

    def measure(theta: Any, malicious: int) -> Array:
        x = np.concatenate([one["x"] for one in clients[malicious:]])
        y = np.concatenate([one["y"] for one in clients[malicious:]])
        optimum = jnp.asarray(np.linalg.lstsq(x, y, rcond=None)[0], jnp.float32)
        return jnp.linalg.norm(theta - optimum)

    return Setting(
        made.clients,
        fedpa.objectives.least_squares.loss,
        jnp.zeros(5),
        fedpa.LocalTraining(0.1, batch_size=10, epochs=2),
        lambda y: -y,
        measure,
    )


def make_digits() -> Setting:
    """Digits dealt to 20 clients whose label shares are Dirichlet(1) draws."""
    problem = task_named("digits").load(TaskOptions())
    whole = [problem.clients.examples(name) for name in problem.clients.ids]
    x, y = (np.concatenate([one[name] for one in whole]) for name in ("x", "y"))
    dealt = fedpa.data.dirichlet_label_skew(y, CLIENTS, 1.0, 0)
    size = min(map(len, dealt))
    clients = {f"{k:02d}": {"x": x[own[:size]], "y": y[own[:size]]} for k, own in enumerate(dealt)}
    test: Any = jax.tree.map(jnp.asarray, problem.test.examples("test"))
    model = problem.init(jax.random.key(0))
    theta, assemble = fedpa.training.problem.split_params(model)
    metric = problem.likelihood

    def loss(theta: Any, batch: Any, key: Any) -> Any:
        return problem.loss(assemble(theta), {"x": batch["x"], "y": batch["y"]}, key)

    def measure(theta: Any, malicious: int) -> Array:
        assert metric is not None
        logits: Any = metric.outputs(assemble(theta), test)
        return jnp.mean((jnp.argmax(logits, axis=-1) == test["y"]).astype(jnp.float32))

    local = fedpa.LocalTraining(0.1, batch_size=10, epochs=2)
    return Setting(clients, loss, theta, local, lambda y: 9 - y, measure)


SETTINGS = {"least squares": make_least_squares, "digits": make_digits}


def main(words: Sequence[str] | None = None) -> None:
    """Measure everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="the table, a CSV file")
    given = parser.parse_args(words)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", "aggregation", "given", "share", "attack", "value"])
    for task, make in SETTINGS.items():
        setting = make()
        for share in SHARES:
            for name, spelled in list_aggregations(share).items():
                started = time.perf_counter()
                values = run_attacks(setting, spelled, round(share * CLIENTS))
                print(f"{task}, {share:.0%}, {name}: {time.perf_counter() - started:.1f} s")
                for attack, value in values.items():
                    writer.writerow([task, name, spelled, share, attack, f"{value:.4g}"])
    write_atomically(given.out, text.getvalue().encode())


if __name__ == "__main__":
    main()
