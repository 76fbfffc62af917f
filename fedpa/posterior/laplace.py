"""`fedpa.laplace_posterior`: the posterior of a trained model, from one more federated round.

Around the trained parameters θ* the log-posterior is quadratic,

    q(θ) = N(θ*, Λ⁻¹),   Λ = Σ_i F_i(θ*)/T + λI

with F_i client i's Fisher matrix, a sum over its examples, in one of four structures
(`fedpa.precisions.fisher`), λ the precision of the prior and T a temperature. Clients send F_i, the
server adds. λ and T can't be known from training; they are chosen afterwards, either

- by the negative log-likelihood of validation clients: λ on a grid with T = 1, then T, or
- by the marginal likelihood of the training data (T = 1), which needs no further data:

    log p(D) ≈ ℓ(θ*) − ½λ‖θ*‖² + ½ d log λ − ½ log det Λ

θ* is taken to be the mode; training that stopped early, or that had no prior, ended elsewhere.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from fedpa import engines
from fedpa.algorithms.fedopt import Algorithm, ClientResult, ClientState
from fedpa.algorithms.methods import Method
from fedpa.data.federated import Clients, FederatedData, as_federation
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import FedpaError, check_integer, check_positive, check_type, refuse
from fedpa.metrics.streaming import Evaluation
from fedpa.objectives.client_data import ClientData, client_data
from fedpa.objectives.layer_inputs import Layer, find_layers
from fedpa.objectives.likelihood import Likelihood
from fedpa.objectives.objective import Objective, client_loss
from fedpa.posterior.density import Normal
from fedpa.posterior.evaluation import evaluate_posterior
from fedpa.posterior.posterior import Posterior, choose_parameters, name_leaf, split_model
from fedpa.precision import ravel, widen
from fedpa.precisions.fisher import (
    Fisher,
    Labels,
    check_labels,
    dense_fisher,
    diagonal_fisher,
    kronecker_fisher,
    low_rank_fisher,
)
from fedpa.precisions.layered import Layered
from fedpa.server.aggregation import Aggregate, weighted_mean
from fedpa.training.fit import fit
from fedpa.training.history import History
from fedpa.training.loading import Run
from fedpa.training.loop import Fit
from fedpa.training.privacy import refuse_private
from fedpa.training.problem import some_examples
from fedpa.training.provenance import data_fingerprint
from fedpa.training.run import RecordingOptions
from fedpa.types import Key, Model, Params, Scalar

Structure = Literal["kronecker", "last-layer", "diagonal", "low-rank"]
PRECISIONS = tuple(float(x) for x in np.logspace(-1, 8, 15))
"""Values of λ that are tried."""
TEMPERATURES = (0.03, 0.1, 0.3, 3.0, 10.0, 30.0)
"""Values of T besides 1, tried with the best λ."""
LARGE = 2**20
"""Numbers of a client's Fisher matrix above which clients run one at a time."""
LESS = 1e-4
"""Share of its NLL with T = 1 by which another T must be better to be chosen: less is rounding."""
RANK = 10
"""Directions of a low-rank precision."""
FISHER = "fisher"
"""The round's phase."""


class Curvature(NamedTuple):
    """What the round gives: θ*, and the sum of the clients' Fisher matrices, without a prior.

    Args:
        model: The trained model.
        over: Names of the parameters that the matrix is over; None: all.
        center: θ*, those parameters, of the shape that `fisher` is over.
        fisher: Σ F_i, factorized if its structure allows it.
        examples: n, of the clients whose matrices it has.
        history: The round's record.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "normal")
        >>> clients = {"a": {"x": np.eye(2, dtype=np.float32), "y": np.ones(2, np.float32)}}
        >>> curvature = measure_curvature(np.ones(2, np.float32), likelihood, clients,
        ...                               structure="diagonal", progress=False)
        >>> curvature.posterior(prior_precision=3.0).sd.tolist()
        [0.5, 0.5]
    """

    model: Model
    over: tuple[str, ...] | None
    center: Params
    fisher: Any
    examples: int
    history: History

    def posterior(self, prior_precision: float, temperature: float = 1.0) -> Posterior:
        """N(θ*, (Σ F_i/T + λI)⁻¹).

        Args:
            prior_precision: λ > 0: 1/sd² of the prior.
            temperature: T > 0.
        """
        check_positive("prior_precision", prior_precision)
        check_positive("temperature", temperature)
        return Posterior(
            Normal(self.center, self.precision(prior_precision, temperature)),
            self.model,
            history=self.history,
            over=self.over,
        )

    def precision(self, prior_precision: float, temperature: float = 1.0) -> Any:
        """Σ F_i/T + λI."""
        return self.fisher.scale(jnp.float32(1 / temperature)).add_identity(
            jnp.float32(prior_precision)
        )

    def log_marginal_likelihood(self, prior_precision: float, temperature: float = 1.0) -> float:
        """log p(D) by Laplace's approximation, up to ℓ(θ*)/T, which λ does not change."""
        wide = widen(self.center)
        theta, _ = ravel(wide)
        logdet = float(self.precision(prior_precision, temperature).logdet(wide))
        d, norm = len(theta), float(jnp.vdot(theta, theta))
        return 0.5 * (d * math.log(prior_precision) - prior_precision * norm - logdet)


