"""Dealing a central data set to clients: each way a function to the rows of every client."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpa.data.federated import FederatedData, from_mapping
from fedpa.errors import FedpaError, check_integer, refuse


def by_column(values: np.ndarray) -> list[np.ndarray]:
    """Deal examples to a client for each value, which gets all of its rows.

    Args:
        values: One value per example, shape (n,): numbers or text, none missing.
    Returns:
        The rows of every client, in the order of `numpy.unique(values)`.
    Example:
        >>> [rows.tolist() for rows in by_column(np.array(["b", "a", "b"]))]
        [[1], [0, 2]]
    """
    if values.ndim != 1 or not len(values):
        raise refuse("values", list(values.shape), "must be one value for each example")
    _check_values("values", values, "client")
    _, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1)


def by_quantity(
    num_examples: int,
    num_clients: int,
    concentration: float | None = None,
    sigma: float | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Deal all examples, at random, to clients of unequal sizes, at least one to each.

    Sizes are proportional to a Dirichlet(concentration) draw, or else to log-normal ones.

    Args:
        num_examples: How many examples there are.
        num_clients: 1 to `num_examples`.
        concentration: Of the Dirichlet distribution, > 0; smaller is more unequal. Default: sizes
            are log-normal.
        sigma: Of the log-normal distribution, 0 to below 10; default: 1. Not with `concentration`.
        seed: Of all randomness; default: 0.
    Returns:
        The rows of every client.
    Example:
        >>> rows = by_quantity(100, 4, sigma=1.0)
        >>> len(rows), sum(len(own) for own in rows)
        (4, 100)
    """
    _check_clients(num_clients, num_examples)
    if concentration is not None and sigma is not None:
        raise refuse("sigma", sigma, "sizes follow from the concentration: give one of the two")
    rng = np.random.default_rng(seed)
    if concentration is not None:
        _check_positive("concentration", concentration)
        shares = rng.dirichlet(np.full(num_clients, concentration))
    else:
        sigma = 1.0 if sigma is None else sigma
        if not 0 <= sigma < 10:  # e¹⁰ to a client is all there is
            raise refuse("sigma", sigma, "must be a number from 0 to below 10")
        draws = np.exp(sigma * rng.standard_normal(num_clients))
        shares = draws / draws.sum()
    sizes = 1 + _round_shares(shares, num_examples - num_clients)
    return np.split(rng.permutation(num_examples), np.cumsum(sizes)[:-1])


