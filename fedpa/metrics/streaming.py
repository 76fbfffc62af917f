"""Evaluation over a federation: clients are read one after the other, batches have one size.

Sums are kept for every client, so that a metric is available overall and as a distribution over
clients: the 10th percentile shows how the worst-served clients do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.data.federated import FederatedData, check_when_read
from fedpa.errors import DataError
from fedpa.metrics.metric import Counts, Metric
from fedpa.types import Examples, Model

PERCENTILES = (10, 50, 90)
KEPT_UP_TO = 2**28
"""Bytes of batches that are kept for the next evaluation."""


class Batch(NamedTuple):
    examples: Any
    owners: np.ndarray
    """For each real row the position of its client; rows beyond them are padding."""


class Evaluation(NamedTuple):
    """A metric of a federation: of all examples, and of every client.

    Args:
        values: Over all examples.
        by_client: Each metric for every client taken, by name; NaN for one without examples.
        clients: How many of them have at least one example.
        examples: How many were measured.
        vectors: The sums of the metric's `Counts.vectors` (default: none).
    Example:
        >>> Evaluation({"mse": 2.0}, {"mse": np.array([1.0, 3.0])}, clients=2, examples=8).clients
        2
    """

    values: dict[str, float]
    by_client: dict[str, np.ndarray]
    clients: int
    examples: int
    vectors: Mapping[str, np.ndarray] = {}


def make_evaluator(
    metric: Metric, data: FederatedData, batch_size: int, most: int | None = None
) -> Callable[[Model], Evaluation]:
    """Build the function params → the metric on `most` examples of the federation; default: all.

    Those of the first clients, in a shuffled order that is always the same: in the order of their
    names clients are often alike.

    Args:
        metric: What is measured, e.g. `fedpa.metrics.classifier(logits)`.
        data: The federation; clients are read one after the other.
        batch_size: Examples that are computed at a time, across clients.
        most: Largest number of examples; they are kept in memory for the next evaluation.
    Returns:
        A function of the parameters; its `Evaluation` has the values of all and of each client.
    Raises:
        DataError: No client has an example.
    Example:
        >>> from fedpa.data import from_mapping
        >>> from fedpa.metrics import classifier
        >>> data = from_mapping({"a": {"x": np.eye(2), "y": np.array([0, 0])}})
        >>> evaluate = make_evaluator(classifier(lambda params, x: x @ params), data, batch_size=2)
        >>> evaluate(np.eye(2, dtype=np.float32)).values["accuracy"]
        0.5
    """
    data, chosen = check_when_read(data), choose_clients(data, most)
    total = sum(taken for _, taken in chosen)
    if not total:
        raise DataError(f"none of the {len(data.ids)} clients to evaluate on has an example")
    size = min(batch_size, total)
    kept: list[Batch] = []

    @eqx.filter_jit
    def measure(params: Any, examples: Examples, rows: jax.Array) -> tuple[Any, Any]:
        counts: Counts = metric.measure(params, examples)
        real = (jnp.arange(size, dtype=jnp.int32) < rows).astype(jnp.float32)
        return dict(counts.each), {
            k: real @ v.astype(real.dtype) for k, v in counts.vectors.items()
        }

    def evaluate(params: Any) -> Evaluation:
        sums: dict[str, np.ndarray] = {}
        vectors: dict[str, np.ndarray] = {}
        batches = read_batches(data, chosen, size)
        # What is evaluated again and again is read once; all of a federation is measured once.
        for batch in batches if most is None else kept or _keep(batches, kept):
            rows = len(batch.owners)
            each, summed = jax.device_get(measure(params, batch.examples, jnp.asarray(rows)))
            for name, numbers in each.items():
                by_client = sums.setdefault(name, np.zeros(len(chosen)))
                np.add.at(by_client, batch.owners, numbers[:rows].astype(np.float64))
            for name, vector in summed.items():
                vectors[name] = vectors.get(name, 0.0) + vector.astype(np.float64)
        overall = metric.values({name: float(each.sum()) for name, each in sums.items()})
        return Evaluation(
            overall | metric.overall(vectors),
            _values_by_client(metric, sums, [taken for _, taken in chosen]),
            sum(taken > 0 for _, taken in chosen),
            total,
            vectors,
        )

    return evaluate


def compute_percentiles(evaluation: Evaluation, names: Sequence[str]) -> dict[str, float]:
    """`<name>_p10`, `_p50`, `_p90` over the clients that have the metric, if there are several."""
    percentiles = {}
    for name in names:
        values = evaluation.by_client.get(name, np.array([]))
        values = values[~np.isnan(values)]
        if len(values) > 1:
            for p in PERCENTILES:
                percentiles[f"{name}_p{p}"] = float(np.percentile(values, p))
    return percentiles


def _values_by_client(
    metric: Metric, sums: Mapping[str, np.ndarray], sizes: Sequence[int]
) -> dict[str, np.ndarray]:
    by_client: dict[str, np.ndarray] = {}
    for place, n in enumerate(sizes):
        if n:
            own = metric.values({name: float(total[place]) for name, total in sums.items()})
            for name, value in own.items():
                by_client.setdefault(name, np.full(len(sizes), np.nan))[place] = value
    return by_client


def choose_clients(data: FederatedData, most: int | None) -> list[tuple[str, int]]:
    """Clients and how many of their examples are taken: all, or `most` of shuffled clients."""
    if most is None:
        return [(name, data.num_examples(name)) for name in data.ids]
    chosen: list[tuple[str, int]] = []
    for place in np.random.default_rng(0).permutation(len(data.ids)).tolist():
        taken = min(data.num_examples(data.ids[place]), most)
        chosen.append((data.ids[place], taken))
        most -= taken
        if not most:
            break
    return sorted(chosen)


def read_batches(
    data: FederatedData, chosen: Sequence[tuple[str, int]], size: int
) -> Iterator[Batch]:
    """Batches of `size` rows across clients; the last is padded by repeating its first row."""
    waiting: list[Batch] = []
    rows = 0
    for place, examples in _read(data, chosen):
        taken = chosen[place][1]
        waiting.append(Batch(examples, np.full(taken, place)))
        rows += taken
        if rows >= size:
            whole = jax.tree.map(lambda *parts: np.concatenate(parts), *waiting)
            for start in range(0, rows - size + 1, size):
                yield _slice_batch(whole, slice(start, start + size))
            waiting = [_slice_batch(whole, slice(rows - rows % size, rows))]
            rows %= size
    if rows:
        last = jax.tree.map(lambda *parts: np.concatenate(parts), *waiting)
        # The first row again and again, behind the others.
        padding = np.arange(size) * (np.arange(size) < rows)
        yield Batch(jax.tree.map(lambda x: x[padding], last.examples), last.owners)


def _slice_batch(batch: Batch, rows: slice) -> Batch:
    cut: Batch = jax.tree.map(lambda x: x[rows], batch)
    return cut


def _read(data: FederatedData, chosen: Sequence[tuple[str, int]]) -> Iterator[tuple[int, Any]]:
    """The clients' examples in order; while one is used the next is read."""

    def read(place: int) -> Any:
        name, taken = chosen[place]
        examples = data.examples(name)
        rows = len(jax.tree.leaves(examples)[0])
        if rows < taken:
            raise DataError(
                f"client {name!r} has {rows} examples where {data.num_examples(name)} were "
                "announced"
            )
        return jax.tree.map(lambda x: x[:taken], examples)

    with ThreadPoolExecutor(1, thread_name_prefix="fedpa-evaluation") as pool:
        readings = (
            (place, pool.submit(read, place)) for place, (_, taken) in enumerate(chosen) if taken
        )
        ahead = next(readings, None)
        while ahead is not None:
            place, examples = ahead[0], ahead[1].result()
            ahead = next(readings, None)
            yield place, examples


def _keep(batches: Iterator[Batch], kept: list[Batch]) -> Iterator[Batch]:
    """The batches, and in `kept` all of them once they have been seen, if they are small enough."""
    seen: list[Batch] = []
    size = 0
    for batch in batches:
        size += sum(x.nbytes for x in jax.tree.leaves(batch.examples))
        if size <= KEPT_UP_TO:
            seen.append(batch)
        else:
            seen.clear()
        yield batch
    kept.extend(seen)
