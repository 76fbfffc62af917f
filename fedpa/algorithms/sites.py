"""Inference by sites, the rounds that Laplace, product, EP, PVI and SEP share.

The global posterior p(θ | D) ∝ p₀(θ) Π_i exp ℓ_i(θ) is approximated by a Gaussian

    q(θ) = p₀(θ) Π_i t_i(θ)

in which each client's likelihood has a Gaussian site in its place (`fedpa.sites`). In a round

    server → clients:  q, and θ, where to look
    client:            t_i ← its site, with its prior a *cavity*
    client → server:   the change of (η_i, Λ_i): sums of natural parameters, no example
    server:            η ← η + ε Σ_i δη_i,  Λ ← Λ + ε Σ_i δΛ_i,   ε the damping

The ways differ in the cavity alone:

    Laplace    none: t_i is ℓ_i's second-order expansion at θ, and the round a Newton step
    product    p₀^{n_i/n}: the client's own posterior with its share of the prior (eq. 3)
    EP, PVI    q / t_i: what the prior and all other clients say; the client keeps t_i
    SEP        q^{1 − n_i/n} p₀^{n_i/n}: the same for a typical client; nothing is kept

Newton rounds come first where all clients take part: sites then start from the Laplace
approximation, and what is left to iterate is how it differs from the answer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedpa.algorithms.fedopt import (
    Algorithm,
    ClientResult,
    ClientState,
    ClientUpdate,
    Reading,
)
from fedpa.errors import FedpaError, refuse
from fedpa.lapack import eigh
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.objectives.prior import NormalPrior
from fedpa.precision import narrow, ravel
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.gaussian import Gaussian, Structure, Vector, spread
from fedpa.server.aggregation import Aggregate, weighted_mean
from fedpa.server.schedules import Round as RoundNumber
from fedpa.sites.laplace import laplace as site_laplace
from fedpa.sites.sampled import sampled
from fedpa.sites.site import FindSite, Local, SiteInfo, linearize, localize, no_chains
from fedpa.sites.variational import variational
from fedpa.types import Key, Params, Scalar

NEWTON = "newton"
SITES = "sites"
NEWTON_ROUNDS = 10
DAMPING = 0.7
"""ε of EP, PVI and SEP, by default."""
LARGEST_DENSE = 2000
"""Parameters above which d×d matrices are refused."""


class Belief(NamedTuple):
    """What clients are sent."""

    theta: Params
    """Where to expand ℓ_i: q's mean, unless a Newton step was too long."""
    q: Gaussian
    """Over θ ravelled."""
    damping: Scalar
    """ε."""


class Change(NamedTuple):
    """What a client sends, per example: its weight is n_i."""

    site: Gaussian
    """The change of its site."""
    log_likelihood: Scalar
    """ℓ_i(θ)."""


class SiteState(NamedTuple):
    """What the server keeps."""

    theta: Params
    """Where clients expand their likelihoods; q's mean."""
    q: Gaussian
    """p₀ Π t_i."""
    damping: Scalar
    """ε, halved where a step would leave q no density."""
    best: Vector
    """The θ of the largest log-posterior that Newton rounds have seen."""
    value: Scalar
    """log p(θ | D) there."""


class SiteServerInfo(NamedTuple):
    skipped: Bool[Array, ""]
    """Whether q stayed as it was: the new one would be no density."""
    mean_change: Scalar
    """How far q's mean moved, in its standard deviations: the largest coordinate's, as without
    damping (unless that falls from round to round)."""
    sd_change: Scalar
    """By which share its standard deviations changed: the same."""
    damping: Scalar
    """ε."""
    log_posterior: Scalar
    """log p(θ | D) where clients looked, up to a constant."""


class ClientSiteInfo(NamedTuple):
    loss: Scalar
    """f_i(θ)."""
    rhat: Scalar
    ess: Scalar
    acceptance: Scalar
    divergent: Array
    """See `fedpa.sites.SiteInfo`."""
    indefinite: Bool[Array, ""]
    """Whether the client's site leaves no density."""


READING = Reading(
    reduce={"rhat": "max", "ess": "min", "divergent": "sum", "indefinite": "sum"},
    reasons={
        "indefinite": "its precision is not positive definite, or its log-likelihood not finite, "
        "at the present parameters: use other initial params, a stronger prior, or a likelihood "
        "without flat or convex regions",
        "skipped": "the posterior's precision is not positive definite: give a proper prior",
    },
)


class Cavity(NamedTuple):
    """What a way does differently."""

    of: Callable[[Gaussian, Gaussian, Gaussian, Scalar], Gaussian]
    """(q, t_i as the client or the server has it, p₀, n_i/n) → the client's prior."""
    keeps_site: bool
    """Whether clients keep t_i; else it is taken as the share (q / p₀)^{n_i/n}."""


