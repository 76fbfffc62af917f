"""Evaluation over a federation: clients are read one after the other, batches have one size.

Sums are kept for every client, so that a metric is known overall and as a distribution over
clients: the 10th percentile says how those do who are left behind.
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
from fedpa.types import Examples

PERCENTILES = (10, 50, 90)
KEPT_UP_TO = 2**28
"""Bytes of batches that are kept for the next evaluation."""


class Batch(NamedTuple):
    examples: Any
    owners: np.ndarray
    """For each real row the position of its client; rows beyond them are padding."""


class Evaluated(NamedTuple):
    values: dict[str, float]
    """Over all examples."""
    by_client: dict[str, np.ndarray]
    """Each metric for every client taken, by name; NaN for one without examples."""
    clients: int
    """With at least one example."""
    examples: int


def streamed(
    metric: Metric, data: FederatedData, batch_size: int, most: int | None = None
) -> Callable[[Any], Evaluated]:
    """params → the metric on `most` examples of the federation (all, if not given).

    Those of the first clients, in a shuffled order that is always the same: in the order of their
    names clients are often alike.
    """
    data, chosen = check_when_read(data), _first(data, most)
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

    def evaluate(params: Any) -> Evaluated:
        sums: dict[str, np.ndarray] = {}
        vectors: dict[str, np.ndarray] = {}
        batches = _batches(data, chosen, size)
        # What is evaluated again and again is read once; all of a federation is measured once.
        for batch in batches if most is None else kept or _kept(batches, kept):
            rows = len(batch.owners)
            each, summed = jax.device_get(measure(params, batch.examples, jnp.asarray(rows)))
            for name, numbers in each.items():
                total = sums.setdefault(name, np.zeros(len(chosen)))
                np.add.at(total, batch.owners, numbers[:rows].astype(np.float64))
            for name, vector in summed.items():
                vectors[name] = vectors.get(name, 0.0) + vector.astype(np.float64)
        return _evaluated(metric, sums, vectors, [taken for _, taken in chosen])

    return evaluate


def distribution(evaluated: Evaluated, names: Sequence[str]) -> dict[str, float]:
    """`<name>_p10`, `_p50`, `_p90` over the clients that have the metric, if there are several."""
    found = {}
    for name in names:
        values = evaluated.by_client.get(name, np.array([]))
        values = values[~np.isnan(values)]
        if len(values) > 1:
            for p in PERCENTILES:
                found[f"{name}_p{p}"] = float(np.percentile(values, p))
    return found


def _evaluated(
    metric: Metric,
    sums: Mapping[str, np.ndarray],
    vectors: Mapping[str, np.ndarray],
    sizes: Sequence[int],
) -> Evaluated:
    overall = metric.values({name: float(total.sum()) for name, total in sums.items()})
    overall |= metric.overall(vectors)
    by_client: dict[str, np.ndarray] = {}
    for place, n in enumerate(sizes):
        if n:
            own = metric.values({name: float(total[place]) for name, total in sums.items()})
            for name, value in own.items():
                by_client.setdefault(name, np.full(len(sizes), np.nan))[place] = value
    return Evaluated(overall, by_client, sum(n > 0 for n in sizes), sum(sizes))


def _first(data: FederatedData, most: int | None) -> list[tuple[str, int]]:
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


def _batches(data: FederatedData, chosen: Sequence[tuple[str, int]], size: int) -> Iterator[Batch]:
    """Batches of `size` rows across clients; the last is padded by repeating its first row."""
    waiting: list[Any] = []
    owners: list[np.ndarray] = []
    rows = 0
    for place, examples in _read(data, chosen):
        waiting.append(examples)
        taken = chosen[place][1]
        owners.append(np.full(taken, place))
        rows += taken
        if rows >= size:
            together = jax.tree.map(lambda *parts: np.concatenate(parts), *waiting)
            whose = np.concatenate(owners)
            for start in range(0, rows - size + 1, size):
                end = start + size
                cut = jax.tree.map(lambda x, start=start, end=end: x[start:end], together)
                yield Batch(cut, whose[start:end])
            left = rows % size
            waiting = [jax.tree.map(lambda x, left=left: x[len(x) - left :], together)]
            owners, rows = [whose[len(whose) - left :]], left
    if rows:
        together = jax.tree.map(lambda *parts: np.concatenate(parts), *waiting)
        padded = jax.tree.map(
            lambda x: np.concatenate([x, np.repeat(x[:1], size - rows, axis=0)]), together
        )
        yield Batch(padded, np.concatenate(owners))


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

    places = [place for place, (_, taken) in enumerate(chosen) if taken]
    with ThreadPoolExecutor(1, thread_name_prefix="fedpa-evaluation") as pool:
        ahead = pool.submit(read, places[0]) if places else None
        for place, following in zip(places, [*places[1:], None], strict=True):
            assert ahead is not None
            examples = ahead.result()
            ahead = pool.submit(read, following) if following is not None else None
            yield place, examples


def _kept(batches: Iterator[Batch], kept: list[Batch]) -> Iterator[Batch]:
    """The batches, and in `kept` all of them once they have been seen, if they are small enough."""
    seen: list[Batch] | None = []
    size = 0
    for batch in batches:
        if seen is not None:
            size += sum(x.nbytes for x in jax.tree.leaves(batch.examples))
            seen.append(batch)
            seen = None if size > KEPT_UP_TO else seen
        yield batch
    kept.extend(seen or ())
