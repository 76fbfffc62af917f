"""Posteriors that training itself leaves: SWAG over server iterates, ensembles of samples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from fedpa.algorithms.fedopt import Algorithm, ClientResult, ClientState
from fedpa.algorithms.methods import Method
from fedpa.data.federated import Clients, as_federation
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import check_integer, check_positive, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.posterior.density import Ensemble, Swag
from fedpa.posterior.laplace import find_model
from fedpa.posterior.posterior import Posterior
from fedpa.precision import ravel
from fedpa.samplers.sampler import Sampler
from fedpa.server.aggregation import Aggregate, Aggregation
from fedpa.server.averaging import SwagState
from fedpa.server.keep_results import keep_results
from fedpa.training.fit import fit
from fedpa.training.loading import Run
from fedpa.training.loop import Fit
from fedpa.types import Key, Loss, Model, Params, Scalar


def swag_posterior(result: Fit | SwagState, params: Model, scale: float = 1.0) -> Posterior:
    """Make SWAG's posterior of a run whose server averaged with `fedpa.server.averaging.swag`.

    N(θ̄, s·½(diag(σ²) + DDᵀ/(K − 1))), s = 1 in the paper. How far server iterates spread says as
    much about the rates and the cohorts as about the posterior: choose s on validation clients.

    Args:
        result: What `fedpa.fit` returned; or the server's average, e.g. of `fedpa.load_checkpoint`.
        params: The model, or any of its structure.
        scale: s > 0.
    Returns:
        The posterior, around the mean of the iterates.
    Raises:
        FedpaError: The run did not average so, or has averaged fewer than two iterates.
    Example:
        >>> averaging = fedpa.server.averaging.swag(start=10, rank=5)
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4),
        ...                       fedpa.Server(fedpa.server.sgd(1.0), averaging=averaging))
        >>> clients = {name: {"x": np.full(8, v)} for name, v in (("a", 0.0), ("b", 1.0))}
        >>> loss = lambda p, batch, key: (p["m"] - batch["x"]) ** 2
        >>> params = {"m": np.zeros(1)}
        >>> result = fedpa.fit(loss, params, clients, method, rounds=40, clients_per_round=1,
        ...                    progress=False)
        >>> posterior = swag_posterior(result, params)
        >>> bool(0.05 < posterior.sd["m"][0] < 0.5)
        True
    """
    check_positive("scale", scale)
    average = find_swag(result.state if isinstance(result, Fit) else result)
    if average is None:
        raise refuse(
            "result",
            type(result).__name__,
            "the server must average with fedpa.server.averaging.swag(start)",
        )
    members = int(average.members)
    if members < 2:
        raise refuse(
            "result", members, "SWAG needs at least two iterates: train longer, or start earlier"
        )
    mean, _ = ravel(average.average)
    variances = ravel(average.spread)[0] / members
    deviations = jax.vmap(lambda row: ravel(row)[0])(average.deviations)
    rank = min(members, len(deviations))
    return Posterior(Swag(mean, variances, deviations[:rank], float(scale)), params)


def find_swag(state: Any) -> SwagState | None:
    """SWAG's part of a server's state, if the server keeps one."""

    def is_swag(part: Any) -> bool:
        return isinstance(part, SwagState)

    return next(filter(is_swag, jax.tree.leaves(state, is_leaf=is_swag)), None)


class SampleInfo(NamedTuple):
    loss: Scalar
    """Mean loss of the chain's last steps."""


class SampleServerInfo(NamedTuple):
    skipped: Bool[jax.Array, ""]
    """See `ServerInfo`."""


def collect(number: int) -> Aggregation:
    """All results of a round with `number` clients, in place of their mean."""

    def combine(rows: Params, present: Bool[jax.Array, " rows"]) -> Params:
        order = jnp.argsort(~present)[:number]
        return jax.tree.map(lambda x: x[order], rows)

    return keep_results(combine)


