"""`fedpa.infer`: the posterior of a model whose data stays with its clients."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from fedpa.algorithms.ep import ep, pvi
from fedpa.algorithms.laplace import laplace
from fedpa.algorithms.methods import Method
from fedpa.algorithms.product import product
from fedpa.algorithms.sep import sep
from fedpa.algorithms.sites import (
    DAMPING,
    NEWTON,
    NEWTON_ROUNDS,
    SITES,
    SiteState,
)
from fedpa.data.federated import Clients, FederatedData, as_federation
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import FedpaError, check_integer, check_takes, refuse
from fedpa.objectives.client_data import num_rows
from fedpa.objectives.objective import Objective
from fedpa.objectives.prior import NormalPrior
from fedpa.posterior.agreement import warn_of_disagreement
from fedpa.posterior.posterior import Posterior
from fedpa.precisions.gaussian import Structure
from fedpa.samplers.diagnostics import judge
from fedpa.sites.site import FindSite
from fedpa.training.callbacks import Answer, Callback, Event, Remembering, Stop
from fedpa.training.fit import fit
from fedpa.training.loading import load_checkpoint
from fedpa.training.loop import Fit
from fedpa.training.problem import some_examples, split_params
from fedpa.training.run import RecordingOptions
from fedpa.training.run_directory import read_run
from fedpa.types import Examples, Key, Losses, Model

Way = Literal["laplace", "product", "ep", "pvi", "sep"]
TOLERANCE = 0.02
"""Standard deviations by which a round may move the mean, and share by which it may change sds."""
ROUNDS = 60
SEP_DECAY = 0.5
LEAST_RETURNS = 2

LogLikelihood = Callable[[Model, Examples], Losses]
"""`log_likelihood(params, batch)`: one number per example."""


def infer(
    log_likelihood: LogLikelihood,
    params: Model,
    clients: Clients,
    *,
    prior: NormalPrior | None = None,
    method: Way = "ep",
    inner: str | FindSite | None = None,
    structure: Structure = "dense",
    rounds: int = ROUNDS,
    clients_per_round: int | None = None,
    damping: float = DAMPING,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    engine: Engine | OfAlgorithm | None = None,
    min_success: float = 1.0,
    out: str | Path | None = None,
    recording: RecordingOptions = RecordingOptions(),
    progress: bool = True,
) -> Posterior:
    """Infer the global posterior p(θ | D) ∝ p(θ) Π_i exp ℓ_i(θ), as a Gaussian.

    Clients send sums or natural parameters of Gaussians, no example. Rounds end by the convergence
    rule: a round moves no parameter's mean by more than `tolerance` of its standard deviations, nor
    changes one of those by more than that share, twice in a row (once for Laplace, whose tolerance
    is at most 0.001; in as many rounds as meet all clients where a round has some of them). If it
    does not hold after `rounds`, a warning says so, and `converged` is False.

    Args:
        log_likelihood: `log_likelihood(params, batch)`: log p(z_j | θ) of each example, shape (b,).
        params: Any pytree: its structure, and where to start. Floating-point arrays are inferred.
        clients: Client id → a pytree of arrays whose first axis counts examples; or a
            `FederatedData`.
        prior: `fedpa.normal_prior(sd=2.0)`, counted once; default: flat.
        method: "ep" (expectation propagation), "pvi" (partitioned variational inference), "sep" (EP
            without client state, for clients that may not return), "laplace", or "product" (of
            client posteriors, eq. 3, in one round). `docs/posterior.md` says which when.
        inner: A client's inference: "nuts" (the default), "hmc", "laplace" or "variational"; or one
            of `fedpa.sites`. PVI's is variational, and "laplace" has none.
        structure: "dense" precisions, of at most 2,000 parameters, or "diagonal".
        rounds: At most, ≥ 1; where EP, PVI or SEP begin with ten Newton rounds (all clients take
            part), more than these.
        clients_per_round: Default: all. Fewer for EP and PVI, if clients return, and for SEP.
        damping: Which part of a site's change is made in a round, in (0, 1].
        tolerance: Of the convergence rule, > 0.
        seed: One seed, one result, bit for bit.
        callbacks: Called after every round, as in `fedpa.fit`.
        engine: Where clients run; default: `fedpa.engines.local()`.
        min_success: Share of a round's clients that must succeed; default: all.
        out: The run's directory: it is recorded there, resumed if it was interrupted, and returned
            if it is finished; default: nothing is recorded.
        recording: As in `fedpa.fit`.
        progress: Whether rounds are shown on stderr.
    Returns:
        The posterior: `mean`, `sd`, `covariance()`, `sample(key, num)`, `predict(f, x, key)`.
    Raises:
        FedpaError: Arguments don't fit together; a client fails, or its precision is not positive
            definite (named).
    Example:
        >>> import fedpa
        >>> rng = np.random.default_rng(0)
        >>> clients = {name: {"y": rng.normal(3.0, 1.0, 20)} for name in ("a", "b")}
        >>> posterior = fedpa.infer(lambda mu, batch: -0.5 * (batch["y"] - mu) ** 2, np.zeros(()),
        ...                         clients, prior=fedpa.normal_prior(sd=10.0), method="laplace",
        ...                         progress=False)
        >>> round(float(posterior.sd), 3)
        0.158
    """
    data = as_federation(clients)
    check_integer("rounds", rounds, 1)
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise refuse("tolerance", tolerance, "must be a number > 0")
    check_per_example("log_likelihood", log_likelihood, params, data)
    everyone = len(data.ids)
    cohort = everyone if clients_per_round is None else clients_per_round
    check_integer("clients_per_round", cohort, 1)
    if cohort < everyone and method in ("laplace", "product"):
        raise refuse(
            "clients_per_round",
            cohort,
            f"method='{method}' needs all {everyone:,} in a round; method='sep' takes fewer",
        )
    is_partial = cohort < everyone
    newton_rounds = NEWTON_ROUNDS if method in ("ep", "pvi", "sep") and not is_partial else 0
    if rounds <= newton_rounds:
        raise refuse(
            "rounds",
            rounds,
            f"method='{method}' begins with {newton_rounds} Newton rounds: give more, or "
            "method='laplace'",
        )
    built = _build(method, inner, structure, damping, newton_rounds, is_partial)
    if is_partial and method in ("ep", "pvi") and rounds * cohort < LEAST_RETURNS * everyone:
        raise refuse(
            "method",
            method,
            f"keeps a site at each client, so clients must return: {rounds} rounds of {cohort} "
            f"clients reach each of {everyone:,} clients {rounds * cohort / everyone:.2g} times on "
            f"average, and {LEAST_RETURNS} are needed. Give more rounds, or method='sep'",
        )
    tolerance = min(tolerance, LAPLACE_TOLERANCE) if method == "laplace" else tolerance
    stop = stop_when_converged(
        tolerance,
        1 if method == "laplace" else max(2, math.ceil(everyone / cohort)),
        method == "laplace",
    )
    result = fit(
        as_objective(log_likelihood, prior),
        params,
        data,
        built,
        rounds=1 if method == "product" else rounds,
        clients_per_round=min(cohort, everyone),
        seed=seed,
        callbacks=[*callbacks, *([] if method == "product" else [stop])],
        engine=engine,
        min_success=min_success,
        out=out,
        recording=recording,
        progress=progress,
    )
    posterior = from_fit(result, params)
    if method != "product" and not _is_converged(result):
        posterior = posterior._replace(converged=False)
        last, count = result.history[-1], len(result.history)
        rounds_made = "1 round" if count == 1 else f"{count} rounds"
        warnings.warn(
            f"not converged after {rounds_made}: the last would move the mean by "
            f"{last['train/mean_change']:.2g} standard deviations and change those by "
            f"{last['train/sd_change']:.2%} (tolerance = {tolerance}); give more rounds",
            stacklevel=2,
        )
    warn_of_disagreement(posterior)
    return posterior


LAPLACE_TOLERANCE = 1e-3
CONVERGED = "converged"
MOST_RHAT = 1.05
"""Of client chains."""


def from_fit(result: Fit, params: Model) -> Posterior:
    """Make the posterior of a run of `laplace`, `product`, `ep`, `pvi` or `sep`.

    Warns if the last round's chains say that its sites can't be trusted: by the rule of
    `fedpa.samplers.judge`, with R̂ up to 1.05. Four chains of 250 independent draws exceed its 1.01
    by chance, and a site is a regression on the draws, far less noisy than their moments.

    Args:
        result: From `fedpa.fit`, with one of these methods.
        params: The model as it was given to it.
    Returns:
        The posterior.
    Example:
        >>> import fedpa
        >>> loss = lambda mu, batch, key: 0.5 * (batch - mu) ** 2
        >>> objective = fedpa.Objective(loss, prior=fedpa.normal_prior(sd=1.0))
        >>> result = fedpa.fit(objective, np.zeros(()), {"a": np.ones(3)},
        ...                    fedpa.algorithms.laplace(), rounds=1, clients_per_round=1,
        ...                    progress=False)
        >>> float(from_fit(result, np.zeros(())).mean)
        0.75
    """
    if not isinstance(result.state, SiteState):
        raise refuse("result", result, "must be of laplace, product, ep, pvi or sep")
    last = result.history[-1]
    rhat, ess = last["train/rhat"], last["train/ess"]
    if rhat == 1 and math.isnan(ess):  # no chains, ESS = ∞: files have no infinity
        ess = math.inf
    found = rhat, ess, int(last["train/divergent"])
    for sentence in judge(*found, most_rhat=MOST_RHAT):
        warnings.warn(f"client chains of round {last['round']}: {sentence}", stacklevel=2)
    return Posterior(
        result.state.q,
        params,
        dict(result.client_states),
        result.history,
        converged=_is_converged(result) or (len(result.history) == 1 and last["phase"] == SITES),
    )


def _is_converged(result: Fit) -> bool:
    """Whether the convergence rule ended the rounds."""
    return str(result.stopped or "").startswith(CONVERGED)


def from_run(directory: str | Path, params: Model) -> Posterior:
    """Make the posterior of a recorded run of these methods, e.g. over Flower.

    One that is not finished is as far as its last checkpoint. Sites stay with the clients: the
    posterior has none.

    Args:
        directory: The run's directory: `out` of `fedpa.fit`, `fedpa.infer` and Flower's server.
        params: The model as it was given, or any of its structure.
    Returns:
        The posterior.
    Raises:
        FedpaError: The directory contains no such run, or `params` is another model.
    Example:
        >>> import tempfile, fedpa
        >>> loss = lambda mu, batch, key: 0.5 * (batch - mu) ** 2
        >>> objective = fedpa.Objective(loss, prior=fedpa.normal_prior(sd=1.0))
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = fedpa.fit(objective, np.zeros(()), {"a": np.ones(3)},
        ...                        fedpa.algorithms.laplace(), rounds=1, clients_per_round=1,
        ...                        out=out, progress=False)
        ...     float(from_run(out, np.zeros(())).mean)
        0.75
    """
    recorded = read_run(Path(directory))
    ways = get_args(Way)
    if recorded.settings.get("method") not in ways:
        raise refuse(
            "directory",
            str(directory),
            f"must contain a run of {', '.join(ways[:-1])} or {ways[-1]}",
        )
    structure = recorded.settings["hyperparameters"]["structure"]
    theta, _ = split_params(params)
    # What the server keeps is of one form, whichever the method.
    like = laplace(structure=structure)(Objective(lambda *_: jnp.zeros(0))).init(theta)
    checkpoint = load_checkpoint(directory, like=like)
    stopped = (recorded.summary or {}).get("stopped")
    return from_fit(Fit(params, checkpoint.history, checkpoint.state, stopped), params)


def as_objective(log_likelihood: LogLikelihood, prior: Any) -> Objective:
    """What clients minimize: minus the log-likelihood, and the prior once."""

    def loss(model: Model, batch: Examples, key: Key) -> Losses:
        return -log_likelihood(model, batch)

    return Objective(loss, prior=prior)


def _build(
    method: Any,
    inner: Any,
    structure: Any,
    damping: Any,
    newton_rounds: int,
    is_partial: bool,
) -> Method:
    """The method by its name; each checks its settings."""
    if inner is not None and method == "laplace":
        raise refuse("inner", inner, "Laplace's way has no inner inference: leave it out")
    if inner not in (None, "variational") and method == "pvi":
        raise refuse("inner", inner, "PVI's is variational; method='ep' takes any")
    inner = "nuts" if inner is None else inner
    ways: Mapping[str, Callable[[], Method]] = {
        "laplace": lambda: laplace(structure=structure),
        "product": lambda: product(inner=inner, structure=structure),
        "ep": lambda: ep(
            inner=inner, structure=structure, damping=damping, newton_rounds=newton_rounds
        ),
        "pvi": lambda: pvi(structure=structure, damping=damping, newton_rounds=newton_rounds),
        "sep": lambda: sep(
            inner=inner,
            structure=structure,
            damping=damping,
            decay=SEP_DECAY if is_partial else 0.0,
            newton_rounds=newton_rounds,
        ),
    }
    if method not in ways:
        raise refuse("method", method, f"must be one of {', '.join(ways)}")
    return ways[method]()


def check_per_example(field: str, function: Any, params: Model, data: FederatedData) -> None:
    """Refuse a function of (params, batch) that does not return one number per example."""
    check_takes(field, function, "(params, batch)")
    batch = jax.tree.map(jnp.asarray, some_examples(data))
    size = num_rows(batch)
    theta, assemble = split_params(params)
    found = jax.eval_shape(lambda theta, batch: function(assemble(theta), batch), theta, batch)
    shape = getattr(found, "shape", None)
    if shape != (size,) or not jnp.issubdtype(found.dtype, jnp.floating):
        kind = "None" if found is None else f"a {type(found).__name__}"
        what = kind if shape is None else f"{found.dtype} of shape {shape}"
        raise FedpaError(
            f"{field} returns {what} for a batch of {size}: it must return one floating-point "
            f"number per example, shape ({size},)"
        )


def stop_when_converged(
    tolerance: float = TOLERANCE, in_a_row: int = 2, in_newton: bool = False
) -> Remembering:
    """Make the convergence rule of `fedpa.infer`, a callback that ends a run.

    Args:
        tolerance: Standard deviations by which a round may move the mean of q, and share by which
            it may change its standard deviations, > 0.
        in_a_row: How many rounds must be so.
        in_newton: Whether Newton rounds count: True for `laplace`, which has no others.
    Returns:
        The callback, for `fedpa.fit` and `fedpa.flower.make_run`.
    Example:
        >>> import fedpa
        >>> loss = lambda mu, batch, key: 0.5 * (batch - mu) ** 2
        >>> result = fedpa.fit(loss, np.zeros(()), {"a": np.ones(3)}, fedpa.algorithms.laplace(),
        ...                    rounds=9, clients_per_round=1, progress=False,
        ...                    callbacks=[stop_when_converged(in_newton=True)])
        >>> len(result.history)
        3
    """

    def update(count: int, event: Event) -> tuple[int, Answer]:
        record = event.record
        counts = record["phase"] != NEWTON or in_newton
        calm = (
            counts
            and not record["train/skipped"]
            and record["train/mean_change"] <= tolerance
            and record["train/sd_change"] <= tolerance
        )
        count = count + 1 if calm else 0
        if count < in_a_row:
            return count, None
        return count, Stop(
            f"{CONVERGED}: a round moves the mean by {record['train/mean_change']:.2g} sd"
        )

    return Remembering("convergence", 0, update)
