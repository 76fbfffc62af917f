"""`fedpa.simulate`: whole runs of a small model as one compiled program, vectorized over seeds.

It uses the algorithms, client updates, aggregation, cohorts and keys of `fedpa.fit` and gives its
numbers. All clients are in memory, and a run is a pure function of θ, the seed's key and the
cohorts: a `lax.scan` over rounds, vectorized over seeds.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped, UInt32

from fedpa.algorithms.fedopt import Algorithm, Cohort, Round, fed_round
from fedpa.algorithms.methods import Method
from fedpa.algorithms.switch import AUTO
from fedpa.data.federated import Clients, FederatedData, as_federation, check_when_read
from fedpa.engines.engine import num_bytes
from fedpa.engines.execution import stack_clients
from fedpa.engines.machine import SHARE, DoesNotFit, count_free_bytes
from fedpa.errors import NoUsableClientError, check_integer, refuse
from fedpa.objectives.client_data import ClientData, kind_of
from fedpa.objectives.objective import Objective
from fedpa.server.aggregation import check_cohort
from fedpa.training.loop import NOISE, OUTLIER, check_counts, client_hashes, keys_at, select_cohort
from fedpa.training.privacy import check_private
from fedpa.training.problem import prepare
from fedpa.types import Key, Loss, Model, Params

Metrics = dict[str, Shaped[Array, "..."]]
Evaluate = Callable[[Any], Mapping[str, Any]]
"""params → metrics by name, in JAX: traced once, inside the program."""


class Simulation(NamedTuple):
    """The runs of `fedpa.simulate`, one per seed; `print` shows their last round.

    Args:
        params: As they were given; every trained array has a new first axis over seeds.
        metrics: By the names of `fedpa.fit`'s records, `train/loss`, `eval/<name>`: (seeds,
            rounds).
        seeds: In the order of the first axis.
    Example:
        >>> loss = np.array([[2.0, 1.0], [2.0, 1.2]])
        >>> print(Simulation(np.zeros((2, 3)), {"train/loss": loss}, (0, 1)))
        Simulation: 2 rounds of 2 seeds
          train/loss           1.1 ± 0.14
    """

    params: PyTree
    metrics: Mapping[str, np.ndarray]
    seeds: tuple[int, ...]

    def __repr__(self) -> str:
        """Format the last round's metrics, mean ± standard deviation over seeds."""
        count = len(self.seeds)
        rounds = next(iter(self.metrics.values())).shape[1]
        lines = [f"Simulation: {rounds} rounds of {count} seed{'s' if count > 1 else ''}"]
        for name, values in self.metrics.items():
            if values.ndim == 2 and name.startswith(("train/loss", "eval/")):
                last = values[:, -1].astype(np.float64)
                spread = f" ± {last.std(ddof=1):.2g}" if count > 1 else ""
                lines.append(f"  {name:<20} {last.mean():.4g}{spread}")
        return "\n".join(lines)