def collect_samples(sampler: Callable[[Objective], Sampler], samples: int, members: int) -> Method:
    """Build the round in which every client draws samples from θ, and sends the last."""

    def build(objective: Objective) -> Algorithm:
        chain = sampler(objective)

        def client(theta: Params, data: ClientData, state: ClientState, key: Key) -> ClientResult:
            def step(carry: Any, _: None) -> tuple[Any, Scalar]:
                state, _ = carry
                state, theta_s, info = chain.sample(state, data)
                return (state, theta_s), info.loss

            start = (chain.init(theta, data, key), theta)
            (_, last), losses = jax.lax.scan(step, start, None, length=samples)
            weight = (data.n > 0).astype(jnp.float32)
            return ClientResult(last, weight, state, SampleInfo(losses[-1].astype(jnp.float32)))

        def server(
            state: tuple[Params, Params], aggregate: Aggregate, t: Any
        ) -> tuple[tuple[Params, Params], SampleServerInfo]:
            return (state[0], aggregate.mean), SampleServerInfo(aggregate.weight <= 0)

        return Algorithm(
            init=lambda theta: (
                theta,
                jax.tree.map(lambda x: jnp.zeros((members, *x.shape), x.dtype), theta),
            ),
            phase=lambda t: "samples",
            broadcast=lambda state, t: state[0],
            clients={"samples": client},
            client_init=lambda theta: (),
            aggregation=collect(members),
            server=server,
            parameters=lambda state: state[0],
        )

    return build


def client_ensemble(
    result: Fit | Run | Model,
    loss: Loss | Objective,
    clients: Clients,
    sampler: Callable[[Objective], Sampler],
    *,
    members: int = 30,
    samples: int = 2,
    seed: int = 0,
    engine: Engine | OfAlgorithm | None = None,
    progress: bool = True,
) -> Posterior:
    """Make an ensemble of client samples: each of some clients draws from its own posterior.

    Every member is one client's sample, drawn by a chain that starts at the trained model. Members
    differ as clients' posteriors do: with label skew far more than the global posterior does.

    Args:
        result: What `fedpa.fit` or `fedpa.load` returned, or the model itself.
        loss: The loss that it was trained with.
        clients: Client id → a pytree of arrays, or a `FederatedData`.
        sampler: Objective → sampler: `lambda f: fedpa.samplers.iasg(f, 0.1, batch_size=20)`.
        members: How many clients are drawn, each for one member; at least 2.
        samples: Samples of each chain, of which the last is taken, ≥ 1.
        seed: Of clients and chains.
        engine: Where clients run; default: `fedpa.engines.local()`.
        progress: Whether the round is shown on stderr.
    Returns:
        The posterior, around the members' mean.
    Raises:
        FedpaError: There are fewer clients, or arguments don't fit together.
    Example:
        >>> clients = {name: {"x": np.full(8, v)} for name, v in (("a", 0.0), ("b", 1.0))}
        >>> loss = lambda p, batch, key: (p["m"] - batch["x"]) ** 2
        >>> posterior = client_ensemble({"m": np.zeros(1)}, loss, clients,
        ...                             lambda f: fedpa.samplers.iasg(f, 0.5, batch_size=8),
        ...                             members=2, progress=False)
        >>> posterior.mean["m"].tolist()
        [0.5]
    """
    check_integer("members", members, 2)
    check_integer("samples", samples, 1)
    model = find_model(result, "an ensemble of clients")
    data = as_federation(clients)
    ids = tuple(name for name in data.ids if data.num_examples(name) > 0)
    if members > len(ids):
        raise refuse("members", members, f"{len(ids):,} clients have examples: give at most these")
    data = data._replace(ids=ids)
    drawn = fit(
        loss,
        model,
        data,
        collect_samples(sampler, samples, members),
        rounds=1,
        clients_per_round=members,
        seed=seed,
        engine=engine,
        min_success=1.0,
        progress=progress,
    )
    vectors = jax.vmap(lambda row: ravel(row)[0])(drawn.state[1])
    return Posterior(Ensemble(vectors), model)