def _round_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers close to shares · total that add up to it: largest remainders go up."""
    exact = shares * total
    sizes: np.ndarray = np.floor(exact).astype(np.int64)
    short = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes


def dirichlet_label_skew(
    labels: np.ndarray, num_clients: int, concentration: float, seed: int
) -> list[np.ndarray]:
    """Deal examples to clients whose label proportions are Dirichlet(concentration) draws.

    Clients are equally large (to one example) and every example is dealt exactly once: clients
    take turns drawing a label from their own proportions, among the labels that are left.

    Args:
        labels: One label per example, shape (n,).
        num_clients: 1 to n.
        concentration: > 0; small values give clients few labels, large ones all alike.
        seed: Of all randomness.
    Returns:
        The rows of every client.
    Example:
        >>> rows = dirichlet_label_skew(np.arange(12) % 3, num_clients=4, concentration=0.1, seed=0)
        >>> [len(own) for own in rows]
        [3, 3, 3, 3]
    """
    _check_clients(num_clients, len(labels))
    _check_positive("concentration", concentration)
    _check_values("labels", labels, "label")
    rng = np.random.default_rng(seed)
    classes = np.unique(labels)
    left = [list(rng.permutation(np.flatnonzero(labels == label))) for label in classes]
    proportions = rng.dirichlet(np.full(len(classes), concentration), size=num_clients)
    dealt: list[list[int]] = [[] for _ in range(num_clients)]
    for turn in range(len(labels)):
        client = turn % num_clients
        weights = proportions[client] * np.array([len(rows) > 0 for rows in left])
        if weights.sum() == 0:  # all that this client wants is gone: take what there is most of
            weights = np.array([float(len(rows)) for rows in left])
        label = rng.choice(len(classes), p=weights / weights.sum())
        dealt[client].append(left[label].pop())
    return [np.array(rows, np.int64) for rows in dealt]


def pachinko(
    coarse: np.ndarray,
    fine: np.ndarray,
    num_clients: int,
    examples_per_client: int,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int = 0,
) -> list[np.ndarray]:
    """Deal examples by Pachinko allocation over coarse and fine labels (Reddi et al. 2021).

    A client draws its proportions of the coarse labels from Dirichlet(alpha) and, within each,
    those of its fine labels from Dirichlet(beta); then its examples one by one, each a coarse
    label, a fine label and an example of that, without replacement. A label that has run out is
    removed for all clients and the others' proportions are renormalised. Clients draw in turn, so
    the last ones get what is left.

    Args:
        coarse: One coarse label per example, shape (n,).
        fine: One fine label per example; each belongs to one coarse label.
        num_clients: At least 1.
        examples_per_client: At least 1; all clients together need at most n.
        alpha: Of the Dirichlet distribution of coarse labels, > 0; default: 0.1.
        beta: Of the Dirichlet distribution of fine labels, > 0; default: 10.
        seed: Of all randomness; default: 0.
    Returns:
        The rows of every client.
    Example:
        >>> fine = np.arange(40) % 4
        >>> rows = pachinko(fine // 2, fine, num_clients=5, examples_per_client=6)
        >>> [len(own) for own in rows]
        [6, 6, 6, 6, 6]
    """
    if not len(coarse) == len(fine):
        raise refuse("fine", len(fine), f"must be as many labels as coarse has ({len(coarse)})")
    check_integer("num_clients", num_clients, 1)
    check_integer("examples_per_client", examples_per_client, 1)
    if num_clients * examples_per_client > len(fine):
        raise refuse(
            "examples_per_client",
            examples_per_client,
            f"{num_clients} clients need {num_clients * examples_per_client} examples, there are "
            f"{len(fine)}",
        )
    _check_positive("alpha", alpha)
    _check_positive("beta", beta)
    _check_values("coarse", coarse, "label")
    _check_values("fine", fine, "label")
    rng = np.random.default_rng(seed)
    kinds, first, inverse = np.unique(fine, return_index=True, return_inverse=True)
    parents, parent = np.unique(coarse[first], return_inverse=True)
    if not np.array_equal(parents[parent[inverse]], coarse):
        row = int(np.flatnonzero(parents[parent[inverse]] != coarse)[0])
        raise FedpaError(
            f"fine label {fine[row]} is under coarse labels {coarse[first][inverse[row]]} and "
            f"{coarse[row]}: every fine label belongs to one coarse label"
        )
    # A label's examples in random order: dealt from the end.
    piles = [rng.permutation(np.flatnonzero(inverse == kind)) for kind in range(len(kinds))]
    left = np.array([len(pile) for pile in piles])
    children = [np.flatnonzero(parent == label) for label in range(len(parents))]
    return [
        _pachinko_client(rng, piles, left, children, examples_per_client, alpha, beta)
        for _ in range(num_clients)
    ]


def _pachinko_client(
    rng: np.random.Generator,
    piles: list[np.ndarray],
    left: np.ndarray,
    children: list[np.ndarray],
    num_examples: int,
    alpha: float,
    beta: float,
) -> np.ndarray:
    """One client's rows; `left` is what remains of each pile afterwards."""
    upper = rng.dirichlet(np.full(len(children), alpha))
    lower = [rng.dirichlet(np.full(len(own), beta)) for own in children]
    rows = np.empty(num_examples, np.int64)
    branch = _branch(upper, _sums(left, children))
    leaves = [_branch(weights, left[own]) for weights, own in zip(lower, children, strict=True)]
    for place, (u, v) in enumerate(rng.random((num_examples, 2))):
        label = int(np.searchsorted(branch, u, side="right"))
        own = children[label]
        kind = own[np.searchsorted(leaves[label], v, side="right")]
        left[kind] -= 1
        rows[place] = piles[kind][left[kind]]
        if left[kind] == 0:
            leaves[label] = _branch(lower[label], left[own])
            if not left[own].any():
                branch = _branch(upper, _sums(left, children))
    return rows


def _sums(left: np.ndarray, children: list[np.ndarray]) -> np.ndarray:
    return np.array([left[own].sum() for own in children])


def _branch(weights: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Cumulative proportions of the branches that have examples left."""
    weights = np.where(left > 0, weights, 0.0)
    if weights.sum() == 0:  # nothing this client wants is left: what there is most of
        weights = left.astype(float)
    if weights.sum() == 0:  # all examples are dealt: never drawn again
        return np.ones(len(weights))
    cumulative = np.cumsum(weights / weights.sum())
    # Rounding must not leave a gap above the last branch that has something.
    cumulative[np.flatnonzero(weights)[-1] :] = 1.0
    return cumulative


def first_missing(values: np.ndarray) -> int | None:
    """The first row without a value: NaN or None, as tables have it."""
    if values.dtype.kind in "fc":
        missing = np.isnan(values)
    elif values.dtype.kind == "O":  # only NaN differs from itself
        missing = np.array([value is None or value != value for value in values.tolist()], bool)
    else:
        return None
    return int(missing.argmax()) if missing.any() else None


def _check_values(field: str, values: np.ndarray, what: str) -> None:
    row = first_missing(values)
    if row is not None:
        shown = str(values[row])
        raise refuse(field, shown, f"row {row} has no value: every example needs a {what}")


def _check_clients(num_clients: int, num_examples: int) -> None:
    if not 1 <= num_clients <= num_examples:
        raise refuse("num_clients", num_clients, f"must be between 1 and {num_examples} (examples)")


def _check_positive(field: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise refuse(field, value, "must be a finite number > 0")


class Partition(NamedTuple):
    """A split and who has which of its rows."""

    arrays: Mapping[str, np.ndarray]
    rows: Sequence[np.ndarray]
    names: Sequence[str]
    """Of the clients."""


def number_clients(num_clients: int) -> list[str]:
    """Names that sort as numbers do: 000, 001, …"""
    width = len(str(num_clients - 1))
    return [f"{number:0{width}d}" for number in range(num_clients)]


def tabulate_labels(
    labels: np.ndarray, rows: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """(the labels, sorted; how many examples of each a client has: [clients, labels])."""
    kinds, inverse = np.unique(labels, return_inverse=True)
    return kinds, np.stack([np.bincount(inverse[own], minlength=len(kinds)) for own in rows])


def deal_by_label(
    data: FederatedData, label: str, concentration: float, seed: int
) -> FederatedData:
    """Clients of equal sizes whose proportions of `label` are Dirichlet(concentration) draws.

    All examples are read, and stay in memory.
    """
    everything = [data.examples(name) for name in data.ids]
    arrays = jax.tree.map(lambda *parts: np.concatenate(parts), *everything)
    dealt = dirichlet_label_skew(arrays[label], len(data.ids), concentration, seed)
    names = number_clients(len(dealt))
    return from_mapping(
        {
            name: jax.tree.map(lambda array, rows=rows: array[rows], arrays)
            for name, rows in zip(names, dealt, strict=True)
        }
    )