def simulate(
    loss: Loss | Objective,
    params: Model,
    clients: Clients,
    method: Method,
    *,
    rounds: int,
    clients_per_round: int,
    seeds: int | Sequence[int],
    evaluate: Evaluate | None = None,
) -> Simulation:
    """Train once for each seed, all runs as one compiled program.

    `simulate(…, seeds=[3])` gives the numbers of `fedpa.fit(…, seed=3)` up to rounding. It
    is for small models: all clients are in memory, padded to the size of the largest, and the
    cohorts of all seeds run vectorized. Nothing is recorded to files. For your own `lax.scan` use
    `fedpa.fed_round`.

    Args:
        loss: `loss(params, batch, key)`, one number per example of the batch; or a
            `fedpa.Objective`, which has a prior, a regularizer and more.
        params: Initial parameters of every seed, any pytree; floating-point arrays are trained.
        clients: As for `fedpa.fit`: client id → arrays, or a federation, which is read whole.
        method: An algorithm with its settings, e.g. `fedpa.fedpa(local, server, rho=0.1)`.
        rounds: ≥ 1.
        clients_per_round: ≥ 1; all clients take part if there are fewer.
        seeds: The seeds, each from 0 to 2³² − 1; a number n means 0, …, n − 1.
        evaluate: A JAX function params → metrics by name, called after every round inside the
            program: no `float(…)`, no NumPy. A metric that is an array adds its axes.
    Returns:
        Parameters stacked over seeds, and metrics as arrays (seeds, rounds).
    Raises:
        FedpaError: Arguments don't fit together, or the clients don't fit in memory.
        NoUsableClientError: No round of any seed had a usable client update.
    Example:
        >>> import fedpa, optax
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(optax.sgd(1.0)))
        >>> runs = simulate(lambda theta, batch, key: (theta - batch) ** 2, np.zeros(()),
        ...                 {"a": np.arange(4.0), "b": np.arange(4.0, 9.0)}, method,
        ...                 rounds=20, clients_per_round=1, seeds=3)
        >>> runs.params.shape, runs.metrics["train/loss"].shape
        ((3,), (3, 20))
    """
    chosen = _check_seeds(seeds)
    for seed in chosen:
        check_counts(rounds, clients_per_round, seed)
    data = as_federation(clients)
    objective = loss if isinstance(loss, Objective) else Objective(loss)
    algorithm, theta, assemble, bound = prepare(objective, params, data, method, rounds)
    check_private(algorithm, len(data.ids), clients_per_round)
    size = min(clients_per_round, len(data.ids))
    check_cohort(algorithm.aggregation, "clients_per_round", size)
    measure = _check_evaluate(evaluate, assemble, theta)
    _check_data_fits(data, bound.like)
    federation = stack_federation(data)
    cohorts = None
    if clients_per_round < len(data.ids):
        place = {name: index for index, name in enumerate(data.ids)}
        drawn = [
            [select_cohort(seed, t, data.ids, clients_per_round) for t in range(rounds)]
            for seed in chosen
        ]
        cohorts = jnp.asarray([[[place[name] for name in ids] for ids in each] for each in drawn])

    def run(theta: Params, federation: Federation, root: Key, cohorts: Any) -> Path:
        return run_rounds(
            algorithm, theta, federation, root, rounds, cohorts=cohorts, evaluate=measure
        )

    over_seeds = jax.jit(jax.vmap(run, in_axes=(None, None, 0, None if cohorts is None else 0)))
    roots = jnp.stack([jax.random.key(seed) for seed in chosen])
    program: Any = over_seeds.lower(theta, federation, roots, cohorts).compile()
    _check_program_fits(program, len(chosen))
    path = program(theta, federation, roots, cohorts)
    metrics = jax.device_get(path.metrics)
    _report(metrics, chosen)
    return Simulation(assemble(path.params), metrics, chosen)


class Federation(NamedTuple):
    """All clients' examples in arrays."""

    data: ClientData
    """Examples with a first axis over clients, and each client's n; one n if all are equal, which
    avoids steps for padding."""
    hashes: UInt32[Array, "clients 2"]
    """Hashes of the ids, on which clients' keys depend."""


def stack_federation(data: FederatedData) -> Federation:
    """Read every client, pad it to the size of the largest and stack them all."""
    data = check_when_read(data)
    leaves, structures = zip(*(jax.tree.flatten(data.examples(i)) for i in data.ids), strict=True)
    clients = [[np.asarray(leaf) for leaf in own] for own in leaves]
    sizes = {len(arrays[0]) for arrays in clients}
    kind = kind_of(clients[0], structures[0])
    examples, n = stack_clients(clients, len(clients), max(*sizes, 1), kind)
    n = jnp.asarray(n if len(sizes) > 1 else sizes.pop(), jnp.int32)
    return Federation(
        ClientData(jax.tree.map(jnp.asarray, examples), n), jnp.asarray(client_hashes(data.ids))
    )