class FisherState(NamedTuple):
    theta: Params
    total: Any
    """Σ F_i, as it is sent."""
    weight: Scalar


class FisherInfo(NamedTuple):
    loss: Scalar
    """−ℓ_i(θ*)/n_i."""


class FisherServerInfo(NamedTuple):
    skipped: Bool[Array, ""]
    """See `ServerInfo`."""


FisherOfClient = Callable[[Params, ClientData, Key], Any]
"""(θ, the client's data, key) → what it sends."""


def sum_fisher(compute: FisherOfClient) -> Method:
    """Build the round in which clients send their Fisher matrices, and the server adds them."""

    def build(objective: Objective) -> Algorithm:
        def init(theta: Params) -> FisherState:
            shapes = _shapes_sent(compute, theta, objective.like)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return FisherState(theta, zeros, jnp.zeros(()))

        def client(theta: Params, data: ClientData, state: ClientState, key: Key) -> ClientResult:
            n = data.n.astype(jnp.float32)
            per_example = 1 / jnp.maximum(n, 1)
            sent = jax.tree.map(
                lambda x: x * per_example.astype(x.dtype), compute(theta, data, key)
            )
            loss = client_loss(objective, theta, data, key).astype(jnp.float32)
            return ClientResult(sent, n, state, FisherInfo(loss))

        def server(
            state: FisherState, aggregate: Aggregate, t: Any
        ) -> tuple[FisherState, FisherServerInfo]:
            weight = aggregate.weight
            total = jax.tree.map(lambda x: x * weight.astype(x.dtype), aggregate.mean)
            return FisherState(state.theta, total, weight), FisherServerInfo(weight <= 0)

        return Algorithm(
            init=init,
            phase=lambda t: FISHER,
            broadcast=lambda state, t: state.theta,
            clients={FISHER: client},
            client_init=lambda theta: (),
            aggregation=weighted_mean(),
            server=server,
            parameters=lambda state: state.theta,
        )

    return build


