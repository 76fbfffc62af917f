"""Privacy in the round loop: cohorts, noise, ε in records, the end of a budget."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate, Message, State
from fedpa.data.federated import FederatedData
from fedpa.engines.engine import RoundResult
from fedpa.errors import refuse
from fedpa.objectives.client_data import ClientData
from fedpa.privacy.accounting import check_run, compute_epsilon, is_exhausted
from fedpa.privacy.cohorts import draw_cohort, take_turns
from fedpa.privacy.ledger import Ledger
from fedpa.privacy.noise import draw_normals
from fedpa.privacy.release import Noise, Release
from fedpa.server.aggregation import Aggregate
from fedpa.training.callbacks import Answer, Callback, Event, Remembering, Stop
from fedpa.types import Key, Params

EPSILON, RELEASES, CLIP = "privacy/epsilon", "privacy/releases", "privacy/clip"
NOT_NOISED = "privacy/not_noised"
"""Which of a record's numbers are not private: patterns of their names."""
PLAIN = "train/*, comm/*"
MEMORY = "privacy"
"""Name of the accountant's state in checkpoints."""


def check_private(
    algorithm: Algorithm,
    clients: int,
    clients_per_round: int,
    min_success: float = 0.0,
    done: int = 0,
    more: bool = True,
) -> None:
    """Refuse a private run that its budget does not allow, or that can't be private.

    Args:
        algorithm: Any; one that is not private passes.
        clients: How many clients there are.
        clients_per_round: How many take part in a round.
        min_success: As in `fedpa.fit`.
        done: Rounds done so far; a deployment's ledger counts for itself.
        more: Whether there are more rounds to run.
    """
    release = algorithm.release
    if release is None:
        return
    if algorithm.switch is not None:
        expected = "the plateau is that of a training metric without noise: give a number of rounds"
        raise refuse("burn_in_rounds", "auto", expected)
    if min_success:
        expected = "would end a private run by which of its clients fail: leave it out"
        raise refuse("min_success", min_success, expected)
    done = count_releases(release, done)
    check_run(release.budget, clients, clients_per_round, done, more)


def count_releases(release: Release, done: int) -> int:
    """How many releases there were in `done` rounds; a deployment may have repeated some."""
    return done if release.ledger is None else release.ledger.count(done)


def choose_cohorts(
    release: Release, seed: Sequence[int], ids: Sequence[str], size: int
) -> Callable[[int], list[str]]:
    """Make the function that draws the cohort of a round, from 0.

    In a simulation it is a function of the seed and the round. In a deployment it is drawn from the
    operating system's entropy, once for each round, and forgotten with the process.

    seed: numbers that the generators start from.
    """
    sampling, ledger = release.budget.sampling, release.ledger
    if sampling == "cyclic":
        order = np.random.default_rng(list(seed)).permutation(len(ids))
        return lambda t: take_turns(ids, size, t, order)
    if ledger is None:

        def draw(t: int) -> list[str]:
            uniforms = np.random.default_rng([*seed, t]).random(len(ids))
            return draw_cohort(sampling, ids, size, uniforms)

        return draw
    return _draw_once(ledger, release, ids, size)


def _draw_once(
    ledger: Ledger, release: Release, ids: Sequence[str], size: int
) -> Callable[[int], list[str]]:
    drawn: dict[int, list[str]] = {}

    def draw(t: int) -> list[str]:
        if t not in drawn:
            drawn[t] = ledger.draw_cohort(release.budget.sampling, ids, size)
            for old in [other for other in drawn if other < t - 1]:
                del drawn[old]
        return drawn[t]

    return draw


Step = Callable[[State, Aggregate, Any], tuple[State, Any]]
"""(server state, aggregate, round) → server state, info."""


def make_private_server(algorithm: Algorithm, root: Key, cohort: int) -> Step:
    """Make the server's step of a private algorithm: noise, and then ServerUpdate.

    Args:
        algorithm: One that is private.
        root: The key of all noise, in a simulation.
        cohort: m.
    """
    release = algorithm.release
    assert release is not None
    ledger, step = release.ledger, _compile_step(release.noise, algorithm.server, cohort)

    def server(state: State, aggregate: Aggregate, t: Any) -> tuple[State, Any]:
        if ledger is None:
            normals = _draw_normals(root, aggregate.mean, t)
        else:
            ledger.record(int(t) + 1)  # before there is a model that could leave the server
            normals = ledger.draw_normals(aggregate.mean)
        return step(state, aggregate, t, normals)

    return server


@functools.lru_cache(maxsize=8)
def _compile_step(noise: Noise, server: Step, cohort: int) -> Callable[..., tuple[State, Any]]:
    """One program for all runs of an algorithm, which differ in their seeds."""

    @jax.jit
    def step(state: State, aggregate: Aggregate, t: Any, normals: Any) -> tuple[State, Any]:
        return server(state, noise(state, aggregate, normals, cohort), t)

    return step


@jax.jit
def _draw_normals(root: Key, like: Any, t: Any) -> Any:
    return draw_normals(jax.random.fold_in(root, t), like)


def track_privacy(release: Release, clients: int, clients_per_round: int) -> list[Callback]:
    """Make the callbacks that record ε, and end a run before it would exceed the largest."""
    budget = release.budget
    mechanism = budget.mechanism(clients, clients_per_round)

    def account(memory: Any, event: Event) -> tuple[Any, Answer]:
        releases = count_releases(release, event.round)
        spent = compute_epsilon(mechanism, releases, budget.delta)
        metrics: dict[str, Any]
        metrics = {EPSILON: spent, RELEASES: releases, CLIP: float(event.state.clip)}
        metrics |= {NOT_NOISED: PLAIN} if release.ledger is None else {}
        return {"releases": releases, "epsilon": spent}, metrics

    def stop(event: Event) -> Answer:
        if not is_exhausted(budget, mechanism, event.record[RELEASES]):
            return None
        spent, most = event.record[EPSILON], budget.max_epsilon
        return Stop(f"privacy budget: ε = {spent:.4g}, and one more round would exceed {most:g}")

    return [Remembering(MEMORY, {"releases": 0, "epsilon": 0.0}, account), stop]


def refuse_private(records: Sequence[Mapping[str, Any]], what: str) -> None:
    """Refuse a private run where clients would be asked for more without clipping and noise.

    what: for which they would be asked.
    """
    if any(EPSILON in record for record in records):
        raise refuse(
            EPSILON,
            records[-1].get(EPSILON),
            f"the run is private, and {what} takes one more round without clipping or noise. If "
            "that is acceptable, give the model itself, result.params",
        )


def run_without_clients(
    algorithm: Algorithm, client: ClientUpdate, message: Message, theta: Params, data: FederatedData
) -> RoundResult:
    """Make the result of a round without clients: a sum of zeros."""
    some = next((name for name in data.ids if data.num_examples(name) > 0), data.ids[0])

    def add(message: Message, examples: Any) -> Any:
        one = ClientData(examples, jnp.asarray(1, jnp.int32))
        out = client(message, one, algorithm.client_init(theta), jax.random.key(0))
        return algorithm.aggregation.init(out.result, out.weight), out.info

    examples = jax.tree.map(lambda x: jnp.asarray(x[:1]), data.examples(some))
    total, info = jax.eval_shape(add, message, examples)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), total)
    infos = {name: np.zeros(0) for name in info._asdict()}
    aggregate = algorithm.aggregation.value(zeros)
    none = np.zeros(0, np.int64)
    return RoundResult(aggregate, infos, none.astype(bool), none, {}, {}, 0)
