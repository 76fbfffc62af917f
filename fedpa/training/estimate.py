"""What a run will cost, measured on one client before it starts."""

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.algorithms.method import methods
from fedpa.engines.local import capacity, program
from fedpa.objectives.client_data import client_data
from fedpa.tasks.task import task_named
from fedpa.training.config import RunConfig
from fedpa.training.fit import bind

REPEATS = 5


class Estimate(NamedTuple):
    clients: int
    parameters: int
    seconds_per_round: dict[str, float]
    """phase → the median client's compiled update times the cohort, and one evaluation."""
    memory: dict[str, int]
    """phase → bytes of a client's program: data, parameters, samples and temporaries."""


def estimate(config: RunConfig) -> Estimate:
    """Compile each phase's client update for the client of median size and time it."""
    problem = task_named(config.task).load()
    params = problem.init(jax.random.key(config.seed))
    objective, theta, assemble = bind(problem.loss, params, problem.regularizer, problem.reduction)
    algorithm = methods()[config.method].build(config.hyperparameters)(objective)
    state = algorithm.init(theta)
    message = algorithm.broadcast(state, jnp.asarray(0))
    ids = sorted(problem.clients.ids, key=problem.clients.num_examples)
    examples = problem.clients.examples(ids[len(ids) // 2])
    data = client_data(examples, capacity(problem.clients.num_examples(ids[len(ids) // 2])))
    inputs = (message, data, algorithm.client_init(theta), jax.random.key(0))
    evaluation = _seconds(lambda: problem.evaluate(assemble(theta)))

    seconds, memory = {}, {}
    clients = min(config.clients_per_round, len(ids))
    for phase in dict.fromkeys(algorithm.phase(t) for t in range(config.rounds)):
        client = algorithm.clients[phase]
        plain = program(client, algorithm.aggregation)
        total = plain.empty(plain.shapes(*inputs))
        compiled: Any = jax.jit(plain.step).lower(total, *inputs).compile()
        per_client = _seconds(lambda: jax.block_until_ready(compiled(total, *inputs)))
        seconds[phase] = clients * per_client + evaluation
        used = compiled.memory_analysis()
        memory[phase] = (
            used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(theta))
    return Estimate(len(ids), parameters, seconds, memory)


def _seconds(work: Any) -> float:
    """The median time of `work` once warm."""
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