def infer_by_sites(
    objective: Objective,
    find: FindSite | None,
    cavity: Cavity | None,
    structure: Structure,
    damping: float = 1.0,
    decay: float = 0.0,
    newton_rounds: int = 0,
) -> Algorithm:
    """Assemble the rounds.

    find: a client's site; None where all rounds are Newton's.
    decay: c ≥ 0 of ε/(1 + c k) in the k-th round after Newton's, from 0.
    newton_rounds: how many rounds come first in which sites are expansions at θ.
    """
    prior: Any = objective.prior
    if prior is not None and not isinstance(prior, NormalPrior):
        raise refuse("prior", prior, "must be normal: fedpa.normal_prior(sd=2.0)")
    if find is not None and not newton_rounds and (prior is None or not prior.is_proper):
        raise refuse("prior", prior, "must be proper: clients start from it; normal_prior(sd=2.0)")
    objective = objective._replace(prior=None)

    def prior_of(theta: Params) -> Gaussian:
        return as_gaussian(prior, theta, structure)

    def init(theta: Params) -> SiteState:
        wide, _ = ravel(theta)
        check_size(len(wide), structure)
        one = jnp.ones((), wide.dtype)
        return SiteState(theta, prior_of(theta), damping * one, wide, -jnp.inf * one)

    def share_of(data: ClientData, like: Array) -> Scalar:
        """n_i/n, of the dtype of `like`."""
        if objective.num_examples is None:
            raise refuse("num_examples", None, "must be given: fedpa.infer and fit do it")
        return data.n.astype(like.dtype) / jnp.asarray(objective.num_examples, like.dtype)

    def damping_at(state: SiteState, t: RoundNumber) -> Scalar:
        return state.damping / (1 + decay * jnp.maximum(jnp.asarray(t) - newton_rounds, 0))

    def held_by(message: Belief, data: ClientData, state: ClientState) -> Gaussian:
        """t_i as the server has it in q."""
        if cavity is not None and cavity.keeps_site:
            kept: Gaussian = state
            return kept
        share = share_of(data, message.q.eta)
        return message.q.divide(prior_of(message.theta)).power(share)

    def send(
        message: Belief,
        local: Local,
        old: Gaussian,
        new: Gaussian,
        damping: Scalar,
        looked: SiteInfo,
        indefinite: Bool[Array, ""],
        state: ClientState,
    ) -> ClientResult:
        n = jnp.maximum(local.data.n, 1).astype(new.eta.dtype)
        at, _ = ravel(message.theta)
        value = local.log_likelihood(at)
        indefinite |= ~jnp.isfinite(value)
        change = new.divide(old).power(damping)
        # What is indefinite is rejected: results that are not finite are.
        change = change._replace(eta=jnp.where(indefinite, jnp.nan, change.eta))
        kept = old.times(change) if cavity is not None and cavity.keeps_site else state
        info = ClientSiteInfo((-value / n).astype(jnp.float32), *looked, indefinite)
        return ClientResult(
            Change(change.power(1 / n), value / n), local.data.n.astype(jnp.float32), kept, info
        )

    def newton(message: Belief, data: ClientData, state: ClientState, key: Key) -> ClientResult:
        local = localize(objective, message.theta, data, jax.random.fold_in(key, 0))
        at, _ = ravel(message.theta)
        new = linearize(local, at, structure)
        share = prior_of(message.theta).power(share_of(data, at))
        one = jnp.ones((), at.dtype)
        return send(
            message,
            local,
            held_by(message, data, state),
            new,
            one,
            no_chains(),
            is_indefinite(new.times(share)),
            state,
        )

    def sites(message: Belief, data: ClientData, state: ClientState, key: Key) -> ClientResult:
        assert find is not None
        assert cavity is not None
        loss_key, find_key = jax.random.split(key)
        local = localize(objective, message.theta, data, loss_key)
        old = held_by(message, data, state)
        share = share_of(data, old.eta)
        own_prior = cavity.of(message.q, old, prior_of(message.theta), share)
        new, looked = find(local, own_prior, message.q, find_key)
        # Flat directions of the cavity are no harm: where the prior is flat, one client has them.
        improper = is_indefinite(own_prior, message.q) | ~own_prior.times(new).is_proper
        # A client without examples says nothing: t_i = 1.
        nothing = jax.tree.map(jnp.zeros_like, new), no_chains(), jnp.zeros_like(improper)
        new, looked, improper = jax.tree.map(
            lambda found, none: jnp.where(data.n > 0, found, none.astype(found.dtype)),
            (new, looked, improper),
            nothing,
        )
        return send(message, local, old, new, message.damping, looked, improper, state)

    def server(
        state: SiteState, aggregate: Aggregate, t: RoundNumber
    ) -> tuple[SiteState, SiteServerInfo]:
        p0 = prior_of(state.theta)
        keeps = cavity is not None and cavity.keeps_site
        everyone = jnp.asarray(objective.num_examples, state.value.dtype)
        # Sites that clients keep change as they say; else the cohort speaks for all.
        scale = aggregate.weight.astype(state.value.dtype) if keeps else everyone
        q = state.q.times(narrow(aggregate.mean.site, state.q).power(scale))
        at, restore = ravel(state.theta)
        value = everyone * aggregate.mean.log_likelihood.astype(at.dtype) + p0.log_density(at)
        is_newton = t < newton_rounds if find is not None else True
        # A Newton step that went too far: halfway back, and expand again there.
        tolerance = ROUNDING * jnp.abs(state.value)
        too_far = is_newton & (
            value < state.value - jnp.where(jnp.isfinite(tolerance), tolerance, 0)
        )
        mean = jnp.where(too_far, 0.5 * (at + state.best), q.mean)
        fine = (q.is_proper | too_far) & jnp.all(jnp.isfinite(mean)) & (aggregate.weight > 0)
        moved = jnp.max(jnp.abs(mean - at) / q.sd)
        old_sd = state.q.sd
        spread_by = jnp.max(jnp.abs(jnp.where(jnp.isfinite(old_sd), q.sd / old_sd, jnp.inf) - 1))
        # Where damping falls to 0, what matters is what a round still changes.
        undamped = 1 if decay else jnp.where(is_newton, 1, damping_at(state, t))
        new = SiteState(
            restore(mean),
            q,
            state.damping,
            jnp.where(too_far, state.best, at),
            jnp.where(too_far, state.value, value),
        )
        kept: SiteState = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, state)
        kept = kept._replace(damping=jnp.where(fine, state.damping, 0.5 * state.damping))
        return kept, SiteServerInfo(
            ~fine, moved / undamped, spread_by / undamped, damping_at(state, t), value
        )

    clients: dict[str, ClientUpdate] = {NEWTON: newton} if newton_rounds or find is None else {}
    if find is not None:
        clients[SITES] = sites

    def client_init(theta: Params) -> ClientState:
        if cavity is None or not cavity.keeps_site:
            return ()
        return jax.tree.map(jnp.zeros_like, prior_of(theta))

    return Algorithm(
        init=init,
        phase=lambda t: NEWTON if find is None or t < newton_rounds else SITES,
        broadcast=lambda state, t: Belief(state.theta, state.q, damping_at(state, t)),
        clients=clients,
        client_init=client_init,
        aggregation=weighted_mean(),
        server=server,
        parameters=lambda state: state.theta,
        reading=READING,
        is_state_required=cavity is not None and cavity.keeps_site,
    )


