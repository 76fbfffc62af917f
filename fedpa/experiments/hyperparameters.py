"""Every method's settings as plain values: one set for the command line and for config files.

Nothing here imports JAX: `fedpa --help` and `fedpa methods` show settings without it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import fedpa
from fedpa.errors import check_integer, check_number, check_positive, find_name, match_name, refuse

if TYPE_CHECKING:
    from fedpa.algorithms.local_training import LocalTraining, SamplerFactory
    from fedpa.objectives import Objective
    from fedpa.samplers import Sampler
    from fedpa.server import Server
    from fedpa.server.schedules import Schedule


S = TypeVar("S")


class NamedSampler(NamedTuple):
    """A sampler of `fedpa.samplers`, by its name there."""

    summary: str
    takes: tuple[str, ...] = ()
    """Its own settings."""
    minibatches: bool = True
    """False: every step is over all of the client's data."""
    defaults: tuple[tuple[str, int], ...] = ()
    """Settings for FedPA that differ from the function's own, which are for a posterior alone."""


SAMPLERS = {
    "iasg": NamedSampler("averages of SGD iterates (the paper)"),
    "sgld": NamedSampler("SGD with Langevin noise", ("temperature",)),
    "sghmc": NamedSampler("SGD with momentum and noise", ("temperature", "friction")),
    "hmc": NamedSampler(
        "Hamiltonian Monte Carlo on full gradients",
        ("temperature", "integration_steps", "target_acceptance"),
        minibatches=False,
        # L steps travel from θ₀ L²/2 times as far as one step of SGD, too far for FedPA's rates.
        defaults=(("integration_steps", 2),),
    ),
    "nuts": NamedSampler(
        "the no-U-turn sampler on full gradients",
        ("temperature", "max_doublings", "target_acceptance"),
        minibatches=False,
        # Where the data leave directions flat, a trajectory finds no turn and takes all doublings.
        defaults=(("max_doublings", 3),),
    ),
}
SAMPLER_FIELDS = tuple(dict.fromkeys(name for one in SAMPLERS.values() for name in one.takes))
"""Settings of some samplers; unset for other samplers."""
COVARIANCE_FIELDS = ("rho", "shrinkage", "shrinkage_target", "sample_scale", "delta_form")
"""Settings of the posterior delta."""
SWITCH_FIELDS = ("burn_in_rounds", "plateau_window", "plateau_metric")
"""When clients begin to draw samples, and `at_switch_rate` is applied."""
SAMPLING_FIELDS = (*COVARIANCE_FIELDS, "sampler", *SAMPLER_FIELDS)
"""Settings of rounds in which clients draw samples: methods that draw none don't read them."""
PLATEAU_METRIC = "train/loss"
APPLIES_TO = {
    "rho": ("shrinkage", ("fixed",)),
    "plateau_window": ("burn_in_rounds", ("auto",)),
    "plateau_metric": ("burn_in_rounds", ("auto",)),
    "client_momentum": ("client_optimizer", ("sgd",)),
    "server_momentum": ("server_optimizer", ("sgd",)),
    "server_b1": ("server_optimizer", ("adam", "yogi")),
    "server_b2": ("server_optimizer", ("adam", "yogi")),
    "server_tau": ("server_optimizer", ("adam", "adagrad", "yogi")),
}
"""Setting → the choice, and those of its values, with which it is read."""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The settings of a method. Each task has its own defaults."""

    epochs: int = 5
    """Local epochs per round, at least 1 (M in fedpa methods)."""
    batch_size: int = 20
    """Examples per local step, at least 1."""
    burn_in_rounds: int | Literal["auto"] = 0
    """Rounds of FedAvg before FedPA samples, at least 0; auto: until FedAvg's plateau."""
    plateau_window: int | None = None
    """burn-in-rounds auto: rounds w whose mean is compared with that of the w rounds before, at
    least 2; auto ends burn-in after 3w − 1 rounds at the earliest (default: 10)."""
    plateau_metric: str | None = None
    """burn-in-rounds auto: train/loss, or a metric of the evaluation, valid/loss (default:
    train/loss)."""
    at_switch_rate: float | None = None
    """Factor > 0 on the server's learning rate from the switch on, that is from round
    --burn-in-rounds, for every method (default: none)."""
    samples: int | None = None
    """Posterior samples of a client per round, ℓ ≥ 1 (default: one per epoch)."""
    rho: float = 0.1
    """Shrinkage ρ ≥ 0: 0 replaces the covariance by the identity; larger ρ trusts the samples more
    (Theorem 3 of the FedPA paper)."""
    burn_in_epochs: int | None = None
    """Local epochs before the first sample of a round, at least 0 (default: 0)."""
    steps_per_sample: int | None = None
    """Local steps per sample, K ≥ 1 of Algorithm 4. Needs --samples (default: one epoch)."""
    burn_in_steps: int = 0
    """Local steps before the first sample, B ≥ 0 of Algorithm 4. Needs --steps-per-sample."""
    discard_steps: int = 0
    """Local steps left out before each sample, at least 0. Needs --steps-per-sample."""
    shrinkage: Literal["fixed", "oas", "rblw"] = "fixed"
    """How ρ is chosen: fixed takes --rho, oas and rblw estimate it from each client's samples."""
    shrinkage_target: Literal["identity", "scaled"] = "identity"
    """What the covariance S is shrunk towards: identity is I (the paper), scaled is (tr S/d) I."""
    sample_scale: Literal["auto", "none", "sqrt-n"] | float = "auto"
    """Factor on the samples' deviations from their mean: none is 1, sqrt-n is √n_i, auto is 1 for
    iasg (the paper) and √(n_i/T) for samplers with a temperature, or a number > 0."""
    delta_form: Literal["auto", "gram", "recurrence"] = "auto"
    """Algorithm for the posterior delta. The result is the same up to rounding."""
    order: Literal["shuffle", "replacement"] = "shuffle"
    """Mini-batches: shuffle goes through all examples each epoch, replacement draws at random."""
    sampler: str = dataclasses.field(
        default="iasg",
        metadata={
            "value": "NAME",
            "help": "How clients sample their posteriors: "
            + "; ".join(f"{name}: {sampler.summary}" for name, sampler in SAMPLERS.items()),
        },
    )
    temperature: float | Literal["n"] | None = None
    """Temperature T > 0 of the sampled posterior p ∝ exp(−(n_i/T) f_i); n means n_i. Larger
    models need a lower one. All samplers but iasg (default: 0.01)."""
    friction: float | None = None
    """sghmc: friction α = 1 − momentum, in (0, 1] (default: 0.5)."""
    integration_steps: int | None = None
    """hmc: leapfrog steps per transition, at least 1 (default: 2)."""
    max_doublings: int | None = None
    """nuts: a trajectory has at most 2^N leapfrog steps, N ≥ 1 (default: 3)."""
    target_acceptance: float | None = None
    """hmc, nuts: acceptance rate in (0, 1) to which burn-in adapts the step size (default: no
    adaptation)."""
    client_optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of the clients' local steps."""
    client_learning_rate: float = 0.01
    """Learning rate of the clients' local steps, > 0."""
    client_momentum: float = 0.0
    """Momentum of the clients' SGD, in [0, 1)."""
    client_schedule: str = "constant"
    """Factor on the clients' learning rate by round: constant, exponential:DECAY[:EVERY],
    inverse-time[:SCALE], inverse-sqrt[:SCALE], or step:ROUND:FACTOR from a round on (counted from
    0); append ,warmup:ROUNDS for a linear start."""
    server_optimizer: Literal["sgd", "adam", "adagrad", "yogi"] = "sgd"
    """Optimizer of the server."""
    server_learning_rate: float = 1.0
    """Learning rate of the server, > 0."""
    server_momentum: float = 0.0
    """Momentum of the server's SGD, in [0, 1)."""
    server_b1: float = 0.9
    """β₁ of the server's adam or yogi, in [0, 1)."""
    server_b2: float = 0.99
    """β₂ of the server's adam or yogi, in [0, 1)."""
    server_tau: float = 1e-3
    """τ ≥ 0 of the server's adam, adagrad or yogi."""
    server_schedule: str = "constant"
    """Factor on the server's learning rate by round, written like --client-schedule."""
    weighting: Literal["examples", "uniform"] = "examples"
    """Client weights q_i: the number of examples, or the same for all."""
    aggregation: str = "weighted-mean"
    """How the results of a round's clients become one: weighted-mean, or robust to clients that
    lie: clipped-mean:BOUND, centered-clipping[:BOUND], trimmed-mean:SHARE (of each end, below 0.5),
    median, geometric-median, multi-krum:MALICIOUS (how many), bucketing:SIZE:AGGREGATION."""
    iterate_averaging: str = "none"
    """Evaluate an average of the server's iterates: none, polyak[:START], exponential:DECAY,
    last-two, swag[:START[:RANK]] (of which fedpa posterior makes SWAG's posterior)."""
    # Settings of single methods, which name them in `NamedMethod.takes`: None for all others.
    proximal: float | None = None
    """fedprox: μ ≥ 0 of the clients' objective f_i(θ) + μ/2 ‖θ − θ₀‖² (default: 0.01)."""
    fedexp_epsilon: float | None = None
    """fedexp: ε ≥ 0 of the step length Σ‖Δ_i‖² / (2M(‖Δ̄‖² + ε)) (default: 0.001)."""
    local_epsilon: float | None = None
    """local-precision: damping ε > 0 of the clients' own precision, in units of the inputs' mean
    square (default: 5)."""
    numerator: Literal["fedavg", "fedpa", "local-precision", "mean", "mb-sgd"] | None = None
    """global-precision: method whose mean delta is divided by the precision (default: fedavg)."""
    precision_start: int | None = None
    """global-precision: rounds at the start in which clients send sketches, at least 1 (default:
    3)."""
    precision_every: int | None = None
    """global-precision: rounds between two sketches after the start, k ≥ 1 (default: 20)."""
    precision_filter: Literal["ridge", "saturating"] | None = None
    """global-precision: gains of steep and flat directions (default: ridge)."""
    precision_epsilon: float | None = None
    """global-precision: ε > 0. ridge: directions far flatter than ε times the inputs' mean square
    keep gain 1 (default: 5); saturating: flat directions have gain 1/ε (default: 0.03)."""
    precision_kappa: float | None = None
    """global-precision: κ > 0 of the saturating filter, local progress in a direction as steep as
    the inputs' mean square (default: 0.05)."""
    precision_length: float | None = None
    """global-precision: ρ ≥ 0, the step's length relative to the clients' own; 0: the server's rate
    decides (default: 1.4)."""
    precision_decay: float | None = None
    """global-precision: weight β in [0, 1) of the old precision, for each round between sketches
    (default: 0.95)."""
    precision_block: int | None = None
    """global-precision: largest block; the precision of a larger layer is block-diagonal (default:
    2048)."""
    precision_rank: int | Literal["exact"] | None = None
    """global-precision: columns of the sketch that clients send, at least 1; exact sends the full
    matrix (default: as many as the layer has outputs)."""

    def __post_init__(self) -> None:
        """Spell the sampler as it is known; `resolve_hyperparameters` refuses an unknown one."""
        if isinstance(self.sampler, str):
            spelled = match_name(self.sampler, SAMPLERS) or self.sampler
            object.__setattr__(self, "sampler", spelled)


