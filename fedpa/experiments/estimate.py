"""The cost of a configured run: `fedpa.estimate`, and seconds measured on a few clients."""

import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.data.federated import FederatedData, check_when_read
from fedpa.engines.blocks import Plan, blocks, capacities, choose_width
from fedpa.engines.engine import Cohort
from fedpa.engines.execution import make_pool, run_blocks
from fedpa.engines.program import compile_client
from fedpa.experiments.config import RunConfig, build_run_method
from fedpa.experiments.run import assemble_run
from fedpa.experiments.tasks.task import task_named
from fedpa.training.estimate import Estimate, count_phases, estimate_phases
from fedpa.training.loop import warn_of_few_clients
from fedpa.training.problem import Problem

REPEATS = 5


class RunEstimate(NamedTuple):
    cost: Estimate
    """Of the phases that the run has."""
    seconds_per_round: dict[str, float]
    """phase → what clients of median size take, for the whole cohort, and one evaluation."""


def estimate_run(config: RunConfig, problem: Problem | None = None) -> RunEstimate:
    """Estimate a run; each phase's client update runs for a few clients of median size."""
    if problem is None:
        problem = task_named(config.task).load(config.task_options)
    training = assemble_run(config, problem)
    algorithm, theta, assemble, _ = training.prepared
    data, evaluate = training.data, training.evaluate
    warn_of_few_clients(training.clients_per_round, len(data.ids))
    assert evaluate is not None
    phases = count_phases(algorithm, training.rounds)
    method = build_run_method(config)
    cost = estimate_phases(training.prepared, method, data, training.clients_per_round, phases)
    state = algorithm.init(theta)
    message = algorithm.broadcast(state, jnp.asarray(0))
    ids = sorted(data.ids, key=data.num_examples)
    median = ids[len(ids) // 2]
    clients = cost.clients_per_round
    cohort = _alike(median, data, algorithm.client_init(theta), clients)
    lanes, workers = choose_width(message, cohort)
    # As many as run at a time; the others take their turns.
    few = min(lanes * workers, clients)
    cohort = _alike(median, data, algorithm.client_init(theta), few)
    plan = Plan(blocks(cohort.sizes, [lanes], capacities(cohort.sizes)), workers)
    pool = make_pool(workers)
    evaluation = _seconds(lambda: evaluate(assemble(theta)), 1) / config.eval_every

    seconds = {}
    for phase in phases:
        trips = [(algorithm.clients[phase], message)]
        if algorithm.inquiry is not None:
            trips.append((algorithm.inquiry.client, algorithm.inquiry.broadcast(state)))
        spent = 0.0
        for client, sent in trips:
            program = compile_client(client, algorithm.aggregation)
            run = functools.partial(run_blocks, program, sent, cohort, plan, pool=pool)
            spent += _seconds(run)
        seconds[phase] = spent * clients / few + evaluation
    return RunEstimate(cost, seconds)


def _alike(name: str, data: FederatedData, state: Any, number: int) -> Cohort:
    """A cohort of `number` clients like the one named."""
    ids = [f"{name} {index}" for index in range(number)]
    examples, n = check_when_read(data).examples(name), data.num_examples(name)
    keys = jax.random.split(jax.random.key(0), number)
    return Cohort(ids, lambda _: examples, keys, dict.fromkeys(ids, state), [n] * number)


def _seconds(work: Any, repeats: int = REPEATS) -> float:
    """The median time of `work` once warm."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
