"""Every method's settings as plain values: one set for the command line and for config files.

Nothing here imports JAX: `fedpa --help` and `fedpa methods` show settings without it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import fedpa
from fedpa.errors import check_integer, check_number, find_name, match_name, refuse

if TYPE_CHECKING:
    from fedpa.algorithms.local_training import LocalTraining, SamplerFactory
    from fedpa.objectives import Objective
    from fedpa.samplers import Sampler
    from fedpa.server import Server


S = TypeVar("S")


class NamedSampler(NamedTuple):
    """A sampler of `fedpa.samplers`, by its name there."""

    summary: str
    takes: tuple[str, ...] = ()
    """The settings of its own that apply to it."""
    minibatches: bool = True
    """False: every step is over all of the client's data."""


SAMPLERS = {
    "iasg": NamedSampler("averages of local SGD's iterates (the paper's)"),
    "sgld": NamedSampler("local SGD with Langevin noise", ("temperature",)),
    "sghmc": NamedSampler("SGD with momentum and noise", ("temperature", "friction")),
    "hmc": NamedSampler(
        "Hamiltonian Monte Carlo on full gradients",
        ("temperature", "integration_steps", "target_acceptance"),
        minibatches=False,
    ),
    "nuts": NamedSampler(
        "the no-U-turn sampler on full gradients",
        ("temperature", "max_doublings", "target_acceptance"),
        minibatches=False,
    ),
}
SAMPLER_FIELDS = tuple(dict.fromkeys(name for one in SAMPLERS.values() for name in one.takes))
"""Settings of some samplers; not given unless one is chosen that takes them."""
COVARIANCE_FIELDS = ("rho", "shrinkage", "shrinkage_target", "sample_scale", "delta_form")
"""Settings of the posterior delta."""
SAMPLING_FIELDS = ("burn_in_rounds", *COVARIANCE_FIELDS, "sampler", *SAMPLER_FIELDS)
"""Settings of rounds in which clients draw samples: methods that draw none don't read them."""
APPLIES_TO = {
    "rho": ("shrinkage", ("fixed",)),
    "client_momentum": ("client_optimizer", ("sgd",)),
    "server_momentum": ("server_optimizer", ("sgd",)),
    "server_b1": ("server_optimizer", ("adam", "yogi")),
    "server_b2": ("server_optimizer", ("adam", "yogi")),
    "server_tau": ("server_optimizer", ("adam", "adagrad", "yogi")),
}
"""Setting → the choice, and those of its values, with which it is read."""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The settings of an algorithm. Tasks bring their own defaults."""

    epochs: int = 5
    """M: local epochs per round."""
    batch_size: int = 20
    """Examples per local step."""
    burn_in_rounds: int = 0
    """Rounds run as FedAvg before sampling begins."""
    samples: int | None = None
    """ℓ: posterior samples per round. One per epoch, M in all, if not given."""
    rho: float = 0.1
    """ρ ≥ 0 of the shrinkage estimator (Theorem 3)."""
    burn_in_epochs: int | None = None
    """Epochs of each sampling round that make no sample."""
    steps_per_sample: int | None = None
    """K of Algorithm 4: count samples in steps instead of epochs (needs --samples)."""
    burn_in_steps: int = 0
    """B of Algorithm 4, with --steps-per-sample."""
    discard_steps: int = 0
    """Steps dropped before each sample, with --steps-per-sample."""
    shrinkage: Literal["fixed", "oas", "rblw"] = "fixed"
    """ρ as given (fixed), or chosen from each client's samples."""
    shrinkage_target: Literal["identity", "scaled"] = "identity"
    """What the covariance is shrunk towards: I (the paper) or (tr S/d) I."""
    sample_scale: Literal["auto", "none", "sqrt-n"] | float = "auto"
    """Multiplies the samples' deviations from their mean: √(n_i/T) for samplers with a temperature
    and 1 for iasg, as in the paper (auto); 1 (none); √n_i; or a number."""
    delta_form: Literal["auto", "gram", "recurrence"] = "auto"
    """How the posterior delta is computed; the forms give the same numbers."""
    order: Literal["shuffle", "replacement"] = "shuffle"
    """Mini-batches from reshuffled epochs, or drawn with replacement."""
    sampler: str = dataclasses.field(
        default="iasg",
        metadata={
            "help": "How a client's posterior is sampled: "
            + "; ".join(f"{name} ({sampler.summary})" for name, sampler in SAMPLERS.items())
        },
    )
    temperature: float | Literal["n"] | None = None
    """T of the posterior that is sampled, p ∝ exp(−(n_i/T) f_i): a number, or n for n_i. Default:
    0.01; larger models need less. (Not for iasg, whose spread follows from rate and batch.)"""
    friction: float | None = None
    """α of sghmc: 1 − its momentum."""
    integration_steps: int | None = None
    """Leapfrog steps of a transition of hmc."""
    max_doublings: int | None = None
    """A trajectory of nuts has at most 2 to this power leapfrog steps."""
    target_acceptance: float | None = None
    """hmc and nuts: adapt the step size to it in the burn-in of every round."""
    client_optimizer: Literal["sgd", "adam"] = "sgd"
    """ClientOpt."""
    client_learning_rate: float = 0.01
    client_momentum: float = 0.0
    client_schedule: str = "constant"
    """The client's rate by round: constant, exponential:DECAY[:EVERY], inverse-time[:SCALE],
    inverse-sqrt[:SCALE]; then ,warmup:ROUNDS if wanted."""
    server_optimizer: Literal["sgd", "adam", "adagrad", "yogi"] = "sgd"
    """ServerOpt."""
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    """Momentum of sgd."""
    server_b1: float = 0.9
    """β₁ of adam and yogi."""
    server_b2: float = 0.99
    """β₂ of adam and yogi."""
    server_tau: float = 1e-3
    """τ of adam, adagrad and yogi."""
    server_schedule: str = "constant"
    """The server's rate by round, written as the client's."""
    weighting: Literal["examples", "uniform"] = "examples"
    """Client weights q_i."""
    iterate_averaging: str = "none"
    """Evaluate a mean of server iterates: none, polyak[:START], exponential:DECAY or last-two."""
    # Settings of single methods, which name them in `NamedMethod.takes`: None for all others.
    proximal: float | None = None
    """μ of fedprox: its clients' objective is f_i(θ) + μ/2 ‖θ − θ₀‖² (0.01 if not given)."""
    fedexp_epsilon: float | None = None
    """ε of fedexp's step length, Σ‖Δ_i‖² / (2M(‖Δ̄‖² + ε)) (0.001 if not given)."""
    numerator: Literal["fedavg", "fedpa", "mean", "mb-sgd"] | None = None
    """Whose deltas global-precision averages and divides by the precision (fedavg)."""
    precision_every: int | None = None
    """k of global-precision: clients send what they see of the precision every k-th round (5)."""
    precision_epsilon: float | None = None
    """ε of global-precision, in mean eigenvalues: flatter directions keep gain 1 (5)."""
    precision_decay: float | None = None
    """β of global-precision: what is left of the old average when new sketches come (0.95^k)."""
    precision_block: int | None = None
    """Larger layers have a block-diagonal precision, in blocks of at most this size (2048)."""
    precision_rank: int | Literal["exact"] | None = None
    """Columns of a sketch, if fewer than a layer has outputs; exact sends the full matrix."""

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
    check_integer("burn_in_rounds", h.burn_in_rounds, 0)
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


def fill_missing(h: Hyperparameters, **own: Any) -> Hyperparameters:
    """The same settings, with these in the place of those that are None."""
    missing = {name: value for name, value in own.items() if getattr(h, name) is None}
    return dataclasses.replace(h, **missing)


def _check_sampler(h: Hyperparameters, chosen: NamedSampler) -> None:
    """Refuse what does not apply to the sampler, and values it would not take."""
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
    """The same settings with other values of these fields, which may be of dataclasses in it.

    Fields that it does not have are passed over.
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
    """The same settings, as if nobody had said anything about these."""
    plain = Hyperparameters()
    return dataclasses.replace(h, **{name: getattr(plain, name) for name in fields})


def applies(h: Hyperparameters, field: str) -> bool:
    """Whether the optimizers, the sampler and the rule that are chosen have a setting."""
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
    own = {name: getattr(h, name) for name in chosen.takes if getattr(h, name) is not None}
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
        server.schedules.parse(h.server_schedule, "server_schedule"),
    )