def measure_curvature(
    result: Fit | Run | Model,
    likelihood: Likelihood,
    clients: Clients,
    *,
    structure: Structure = "kronecker",
    layer: str | None = None,
    labels: Labels = "sampled",
    rank: int = RANK,
    block: int = 2048,
    seed: int = 0,
    engine: Engine | OfAlgorithm | None = None,
    min_success: float = 1.0,
    progress: bool = True,
) -> Curvature:
    """Run the round: every client computes its Fisher matrix at θ*, the server adds them up.

    Args:
        result: What `fedpa.fit` or `fedpa.load` returned, or the model itself.
        likelihood: How the model's outputs become probabilities.
        clients: Client id → a pytree of arrays, or a `FederatedData`: those it was trained on.
        structure: "kronecker" (K-FAC for every layer that the model shows, the diagonal of other
            parameters), "last-layer" (dense, of at most 8,192 parameters), "diagonal", "low-rank"
            (plus a diagonal).
        layer: Of "last-layer": the layer's name or the start of it, `layers.1`; default: the last
            layer that the model shows.
        labels: "sampled" or "all", except with "last-layer".
        rank: Of "low-rank", ≥ 1.
        block: Of "kronecker": the largest block of a factor.
        seed: Of the round's randomness.
        engine: Where clients run; default: `fedpa.engines.local()`.
        min_success: Share of the clients that must succeed; default: all.
        progress: Whether the round is shown on stderr.
    Returns:
        θ* and Σ F_i.
    Raises:
        FedpaError: Arguments don't fit together, or the model shows no layers and the structure
            needs them.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "normal")
        >>> clients = {"a": {"x": np.eye(2, dtype=np.float32), "y": np.ones(2, np.float32)}}
        >>> curvature = measure_curvature(np.ones(2, np.float32), likelihood, clients,
        ...                               structure="diagonal", progress=False)
        >>> curvature.fisher.values.tolist()
        [1.0, 1.0]
    """
    check_type("likelihood", likelihood, Likelihood, "fedpa.objectives.Likelihood(outputs)")
    likelihood.check()
    check_labels(labels)
    check_integer("rank", rank, 1)
    check_integer("seed", seed, 0)
    if structure not in get_args(Structure):
        raise refuse("structure", structure, f"must be one of {', '.join(get_args(Structure))}")
    if layer is not None and structure != "last-layer":
        raise refuse("layer", layer, "belongs to structure = 'last-layer': leave it out")
    if labels != "sampled" and structure == "last-layer":
        raise refuse("labels", labels, "does not apply to 'last-layer': leave it out")
    if rank != RANK and structure != "low-rank":
        raise refuse("rank", rank, "belongs to structure = 'low-rank': leave it out")
    model = find_model(result, "its posterior")
    data = as_federation(clients)
    if isinstance(result, Run) and result.data is not None:
        _check_data(result.data, data)
    over = None
    if structure in ("kronecker", "last-layer"):
        over = _choose_layer(model, likelihood, data, structure, layer)
    builders: dict[str, Callable[[], Fisher]] = {
        "kronecker": lambda: kronecker_fisher(labels, block=block),
        "last-layer": dense_fisher,
        "diagonal": lambda: diagonal_fisher(labels),
        "low-rank": lambda: low_rank_fisher(rank, labels, seed=seed),
    }
    fisher = builders[structure]()
    whole, rest = split_model(model)
    chosen, _ = choose_parameters(whole, over)

    def of_client(theta: Params, data: ClientData, key: Key) -> Any:
        chosen, known = choose_parameters(eqx.combine(theta, rest), over)
        return fisher.of_client(_given(likelihood, known), chosen, data, key)

    sent = _shapes_sent(of_client, whole, some_examples(data))
    if isinstance(sent, Layered):
        shown = find_layers(_given(likelihood, rest).loss, whole, some_arrays(data))
        _check_outputs(sent, shown, whole)
    if engine is None:
        # Engines choose by the model's size how many clients run side by side; this may be larger.
        is_large = sum(math.prod(x.shape) for x in jax.tree.leaves(sent)) > LARGE
        engine = engines.per_client() if is_large else engines.local()
    round_of_all = fit(
        Objective(likelihood.loss),
        model,
        data,
        sum_fisher(of_client),
        rounds=1,
        clients_per_round=len(data.ids),
        seed=seed,
        engine=engine,
        min_success=min_success,
        recording=RecordingOptions(label="posterior"),
        progress=progress,
    )
    found = fisher.precision(round_of_all.state.total, chosen)
    return Curvature(
        model,
        over,
        ravel(chosen)[0] if fisher.is_vector else chosen,
        found.factorize() if structure == "kronecker" else found,
        int(round_of_all.state.weight),
        round_of_all.history,
    )