def resolve_hyperparameters(h: Hyperparameters) -> Hyperparameters:
    """Check every value and fill in what follows from others (the number of samples)."""
    for name in ("client_learning_rate", "server_learning_rate"):
        value = getattr(h, name)
        if not (math.isfinite(value) and value > 0):
            raise refuse(name, value, "must be a finite number > 0")
    for name in ("client_momentum", "server_momentum", "server_b1", "server_b2"):
        if not 0 <= getattr(h, name) < 1:
            raise refuse(name, getattr(h, name), "must be in [0, 1)")
    check_number("rho", h.rho)
    check_number("server_tau", h.server_tau)
    h = _resolve_switch(h)
    if h.server_optimizer != "sgd" and h.server_momentum:
        raise refuse("server_momentum", h.server_momentum, "applies to server_optimizer sgd only")
    if h.client_optimizer == "adam" and h.client_momentum:
        raise refuse("client_momentum", h.client_momentum, "applies to client_optimizer sgd only")
    if h.delta_form == "recurrence" and (h.shrinkage, h.shrinkage_target) != ("fixed", "identity"):
        expected = "commits to ρ early: needs a fixed ρ and the identity target"
        raise refuse("delta_form", h.delta_form, expected)
    from fedpa.algorithms.local_training import local_work
    from fedpa.deltas.posterior import check_sample_scale
    from fedpa.samplers.sampler import COLD

    check_sample_scale(h.sample_scale)
    chosen = SAMPLERS[find_name("sampler", h.sampler, SAMPLERS)]
    if "temperature" in chosen.takes:
        h = fill_missing(h, temperature=COLD)
    _check_sampler(h, chosen)
    build_server(h)
    return dataclasses.replace(h, samples=local_work(build_local(h)).samples)


