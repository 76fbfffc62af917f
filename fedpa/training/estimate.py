"""`fedpa.estimate`: the cost of a run, from shapes and compiled programs, without running it."""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import SAMPLING, Algorithm, stage
from fedpa.algorithms.local_training import LocalTraining, local_work
from fedpa.algorithms.methods import Described, Method
from fedpa.data.federated import Clients, FederatedData, as_federation
from fedpa.engines.blocks import capacities, choose_width
from fedpa.engines.engine import Cohort, num_bytes
from fedpa.engines.program import Lanes, Shared, bytes_of_sum, compile_client, shape_of_result
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.minibatches import Minibatch
from fedpa.objectives.objective import Objective, minibatch_loss
from fedpa.samplers.sampler import Epochs
from fedpa.server.aggregation import check_cohort
from fedpa.training.loop import check_counts
from fedpa.training.problem import Prepared, prepare
from fedpa.types import Loss, Model, Params


class PhaseCost(NamedTuple):
    """The cost of a round of one phase. None means unknown."""

    rounds: int
    """Number of the run's rounds in this phase."""
    bytes_up: int
    """Bytes that one client sends: its result and weight, and its answer to an inquiry."""
    bytes_down: int
    """Bytes that one client receives."""
    client_memory: int | None
    """Bytes of the program of the largest clients, for each client in flight: data, parameters,
    samples and temporaries."""
    memory: int | None
    """Bytes of a round: all clients in flight, the sum of results (all of them, if the aggregation
    keeps them), the server's state, the message, and examples in memory."""
    local_steps: float | None
    """Local steps of a whole cohort, on average. Unknown for the user's own samplers; other
    computations of a method (MIME's full gradients) are not counted."""
    examples: float | None
    """Examples in the mini-batches of these steps."""
    flops: float | None
    """Floating-point operations of these steps."""


class Estimate(NamedTuple):
    """The cost of a run, from `fedpa.estimate`; `print` shows a table.

    Args:
        clients: How many there are.
        clients_per_round: How many take part in a round.
        parameters: Numbers that are trained.
        parameter_bytes: The bytes of these.
        server_bytes: The server's state: parameters, optimizer, averages.
        client_bytes: What one client keeps from round to round.
        flops_per_step: Of one local step, a mini-batch's loss and gradient, as XLA counts them
            before it compiles: the body of a loop in the model (a recurrent one) is counted once.
        phases: What a round costs, by the name of its phase.
    Example:
        >>> phase = PhaseCost(10, 404, 404, 2_000, 50_000, 40.0, 800.0, 1.6e6)
        >>> print(Estimate(20, 4, 100, 400, 800, 0, 4e4, {"training": phase}))
        100 parameters (400 B); server keeps 800 B, each client 0 B
        4 of 20 clients per round
        phase     rounds  up/client  down/client  memory  steps  examples   FLOP
        training      10      404 B        404 B   50 kB     40       800  1.6 M
    """

    clients: int
    clients_per_round: int
    parameters: int
    parameter_bytes: int
    server_bytes: int
    client_bytes: int
    flops_per_step: float | None
    phases: Mapping[str, PhaseCost]

    def __repr__(self) -> str:
        """Format a table: a line per phase; up and down per client; memory and work per round."""
        size, server = _format(self.parameter_bytes, "B"), _format(self.server_bytes, "B")
        client = _format(self.client_bytes, "B")
        lines = [
            f"{self.parameters:,} parameters ({size}); server keeps {server}, each client {client}",
            f"{self.clients_per_round:,} of {self.clients:,} clients per round",
        ]
        table = [["phase", "rounds", "up/client", "down/client", "memory", "steps", "examples"]]
        table[0].append("FLOP")
        for name, cost in self.phases.items():
            sizes = (cost.bytes_up, cost.bytes_down, cost.memory)
            work = (cost.local_steps, cost.examples, cost.flops)
            shown = [*(_format(size, "B") for size in sizes), *map(_format, work)]
            table.append([name, f"{cost.rounds:,}", *shown])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *cells in table:
            aligned = [cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *aligned]))
        if len(self.phases) > 1:
            lines.append(self._sum_upload())
        return "\n".join(lines)

    def _sum_upload(self) -> str:
        """What a client that took part in every round would send, compared with its parameters."""
        rounds = sum(cost.rounds for cost in self.phases.values())
        up = sum(cost.rounds * cost.bytes_up for cost in self.phases.values())
        share = up / (max(rounds, 1) * max(self.parameter_bytes, 1)) - 1
        more = f"{share:.1%} more than its parameters".replace("%", " %")
        return f"in all {rounds:,} rounds a client would send {_format(up, 'B')}, {more}"