def laplace_posterior(
    result: Fit | Run | Model,
    likelihood: Likelihood,
    clients: Clients,
    *,
    validation: Clients | None = None,
    prior_precision: float | None = None,
    temperature: float | None = None,
    structure: Structure = "kronecker",
    layer: str | None = None,
    labels: Labels = "sampled",
    rank: int = RANK,
    seed: int = 0,
    engine: Engine | OfAlgorithm | None = None,
    progress: bool = True,
) -> Posterior:
    """Make the posterior of a trained model by Laplace's approximation, in one federated round.

    q(θ) = N(θ*, (Σ F_i/T + λI)⁻¹). What of λ and T is not given is chosen: by the negative
    log-likelihood of validation clients if there are any, otherwise by the marginal likelihood,
    with T = 1.

    Args:
        result: What `fedpa.fit` or `fedpa.load` returned, or the model itself.
        likelihood: How the model's outputs become probabilities.
        clients: Client id → a pytree of arrays, or a `FederatedData`: those it was trained on.
        validation: Clients that were not.
        prior_precision: λ > 0: 1/sd² of a normal prior around 0; default: chosen.
        temperature: T > 0; 1 is Bayes' rule; default: chosen.
        structure: "kronecker", "last-layer", "diagonal" or "low-rank": `measure_curvature` says
            what each is and what it needs.
        layer: Of "last-layer": the layer's name; default: the last that the model shows.
        labels: "sampled" or "all", except with "last-layer".
        rank: Of "low-rank", ≥ 1.
        seed: Of all randomness.
        engine: Where clients run; default: `fedpa.engines.local()`.
        progress: Whether the round is shown on stderr.
    Returns:
        The posterior: `sample(key, num)`, `predict(f, x, key)`, `sd`.
    Raises:
        FedpaError: Arguments don't fit together, or the model shows no layers and the structure
            needs them.
    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(40, 2)).astype(np.float32)
        >>> clients = {"a": {"x": x, "y": (x[:, 0] > 0).astype(np.float32)}}
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "sigmoid")
        >>> posterior = laplace_posterior(np.array([2.0, 0.0], np.float32), likelihood, clients,
        ...                               structure="diagonal", prior_precision=1.0, progress=False)
        >>> posterior.sample(jax.random.key(0), 30).shape
        (30, 2)
    """
    for field, value in (("prior_precision", prior_precision), ("temperature", temperature)):
        if value is not None:
            check_positive(field, value)
    measure = None
    if validation is not None:
        measure = evaluate_posterior(likelihood, as_federation(validation))
    curvature = measure_curvature(
        result,
        likelihood,
        clients,
        structure=structure,
        layer=layer,
        labels=labels,
        rank=rank,
        seed=seed,
        engine=engine,
        progress=progress,
    )
    if prior_precision is not None and temperature is not None:
        return curvature.posterior(prior_precision, temperature)
    if measure is None:
        temperature = 1.0 if temperature is None else temperature
        if prior_precision is None:
            prior_precision = choose_by_marginal_likelihood(curvature, temperature)
        return curvature.posterior(prior_precision, temperature)
    chosen = choose_by_validation(curvature, measure, prior_precision, temperature, seed=seed)
    return curvature.posterior(*chosen)


def choose_by_marginal_likelihood(curvature: Curvature, temperature: float = 1.0) -> float:
    """Choose λ among 15 values by the marginal likelihood of the training data.

    Args:
        curvature: From `measure_curvature`.
        temperature: T > 0; default: 1.
    Returns:
        λ.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "normal")
        >>> clients = {"a": {"x": np.eye(2, dtype=np.float32), "y": np.ones(2, np.float32)}}
        >>> curvature = measure_curvature(np.ones(2, np.float32), likelihood, clients,
        ...                               structure="diagonal", progress=False)
        >>> choose_by_marginal_likelihood(curvature) < 10
        True
    """
    return choose_least(PRECISIONS, lambda x: -curvature.log_marginal_likelihood(x, temperature))


def choose_by_validation(
    curvature: Curvature,
    measure: Callable[[Posterior, Key], Evaluation],
    prior_precision: float | None = None,
    temperature: float | None = None,
    *,
    seed: int = 0,
) -> tuple[float, float]:
    """Choose λ, then T, by the negative log-likelihood of validation clients: 21 trials.

    Args:
        curvature: From `measure_curvature`.
        measure: From `evaluate_posterior`, of the validation clients.
        prior_precision: λ, if it is known.
        temperature: T, if it is known.
        seed: Of the draws, the same in all trials.
    Returns:
        λ and T.
    Raises:
        FedpaError: No trial has a finite negative log-likelihood.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "sigmoid")
        >>> x = np.random.default_rng(0).normal(size=(40, 1)).astype(np.float32)
        >>> clients = {"a": {"x": x, "y": (x[:, 0] > 0).astype(np.float32)}}
        >>> curvature = measure_curvature(np.array([2.0], np.float32), likelihood, clients,
        ...                               structure="diagonal", progress=False)
        >>> measure = evaluate_posterior(likelihood, fedpa.data.from_mapping(clients))
        >>> prior_precision, temperature = choose_by_validation(curvature, measure)
    """
    key = jax.random.key(seed)

    @functools.cache
    def nll(prior_precision: float, temperature: float) -> float:
        return measure(curvature.posterior(prior_precision, temperature), key).values["nll"]

    start = 1.0 if temperature is None else temperature
    if prior_precision is None:
        prior_precision = choose_least(PRECISIONS, lambda x: nll(x, start))
    if temperature is None:
        temperature = choose_least((1.0, *TEMPERATURES), lambda t: nll(prior_precision, t))
        at_one = nll(prior_precision, 1.0)
        gain = at_one - nll(prior_precision, temperature)
        if math.isfinite(at_one) and gain <= LESS * abs(at_one):
            temperature = 1.0
    return prior_precision, temperature