def _resolve_switch(h: Hyperparameters) -> Hyperparameters:
    if h.at_switch_rate is not None:
        check_positive("at_switch_rate", h.at_switch_rate)
    if h.burn_in_rounds == "auto":
        h = fill_missing(h, plateau_window=10, plateau_metric=PLATEAU_METRIC)
        check_integer("plateau_window", h.plateau_window, 2)
        return h
    check_integer("burn_in_rounds", h.burn_in_rounds, 0)
    for name in ("plateau_window", "plateau_metric"):
        if getattr(h, name) is not None:
            raise refuse(name, getattr(h, name), "applies to burn_in_rounds auto only")
    return h


def count_plateau_values(h: Hyperparameters, rounds: int, eval_every: int) -> tuple[int, int]:
    """How many values the rule of burn-in `auto` has before the last round, and needs at least."""
    assert h.plateau_window is not None
    assert h.plateau_metric is not None
    is_trained = h.plateau_metric.startswith("train/")
    return (rounds - 1) // (1 if is_trained else eval_every), 3 * h.plateau_window - 1


def check_switch(h: Hyperparameters, rounds: int, eval_every: int) -> None:
    """Refuse what would happen after the last round of a run."""
    from fedpa.server import schedules

    for name in ("client_schedule", "server_schedule"):
        if schedules.cut(getattr(h, name), rounds) != getattr(h, name):
            expected = f"the step's round must be below rounds = {rounds}: lower it"
            raise refuse(name, getattr(h, name), expected)
    switch = h.burn_in_rounds
    if switch == "auto":
        values, least = count_plateau_values(h, rounds, eval_every)
        if values < least:
            expected = (
                f"a plateau takes {least} values of {h.plateau_metric}, and rounds = {rounds} give "
                f"{values} before the last: shorten the window or raise rounds"
            )
            raise refuse("plateau_window", h.plateau_window, expected)
    if h.at_switch_rate is not None and switch != "auto" and not 0 < switch < rounds:
        expected = f"needs a switch, but burn_in_rounds = {switch}: give 1 to {rounds - 1}, or auto"
        raise refuse("at_switch_rate", h.at_switch_rate, expected)