def _format(value: int | float | None, unit: str = "") -> str:
    """12.3 MB; – if it is not known."""
    if value is None:
        return "–"
    scales = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 1000 and len(scales) > 1:
        value, scales = value / 1000, scales[1:]
    return f"{value:.3g} {scales[0]}{unit}".strip()


def estimate(
    loss: Loss | Objective,
    params: Model,
    clients: Clients,
    method: Method,
    *,
    clients_per_round: int,
    rounds: int = 1,
) -> Estimate:
    """Estimate the cost of a run without running it: traffic, memory and work of a round, by phase.

    Traffic and states follow from shapes. Memory is that of the programs that `fedpa.fit` would
    run, which are compiled for it; operations are XLA's count for a local step.

    Args:
        loss: `loss(params, batch, key)`, one number per example, or a `fedpa.Objective`.
        params: Any pytree, as for `fedpa.fit`.
        clients: Client id → arrays, or a federation, of which one client is read.
        method: An algorithm with its settings, e.g. `fedpa.fedpa(local, server, rho=0.1)`.
        clients_per_round: ≥ 1; all clients take part if there are fewer.
        rounds: The total number of rounds, ≥ 1, for the number of rounds of each phase. Phases
            that begin at a plateau have 0 rounds.
    Returns:
        The costs of every phase of the method, also of phases that are not reached.
    Raises:
        FedpaError: Loss, parameters, data and method don't fit together.
    Example:
        >>> import fedpa
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> cost = estimate(lambda theta, batch, key: (batch @ theta) ** 2, np.ones(1000),
        ...                 {"a": np.ones((8, 1000))}, method, clients_per_round=1)
        >>> [(phase.bytes_down, phase.local_steps) for phase in cost.phases.values()]
        [(4004, 2.0)]
    """
    check_counts(rounds, clients_per_round, 0)
    data = as_federation(clients)
    objective = loss if isinstance(loss, Objective) else Objective(loss)
    prepared = prepare(objective, params, data, method, None)
    counts = count_phases(prepared.algorithm, rounds)
    counts |= {name: 0 for name in prepared.algorithm.clients if name not in counts}
    return estimate_phases(prepared, method, data, clients_per_round, counts)


def count_phases(algorithm: Algorithm, rounds: int) -> dict[str, int]:
    """Count the rounds of each phase of a run.

    Phases that begin at a plateau, whose round is not known before the run, have 0 rounds.
    """
    counts = dict(Counter(map(algorithm.phase, range(rounds))))
    if algorithm.switch is not None:
        later = map(algorithm.switch.at(1).phase, range(1, rounds))
        counts |= {phase: 0 for phase in later if phase not in counts}
    return counts


def estimate_phases(
    prepared: Prepared,
    method: Method,
    data: FederatedData,
    clients_per_round: int,
    rounds: Mapping[str, int],
) -> Estimate:
    """Estimate the phases in `rounds` (phase → number of rounds)."""
    algorithm, theta, _, objective = prepared
    number = min(clients_per_round, len(data.ids))
    check_cohort(algorithm.aggregation, "clients_per_round", number)
    sizes = [data.num_examples(name) for name in data.ids]
    step = _count_flops(method, objective, theta)
    phases = {}
    for name, count in rounds.items():
        steps, examples = _count_work(method, name, sizes) or (None, None)
        up, down, client_memory, memory = _shapes(prepared, data, sizes, number, name)
        phases[name] = PhaseCost(
            count,
            up,
            down,
            client_memory,
            memory,
            None if steps is None else number * steps,
            None if examples is None else number * examples,
            None if steps is None or step is None else number * steps * step,
        )
    return Estimate(
        len(data.ids),
        number,
        sum(leaf.size for leaf in jax.tree.leaves(theta)),
        num_bytes(theta),
        num_bytes(jax.eval_shape(algorithm.init, theta)),
        num_bytes(jax.eval_shape(algorithm.client_init, theta)),
        step,
        phases,
    )