def choose_least(values: Sequence[float], cost: Callable[[float], float]) -> float:
    """Choose the value of the least cost; what is not finite is none.

    Raises:
        FedpaError: No cost is finite.
    """
    costs = {value: cost(value) for value in values}
    finite = [value for value in values if math.isfinite(costs[value])]
    if not finite:
        raise FedpaError(
            "no trial of the posterior's settings gives finite numbers: has the model diverged?"
        )
    return min(finite, key=costs.__getitem__)


def find_model(result: Fit | Run | Model, what: str) -> Model:
    """The model to start from; a private run's is refused, as clients would say more of it."""
    if not isinstance(result, Fit | Run):
        return result
    refuse_private(result.history if isinstance(result, Fit) else result.metrics, what)
    return result.params


def _given(likelihood: Likelihood, known: Any) -> Likelihood:
    """The likelihood as a function of some of a model's arrays, of which all else is known."""
    outputs = likelihood.outputs
    return likelihood._replace(outputs=lambda some, batch: outputs(eqx.combine(some, known), batch))


def _shapes_sent(compute: FisherOfClient, theta: Params, examples: Any) -> Any:
    return jax.eval_shape(lambda key: compute(theta, client_data(examples), key), jax.random.key(0))


def _choose_layer(
    model: Model, likelihood: Likelihood, data: FederatedData, structure: str, layer: str | None
) -> tuple[str, ...] | None:
    """Names of the last layer's parameters; None for all."""
    theta, rest = split_model(model)
    paths = _list_names(theta)
    if layer is not None:
        found = tuple(name for name in paths if name == layer or name.startswith(f"{layer}."))
        if not found:
            raise refuse("layer", layer, f"the model has {', '.join(paths[:20])}")
        return found

    given = _given(likelihood, rest)
    layers = find_layers(given.loss, theta, some_arrays(data))
    if not layers:
        raise refuse(
            "structure",
            structure,
            "needs the model to show its layers (fedpa.layer_input and fedpa.layer_output, "
            "docs/global_precision.md), and it shows none: give structure='last-layer' with "
            f"layer=, one of {', '.join(paths[:20])}; or 'diagonal' or 'low-rank'",
        )
    if structure == "kronecker":
        return None
    last = layers[-1]
    return tuple(paths[place] for place in (*last.weights, last.bias) if place is not None)


def some_arrays(data: FederatedData) -> Any:
    return jax.tree.map(jnp.asarray, some_examples(data))


def _list_names(theta: Params) -> list[str]:
    return [name_leaf(path) for path, _ in jax.tree_util.tree_leaves_with_path(theta)]


def _check_data(recorded: str, data: FederatedData) -> None:
    if recorded != data_fingerprint({"clients": data}):
        raise refuse(
            "clients",
            f"{len(data.ids)} clients",
            "are not those that the run was trained on, or their data has changed. Give the run's "
            "data, or result.params to ignore this",
        )


def _check_outputs(found: Layered, shown: Sequence[Layer], theta: Params) -> None:
    """Refuse or warn where layers show what enters them, but not what leaves them."""
    names = _list_names(theta)
    without = [names[layer.weights[0]] for layer in shown if layer not in found.layers]
    remedy = "show it by fedpa.layer_output (docs/global_precision.md, What leaves a layer)"
    if not found.layers:
        raise refuse("structure", "kronecker", f"no layer shows what leaves it: {remedy}")
    if without:
        warnings.warn(
            f"of {', '.join(without)} the diagonal is kept: the layers don't show what leaves "
            f"them; {remedy}",
            stacklevel=4,
        )