def list_sampling_fields(h: Hyperparameters) -> tuple[str, ...]:
    """The settings that a method which draws no samples does not read."""
    return SAMPLING_FIELDS if h.at_switch_rate is not None else (*SWITCH_FIELDS, *SAMPLING_FIELDS)


def fill_missing(h: Hyperparameters, **own: Any) -> Hyperparameters:
    """Fill settings that are None with these values."""
    missing = {name: value for name, value in own.items() if getattr(h, name) is None}
    return dataclasses.replace(h, **missing)


def _check_sampler(h: Hyperparameters, chosen: NamedSampler) -> None:
    """Refuse settings that do not apply to the sampler, and invalid values."""
    for name in SAMPLER_FIELDS:
        if getattr(h, name) is not None and name not in chosen.takes:
            takers = ", ".join(other for other, one in SAMPLERS.items() if name in one.takes)
            expected = f"does not apply to sampler {h.sampler}; only to {takers}"
            raise refuse(name, getattr(h, name), expected)
    factory = build_sampler(h)
    if factory is None:
        return
    for name, plain in [("client_optimizer", "sgd"), ("client_momentum", 0.0)]:
        if getattr(h, name) != plain:
            raise refuse(name, getattr(h, name), f"applies to sampler iasg only, not {h.sampler}")
    if not chosen.minibatches and h.order != "shuffle":
        raise refuse("order", h.order, f"does not apply to sampler {h.sampler}, which takes all")
    factory(fedpa.Objective(lambda params, batch, key: batch), 1.0)