def as_gaussian(prior: NormalPrior | None, theta: Params, structure: Structure) -> Gaussian:
    """The prior over θ ravelled; flat, if there is none."""
    wide, _ = ravel(theta)
    if prior is None:
        return Gaussian(jnp.zeros_like(wide), spread(jnp.zeros_like(wide), structure))
    pulls, diagonal = prior.natural(theta)
    return Gaussian(pulls.astype(wide.dtype), spread(diagonal.astype(wide.dtype), structure))


ROUNDING = 1e-6
"""Share of the log-posterior by which it may fall from rounding alone."""
LEAST = 1e-4
"""A Λ whose least eigenvalue is below minus this share of its largest is indefinite."""


def is_indefinite(gaussian: Gaussian, scale: Gaussian | None = None) -> Bool[Array, ""]:
    """Whether Λ has an eigenvalue that is clearly negative, or is not finite.

    scale: whose largest eigenvalue says what is clearly; default: its own.
    """
    values = _eigenvalues(gaussian)
    largest = jnp.max(jnp.abs(values if scale is None else _eigenvalues(scale)))
    return ~(jnp.min(values) >= -LEAST * largest)


def _eigenvalues(gaussian: Gaussian) -> Vector:
    if isinstance(gaussian.precision, Diagonal):
        return gaussian.precision.values
    return eigh(gaussian.precision.matrix)[0]


def check_size(d: int, structure: Structure) -> None:
    """Refuse d×d matrices where they would be too large."""
    if structure == "dense" and d > LARGEST_DENSE:
        raise FedpaError(
            f"structure = 'dense': {d:,} parameters make matrices of {d:,} × {d:,}, and the most "
            f"is {LARGEST_DENSE:,}. structure='diagonal' fits"
        )


def check_structure(structure: Any) -> None:
    if structure not in get_args(Structure):
        raise refuse("structure", structure, "must be 'dense' or 'diagonal'")


def check_damping(damping: Any) -> None:
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 < damping <= 1:
        raise refuse("damping", damping, "must be in (0, 1]")


def inner_site(inner: Any, structure: Structure) -> FindSite:
    """A client's inference, by its name or as it is."""
    builders: dict[str, Callable[[], FindSite]] = {
        "nuts": lambda: sampled("nuts", structure),
        "hmc": lambda: sampled("hmc", structure),
        "laplace": lambda: site_laplace(structure),
        "variational": lambda: variational(structure),
    }
    if isinstance(inner, str) and inner in builders:
        return builders[inner]()
    if not callable(inner):
        raise refuse("inner", inner, f"must be one of {', '.join(builders)}, or of fedpa.sites")
    found: FindSite = inner
    return found