def _shapes(
    prepared: Prepared, data: FederatedData, sizes: Sequence[int], number: int, phase: str
) -> tuple[int, int, int | None, int | None]:
    """Count bytes up and down of a client, and bytes of a client in flight and of a round."""
    algorithm, theta, _, objective = prepared
    state = jax.eval_shape(algorithm.init, theta)
    message = jax.eval_shape(algorithm.broadcast, state, jnp.asarray(0))
    trips = [(algorithm.clients[phase], message)]
    if algorithm.inquiry is not None:  # what it sends down is part of the message
        asked = jax.eval_shape(algorithm.inquiry.broadcast, state)
        trips.append((algorithm.inquiry.client, asked))
    ids = data.ids[:number]
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    cohort = Cohort(ids, data.examples, key, {}, ())
    width = choose_width(message, cohort)
    lanes = min(width.lanes, number)

    def stack(leaf: Any, *leading: int) -> jax.ShapeDtypeStruct:
        shape = (lanes, *leading, *np.shape(leaf)[len(leading) :])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    rows = capacities(sizes)[-1]
    examples = jax.tree.map(lambda leaf: stack(leaf, rows), objective.like)
    states = jax.tree.map(stack, jax.eval_shape(algorithm.client_init, theta))
    block = Lanes(ClientData(examples, stack(np.int32(0))), states, stack(key))  # type: ignore[arg-type]
    up, kept, programs = 0, 0, []
    for client, sent in trips:
        answer = shape_of_result(client, Shared(sent), block)
        up += num_bytes(answer)
        kept = max(kept, bytes_of_sum(algorithm.aggregation, answer, number))
        program = compile_client(
            client, algorithm.aggregation, lambda size, lanes: programs.append(size)
        )
        program.find(Shared(sent), block)
    if not programs:
        return up, num_bytes(message), None, None
    blocks = min(width.workers, math.ceil(number / lanes))
    packed = 0 if data.packed is None else sum(array.nbytes for array in data.packed.arrays)
    memory = blocks * max(programs) + num_bytes(state) + num_bytes(message) + packed + kept
    return up, num_bytes(message), max(programs) // lanes, memory


def _find_local(method: Any, phase: str = "") -> LocalTraining | None:
    """Return a method's local training, if its clients do that in this phase."""
    while isinstance(method, Described):
        arguments = method.arguments
        if stage(phase) == SAMPLING and arguments.get("sampler") is not None:
            return None
        local = arguments.get("local")
        if isinstance(local, LocalTraining):
            return local
        method = arguments.get("numerator", arguments.get("method"))
    return None


def _count_work(method: Any, phase: str, sizes: Sequence[int]) -> tuple[float, float] | None:
    """Count local steps and examples of a client, as the mean over all clients."""
    local = _find_local(method, phase)
    if local is None:
        return None
    n = np.asarray(sizes, np.float64)
    window, samples = local_work(local)
    in_epoch = np.ceil(n / local.batch_size)
    if isinstance(window, Epochs):
        steps = (window.burn_in + samples) * in_epoch
    else:
        steps = np.where(n > 0, window.burn_in + samples * (window.per_sample + window.discard), 0)
    batch = n / np.maximum(in_epoch, 1) if local.order == "shuffle" else local.batch_size
    return float(steps.mean()), float((steps * batch).mean())


def _count_flops(method: Any, objective: Objective, theta: Params) -> float | None:
    """Count the operations of one local step; None without steps or if XLA does not count."""
    local = _find_local(method)
    if local is None:
        return None

    def like(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((local.batch_size, *np.shape(leaf)[1:]), dtype)

    weights = jax.ShapeDtypeStruct((local.batch_size,), jnp.float32)
    batch = Minibatch(jax.tree.map(like, objective.like), weights)  # type: ignore[arg-type]
    gradient = jax.value_and_grad(functools.partial(minibatch_loss, objective))
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = jax.jit(gradient).lower(theta, batch, key)
    counted = (lowered.cost_analysis() or {}).get("flops")
    return None if counted is None else float(counted)