def replace_fields(settings: S, **fields: Any) -> S:
    """Replace fields, also in nested dataclasses.

    Fields that it does not have are ignored.
    """
    changes = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = replace_fields(value, **fields)
        elif field.name in fields:
            changes[field.name] = fields[field.name]
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]


def unset(h: Hyperparameters, fields: Sequence[str]) -> Hyperparameters:
    """Reset fields to their defaults."""
    plain = Hyperparameters()
    return dataclasses.replace(h, **{name: getattr(plain, name) for name in fields})


def applies(h: Hyperparameters, field: str) -> bool:
    """Whether the chosen optimizers, sampler and rule read a setting."""
    if field in SAMPLER_FIELDS and h.sampler in SAMPLERS:
        return field in SAMPLERS[h.sampler].takes
    chooser, choices = APPLIES_TO.get(field, ("", ()))
    return not chooser or getattr(h, chooser) in choices


def build_sampler(h: Hyperparameters) -> "SamplerFactory | None":
    """The sampler that `sampler` names; None for IASG, which local training itself is."""
    from fedpa.algorithms.local_training import local_work

    if h.sampler == "iasg":
        return None
    chosen, build = SAMPLERS[h.sampler], getattr(fedpa.samplers, h.sampler)
    own: dict[str, Any] = dict(chosen.defaults)
    own |= {name: getattr(h, name) for name in chosen.takes if getattr(h, name) is not None}
    if chosen.minibatches:
        own |= {"batch_size": h.batch_size, "order": h.order}
    window = local_work(build_local(h)).window

    def factory(objective: "Objective", rate: Any) -> "Sampler":
        made: Sampler = build(objective, h.client_learning_rate * rate, window=window, **own)
        return made

    return factory


def build_local(h: Hyperparameters) -> "LocalTraining":
    """The client's side: ClientOpt and how much local work there is."""
    import optax

    optimizer: Any = h.client_learning_rate  # plain SGD
    if h.client_optimizer == "adam":
        optimizer = optax.adam(h.client_learning_rate)
    elif h.client_momentum:
        optimizer = optax.sgd(h.client_learning_rate, momentum=h.client_momentum)
    return fedpa.LocalTraining(
        optimizer,
        batch_size=h.batch_size,
        epochs=h.epochs,
        samples=h.samples,
        burn_in_epochs=h.burn_in_epochs,
        steps_per_sample=h.steps_per_sample,
        burn_in_steps=h.burn_in_steps,
        discard_steps=h.discard_steps,
        order=h.order,
        schedule=fedpa.server.schedules.parse(h.client_schedule, "client_schedule"),
    )


def build_server(h: Hyperparameters) -> "Server":
    """The server's side: ServerOpt, weights, schedule and averaging."""
    server, rate = fedpa.server, h.server_learning_rate
    match h.server_optimizer:
        case "sgd":
            optimizer = server.sgd(rate, h.server_momentum)
        case "adam":
            optimizer = server.adam(rate, h.server_tau, h.server_b1, h.server_b2)
        case "adagrad":
            optimizer = server.adagrad(rate, h.server_tau)
        case "yogi":
            optimizer = server.yogi(rate, h.server_tau, h.server_b1, h.server_b2)
    return fedpa.Server(
        optimizer,
        h.weighting,
        server.averaging.parse(h.iterate_averaging),
        _build_server_schedule(h),
        server.parse_aggregation(h.aggregation),
    )


def _build_server_schedule(h: Hyperparameters) -> "Schedule":
    schedules = fedpa.server.schedules
    schedule = schedules.parse(h.server_schedule, "server_schedule")
    # With auto, the round of the switch comes with it: see `build_method`.
    if h.at_switch_rate is None or h.burn_in_rounds == "auto":
        return schedule
    at_switch = schedules.step(h.burn_in_rounds, h.at_switch_rate)
    return lambda t: schedule(t) * at_switch(t)