class Path(NamedTuple):
    """The result of a run."""

    params: Params
    """The θ to return."""
    metrics: Metrics
    """Metrics of each round, stacked on axis 0."""


def run_rounds(
    algorithm: Algorithm,
    theta: Params,
    federation: Federation,
    root: Key,
    rounds: int,
    *,
    cohorts: Int[Array, "rounds m"] | None = None,
    evaluate: Callable[[Params], Mapping[str, Any]] = lambda theta: {},
) -> Path:
    """Run Algorithm 1 from θ: a pure function to jit, and to vmap over θ, seeds or learning rates.

    Args:
        algorithm: For example `fedpa.fedavg(local, server)(objective)`; its settings may be traced.
        theta: Initial parameters.
        federation: All clients.
        root: `jax.random.key(seed)`.
        rounds: Number of rounds.
        cohorts: Each round's clients by their index in the federation; default: all clients.
        evaluate: θ → metrics by name, or other arrays to store for every round.
    """
    if algorithm.switch is not None:
        expected = "is not supported in a simulation, whose rounds are one program: give a number"
        raise refuse("burn_in_rounds", AUTO, expected)
    release = algorithm.release
    if release is not None and release.budget.sampling != "fixed":
        expected = "is not supported in a simulation, whose rounds are one program: use fedpa.fit"
        raise refuse("sampling", release.budget.sampling, expected)
    noise_root = jax.random.fold_in(root, NOISE)
    phases = [algorithm.phase(t) for t in range(rounds)]
    names = list(dict.fromkeys(phases))
    keeps_states = bool(jax.tree.leaves(jax.eval_shape(algorithm.client_init, theta)))
    population = len(federation.hashes)
    states = algorithm.client_init(theta)
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (population, *leaf.shape)), states)

    def run_phase(phase: str) -> Callable[..., Any]:
        def step(carry: tuple[Any, Any], t: Array, members: Any) -> tuple[tuple[Any, Any], Metrics]:
            state, states = carry
            data, hashes, own = federation.data, federation.hashes, states
            if members is not None:
                n = data.n[members] if jnp.ndim(data.n) else data.n
                data = ClientData(jax.tree.map(lambda array: array[members], data.examples), n)
                hashes, own = hashes[members], jax.tree.map(lambda leaf: leaf[members], states)
            cohort = Cohort(data, keys_at(root, t, hashes), own)
            noise = jax.random.fold_in(noise_root, t)
            state, left = fed_round(algorithm, state, cohort, t, phase, noise)
            if keeps_states:
                states = left.states
                if members is not None:
                    states = jax.tree.map(
                        lambda kept, new: kept.at[members].set(new), carry[1], left.states
                    )
            metrics = _round_metrics(left, data.n) | dict(evaluate(algorithm.parameters(state)))
            return (state, states), metrics

        return step

    # One branch for each phase; the index is the same for all that is vectorized over, so that
    # only one of them runs.
    branches = [run_phase(name) for name in names]

    def step(carry: Any, x: tuple[Array, Array, Any]) -> Any:
        t, phase, members = x
        return jax.lax.switch(phase, branches, carry, t, members)

    ts, which = jnp.arange(rounds), jnp.asarray([names.index(phase) for phase in phases])
    (state, _), metrics = jax.lax.scan(step, (algorithm.init(theta), states), (ts, which, cohorts))
    return Path(algorithm.parameters(state), metrics)


def _round_metrics(left: Round, n: Array) -> Metrics:
    """Average over accepted clients, as in the records of `fedpa.fit`."""
    has_examples = jnp.broadcast_to(n > 0, left.accepted.shape)
    counted = left.accepted & has_examples
    number = jnp.sum(counted.astype(jnp.float32))
    metrics = {
        f"train/{name}": jnp.sum(jnp.where(counted, values, 0).astype(jnp.float32)) / number
        for name, values in left.client_info._asdict().items()
    }
    if "train/delta_norm" in metrics:
        norms = left.client_info.delta_norm
        usual = jnp.nanmedian(jnp.where(counted, norms, jnp.nan))
        is_outlier = counted & (norms > OUTLIER * usual) & (usual > 0)
        metrics["train/outliers"] = jnp.sum(is_outlier.astype(jnp.int32))
    metrics["train/rejected"] = jnp.sum((~left.accepted).astype(jnp.int32))
    metrics["train/empty"] = jnp.sum((left.accepted & ~has_examples).astype(jnp.int32))
    for name, value in left.server_info._asdict().items():
        if value is not None:
            metrics[f"train/{name}"] = jnp.asarray(value)
    return metrics


def _check_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int | np.integer):
        check_integer("seeds", seeds, 1)
        return tuple(range(seeds))
    chosen = tuple(seeds)
    if not chosen:
        raise refuse("seeds", seeds, "must be a number of seeds or a list of them: at least one")
    return chosen


def _check_evaluate(
    evaluate: Evaluate | None, assemble: Callable[[Params], Any], theta: Params
) -> Callable[[Params], Mapping[str, Any]]:
    """Wrap `evaluate` as a function of θ, with metrics named as in `fedpa.fit`."""
    if evaluate is None:
        return lambda theta: {}

    def measure(theta: Params) -> dict[str, Any]:
        metrics = evaluate(assemble(theta))
        if not isinstance(metrics, Mapping):
            raise refuse("evaluate's answer", metrics, 'must be metrics by name: {"accuracy": 0.9}')
        return {f"eval/{name}": jnp.asarray(value) for name, value in metrics.items()}

    try:
        jax.eval_shape(measure, theta)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise refuse(
            "evaluate",
            evaluate,
            "must be a JAX function: use jax.numpy, and leave out float(…) and Python's if",
        ) from error
    return measure


def _check_data_fits(data: FederatedData, like: PyTree) -> None:
    """Refuse a federation that does not fit in memory, before it is read."""
    largest = max(map(data.num_examples, data.ids))
    row = num_bytes(jax.tree.map(lambda array: np.asarray(array)[:1], like))
    needed = 2 * len(data.ids) * largest * row  # on the host, and on the device
    free = count_free_bytes(jax.devices()[0])
    if free is not None and needed > SHARE * free:
        raise DoesNotFit(
            f"clients = {len(data.ids):,} of up to {largest:,} examples: stacked in memory they "
            f"need {needed / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free. fedpa.fit reads "
            "clients round by round"
        )


def _check_program_fits(program: Any, seeds: int) -> None:
    used = program.memory_analysis()
    free = count_free_bytes(jax.devices()[0])
    if used is None or free is None:
        return
    needed = used.output_size_in_bytes + used.temp_size_in_bytes
    if needed <= SHARE * free:
        return
    fitting = int(SHARE * free / (needed / seeds))
    remedy = f"at most {fitting} at a time fit" if fitting else "fedpa.fit needs less"
    raise DoesNotFit(
        f"seeds = {seeds}: their runs together need {needed / 2**30:.3g} GiB, "
        f"{free / 2**30:.3g} GiB are free. Lower clients_per_round; {remedy}"
    )


def _report(metrics: Mapping[str, np.ndarray], seeds: Sequence[int]) -> None:
    """Warn of failed rounds; refuse runs without any usable client update."""
    skipped = metrics["train/skipped"].sum(axis=1)
    rounds = metrics["train/skipped"].shape[1]
    remedy = "lower the learning rate, or check the data for missing values"
    if (skipped == rounds).all():
        raise NoUsableClientError(
            f"rounds 1 to {rounds} had no usable client update with any seed, the model is "
            f"unchanged: {remedy}"
        )
    rejected = metrics["train/rejected"].sum(axis=1)
    for seed, lost, out in zip(seeds, skipped, rejected, strict=True):
        if lost or out:
            warnings.warn(
                f"seed {seed}: {out} client updates that are not finite were rejected, and "
                f"{lost} of {rounds} rounds left the model unchanged: {remedy}",
                stacklevel=3,
            )
