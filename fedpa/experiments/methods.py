"""Methods by name: one registry that maps the command's names to the library's builders.

A method is an algorithm of `fedpa.algorithms` and an entry here. Nothing here imports JAX until a
method is built.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import fedpa
from fedpa.errors import check_number, refuse
from fedpa.experiments.hyperparameters import (
    COVARIANCE_FIELDS,
    Hyperparameters,
    applies,
    build_local,
    build_sampler,
    build_server,
    fill_missing,
    list_sampling_fields,
    unset,
)

if TYPE_CHECKING:
    from fedpa.algorithms.methods import Method
    from fedpa.algorithms.mime import Base
    from fedpa.algorithms.plateau import Plateau

Adjust = Callable[[Hyperparameters], Hyperparameters]


def fix(**settings: Any) -> Adjust:
    """Settings that the method fixes."""
    return lambda h: dataclasses.replace(h, **settings)


PLAIN_SERVER = {"server_optimizer": "sgd", "server_learning_rate": 1.0, "server_momentum": 0.0}
use_one_epoch = fix(
    epochs=1,
    samples=None,
    burn_in_epochs=None,
    steps_per_sample=None,
    burn_in_steps=0,
    discard_steps=0,
)


class NamedMethod(NamedTuple):
    label: str
    """Label as in the paper's tables, where [M] is the number of local epochs."""
    summary: str
    build: "Callable[[Hyperparameters], Method]"
    """From settings that `adjust` gives."""
    adjust: Adjust = lambda h: h
    """Applies the settings that the method fixes: FedAvg[1] always has one epoch."""
    defaults: Adjust = lambda h: h
    """A task's settings → what the method takes of them by default."""
    samples: bool = False
    """Whether it draws posterior samples, by the sampler that is chosen."""
    begins_as_fedavg: bool = False
    """Whether the rounds of its burn-in, before its switch, are FedAvg's to the bit."""
    pooled: bool = False
    """Whether a round's clients put their examples together: no federation at all."""
    takes: tuple[str, ...] = ()
    """Its own settings: fields of `Hyperparameters` that are None for other methods."""
    control_of: tuple[str, ...] = ()
    """The methods that it is a control of, if any."""
    isolates: str = ""
    """For a control: the cause that a difference from it shows."""
    shares: str = ""
    """For a control: what else sets its method apart from FedAvg, and the control has, too."""
    sends: str = "θ / Δ"
    """Down to a client / up from it."""
    keeps: str = "–"
    """State besides θ and the server optimizer's."""
    cost: str = "1"
    """Of a client's round, relative to FedAvg's."""
    secure_sums: str = "yes"
    """Whether what clients send adds up: yes, no, or when. By `fedpa.algorithms.secure_sums`."""


# FedAvg, FedPA and its controls


def build_fedavg(h: Hyperparameters) -> "Method":
    return fedpa.fedavg(build_local(h), build_server(h))


def build_fedpa(h: Hyperparameters) -> "Method":
    return fedpa.fedpa(
        build_local(h),
        build_server(h),
        rho=h.rho if h.shrinkage == "fixed" else h.shrinkage,
        burn_in_rounds=cast("int", h.burn_in_rounds),
        target=h.shrinkage_target,
        sample_scale=h.sample_scale,
        form=h.delta_form,
        sampler=build_sampler(h),
    )


def build_mean(h: Hyperparameters, rho: float = 0.0) -> "Method":
    return fedpa.mean_control(
        build_local(h),
        build_server(h),
        burn_in_rounds=cast("int", h.burn_in_rounds),
        rho=rho,
        sampler=build_sampler(h),
    )


def build_mean_scaled(h: Hyperparameters) -> "Method":
    if (h.shrinkage, h.shrinkage_target) != ("fixed", "identity"):
        raise refuse(
            "shrinkage",
            f"{h.shrinkage}, {h.shrinkage_target}",
            "method mean-scaled takes the step of a fixed ρ and the identity target; leave it out",
        )
    return build_mean(h, h.rho)


# FedAvg's family: another server optimizer (Hsu et al. 2019; Reddi et al. 2021)

Adaptive = Literal["adam", "yogi", "adagrad"]
RATES = {"adam": 0.01, "yogi": 0.01, "adagrad": 0.1}
"""Server rates where the task's own is another optimizer's: the middle of Reddi et al.'s best."""
MOMENTUM = 0.9
DECAY = "exponential:0.1:500"
"""AFO's client rates: by 0.1 over 500 rounds (theirs fall in steps, once every 500)."""


def use_momentum(h: Hyperparameters) -> Hyperparameters:
    momentum = h.server_momentum or MOMENTUM
    return dataclasses.replace(h, server_optimizer="sgd", server_momentum=momentum)


def shorten_for_momentum(h: Hyperparameters) -> Hyperparameters:
    """Momentum β lengthens steps by 1/(1 − β): a rate that was chosen without is shortened by it.

    That of another optimizer means nothing here; FedAvg's own is 1.
    """
    if h.server_optimizer == "sgd" and h.server_momentum:
        return h
    rate = h.server_learning_rate if h.server_optimizer == "sgd" else 1.0
    return dataclasses.replace(h, server_learning_rate=round(rate * (1 - MOMENTUM), 12))


def use_rate_of(optimizer: str) -> Adjust:
    """A rate of this optimizer's, unless the task's is one."""

    def defaults(h: Hyperparameters) -> Hyperparameters:
        if h.server_optimizer == optimizer:
            return h
        return dataclasses.replace(h, server_learning_rate=RATES[optimizer], server_momentum=0.0)

    return defaults


def use_adaptive_and_decay(h: Hyperparameters) -> Hyperparameters:
    """The server's optimizer if it is adaptive, else Adam; the client's schedule if it has one."""
    if h.server_optimizer == "sgd":
        h = dataclasses.replace(h, server_optimizer="adam")
    if h.client_schedule == "constant":
        h = dataclasses.replace(h, client_schedule=DECAY)
    return h


def default_afo(h: Hyperparameters) -> Hyperparameters:
    h = use_one_epoch(h)
    return use_rate_of("adam")(h) if h.server_optimizer == "sgd" else h


def name_adaptive(label: str, optimizer: Adaptive) -> NamedMethod:
    return NamedMethod(
        f"{label}[M]",
        f"FedAvg with {optimizer.capitalize()} at the server",
        build_fedavg,
        fix(server_optimizer=optimizer),
        use_rate_of(optimizer),
    )


# FedProx and FedExP


def build_fedprox(h: Hyperparameters) -> "Method":
    return fedpa.fedprox(build_local(h), build_server(h), proximal=cast("float", h.proximal))


def build_fedexp(h: Hyperparameters) -> "Method":
    check_number("fedexp_epsilon", h.fedexp_epsilon)
    return fedpa.fedexp(build_local(h), build_server(h), epsilon=cast("float", h.fedexp_epsilon))


def adjust_fedexp(h: Hyperparameters) -> Hyperparameters:
    """η_g is the server's only rate."""
    return fill_missing(fix(**PLAIN_SERVER)(h), fedexp_epsilon=1e-3)


def default_fedexp(h: Hyperparameters) -> Hyperparameters:
    plain = h.iterate_averaging == "none"
    return dataclasses.replace(h, iterate_averaging="last-two") if plain else h


# MIME and MimeLite


def build_base(h: Hyperparameters) -> "Base":
    """The base algorithm that clients mimic, from the server's settings."""
    from fedpa.algorithms import moments, momentum
    from fedpa.server import optimizers

    match h.server_optimizer:
        case "sgd":
            return momentum(h.server_momentum)
        case "adam":
            return moments(optimizers.decaying(h.server_b2), h.server_b1, h.server_tau)
        case "adagrad":
            return moments(optimizers.growing, 0.0, h.server_tau)
        case "yogi":
            return moments(optimizers.yogis(h.server_b2), h.server_b1, h.server_tau)


def build_mime(h: Hyperparameters, lite: bool = False) -> "Method":
    """The server's optimizer is the clients' base; the server itself takes their mean."""
    server = build_server(fix(**PLAIN_SERVER)(h))
    build = fedpa.mime_lite if lite else fedpa.mime
    return build(build_local(h), server, base=build_base(h))


# Clients have no momentum, and x is their mean.
adjust_mime = fix(client_optimizer="sgd", client_momentum=0.0, server_learning_rate=1.0)


def default_mime(h: Hyperparameters) -> Hyperparameters:
    """The rates are local SGD's, so the base is SGDm by default.

    FedAvg's clients and server lengthen a step by their momentum, 1/(1 − β) each, and the server by
    its rate. Here there is one normalized momentum, and one rate, which makes up for it.
    """
    longer = 1 / (1 - h.client_momentum)
    if h.server_optimizer == "sgd":
        longer *= h.server_learning_rate / (1 - h.server_momentum)
    return dataclasses.replace(
        h,
        client_learning_rate=float(f"{h.client_learning_rate * longer:.6g}"),
        server_optimizer="sgd",
        server_momentum=h.server_momentum or MOMENTUM,
    )


# Local and global precision


def build_local_precision(h: Hyperparameters) -> "Method":
    own: dict[str, Any] = {} if h.local_epsilon is None else {"local_epsilon": h.local_epsilon}
    return fedpa.local_precision(build_local(h), build_server(h), **own)


def adjust_local_precision(h: Hyperparameters) -> Hyperparameters:
    from fedpa.algorithms.local_precision import EPSILON

    return fill_missing(h, local_epsilon=EPSILON)


NUMERATORS: Mapping[str, Callable[[Hyperparameters], "Method"]] = {
    "fedavg": build_fedavg,
    "fedpa": build_fedpa,
    "local-precision": build_local_precision,
    "mean": build_mean,
    "mb-sgd": lambda h: fedpa.mb_sgd(build_local(h), build_server(h)),
}
PRECISION_FIELDS = (
    "numerator",
    "precision_start",
    "precision_every",
    "precision_filter",
    "precision_epsilon",
    "precision_kappa",
    "precision_length",
    "precision_decay",
)


# The step has a length of its own.
default_precision = fix(**PLAIN_SERVER)


def build_precision(h: Hyperparameters, block: int | None) -> "Method":
    from fedpa.algorithms.global_precision import check_settings

    settings: dict[str, Any] = {
        "start": h.precision_start,
        "every": h.precision_every,
        "filter": h.precision_filter,
        "epsilon": h.precision_epsilon,
        "kappa": h.precision_kappa,
        "length": h.precision_length,
        "decay": h.precision_decay,
        "block": block,
        "rank": h.precision_rank,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("length") == 0:
        given["length"] = None
    check_settings(prefix="precision_", **given)
    numerator = NUMERATORS[h.numerator or "fedavg"](h)
    return fedpa.global_precision(numerator, **given, batch_size=h.batch_size)


def adjust_precision(h: Hyperparameters, diagonal: bool = False) -> Hyperparameters:
    from fedpa.algorithms.global_precision import BLOCK, DECAY, EPSILON, EVERY, KAPPA, LENGTH, START

    h = fill_missing(h, numerator="fedavg", precision_filter="ridge")
    saturating = h.precision_filter == "saturating"
    h = fill_missing(
        h,
        precision_start=START,
        precision_every=EVERY,
        precision_epsilon=EPSILON[h.precision_filter or "ridge"],
        precision_length=LENGTH,
        precision_decay=DECAY,
        **({"precision_kappa": KAPPA} if saturating else {}),
        **({} if diagonal else {"precision_block": BLOCK}),
    )
    unread = {"fedpa": (), "mean": COVARIANCE_FIELDS}
    return unset(h, unread.get(h.numerator or "", list_sampling_fields(h)))


METHODS = {
    "afo": NamedMethod(
        "AFO[M]",
        "adaptive federated optimization: FedAvg[1] with an adaptive server and decaying client "
        "learning rates",
        build_fedavg,
        use_adaptive_and_decay,
        default_afo,
        cost="1/M",
    ),
    "fedavgm": NamedMethod(
        "FedAvgM[M]",
        "FedAvg with momentum at the server",
        build_fedavg,
        use_momentum,
        shorten_for_momentum,
    ),
    "fedadam": name_adaptive("FedAdam", "adam"),
    "fedyogi": name_adaptive("FedYogi", "yogi"),
    "fedadagrad": name_adaptive("FedAdagrad", "adagrad"),
    "centralized": NamedMethod(
        "centralized[M]",
        "no federation: SGD on the pooled examples of a round's clients",
        lambda h: fedpa.centralized(build_local(h)),
        fix(
            **PLAIN_SERVER,
            server_schedule="constant",
            aggregation="weighted-mean",
            iterate_averaging="none",
            burn_in_rounds=0,
            plateau_window=None,
            plateau_metric=None,
            at_switch_rate=None,
        ),
        use_one_epoch,
        pooled=True,
        sends="–",
        cost="1/M",
    ),
    "fedavg-1": NamedMethod(
        "FedAvg[1]", "FedAvg with one local epoch", build_fedavg, use_one_epoch, cost="1/M"
    ),
    "fedavg": NamedMethod(
        "FedAvg[M]",
        "Δ = θ₀ − θ after M local epochs of SGD",
        build_fedavg,
        begins_as_fedavg=True,
    ),
    "fedexp": NamedMethod(
        "FedExP[M]",
        "FedAvg with a longer server step when clients disagree more",
        build_fedexp,
        adjust_fedexp,
        default_fedexp,
        takes=("fedexp_epsilon",),
        sends="θ / Δ, ‖Δ‖²",
        keeps="last θ",
    ),
    "fedpa": NamedMethod(
        "FedPA[M]",
        "Δ̂ = Σ̂⁻¹(θ₀ − mean of ℓ posterior samples), Σ̂ their covariance",
        build_fedpa,
        samples=True,
        begins_as_fedavg=True,
        sends="θ / Δ̂",
        cost="1 plus computing Δ̂",
    ),
    "fedpa-oas": NamedMethod(
        "FedPA-OAS[M]",
        "FedPA with ρ estimated from each client's samples (OAS)",
        build_fedpa,
        lambda h: dataclasses.replace(unset(h, ("rho",)), shrinkage="oas"),
        samples=True,
        begins_as_fedavg=True,
        sends="θ / Δ̂",
        cost="1 plus computing Δ̂",
    ),
    "fedprox": NamedMethod(
        "FedProx[M]",
        "FedAvg with μ/2 ‖θ − θ₀‖² added to each client's loss",
        build_fedprox,
        lambda h: fill_missing(h, proximal=0.01),
        takes=("proximal",),
    ),
    "global-precision": NamedMethod(
        "Precision[M]",
        "mean Δ of FedAvg (or --numerator), divided by the averaged precision",
        lambda h: build_precision(h, h.precision_block),
        adjust_precision,
        default_precision,
        samples=True,
        takes=(*PRECISION_FIELDS, "precision_block", "precision_rank"),
        sends="θ / Δ, every k-th round Z",
        keeps="A, L",
        cost="1 + 1/(kM)",
        secure_sums="only with --precision-rank exact",
    ),
    "global-precision-diagonal": NamedMethod(
        "Precision-diagonal[M]",
        "control of global-precision: only the precision's diagonal",
        lambda h: build_precision(h, 1),
        lambda h: adjust_precision(h, diagonal=True),
        default_precision,
        samples=True,
        takes=PRECISION_FIELDS,
        control_of=("global-precision",),
        isolates="correlations between parameters",
        shares="the scale of each parameter",
        sends="θ / Δ, every k-th round Z",
        keeps="A, L",
        cost="1 + 1/(kM)",
    ),
    "mb-sgd": NamedMethod(
        "MB-SGD",
        "mini-batch SGD: the mean of as many gradients as FedAvg, all at θ",
        NUMERATORS["mb-sgd"],
        sends="θ / ∇f̂",
    ),
    "mean": NamedMethod(
        "mean[M]",
        "control of fedpa without a covariance: Δ = θ₀ − mean of the samples",
        build_mean,
        lambda h: unset(h, COVARIANCE_FIELDS),
        samples=True,
        begins_as_fedavg=True,
        control_of=("fedpa", "fedpa-oas"),
        isolates="the covariance and its longer step",
        shares="the average of the samples",
    ),
    "mean-scaled": NamedMethod(
        "mean-scaled[M]",
        "control of fedpa: mean with fedpa's longer step, Δ × (1 + (ℓ−1)ρ)",
        build_mean_scaled,
        samples=True,
        begins_as_fedavg=True,
        control_of=("fedpa",),
        isolates="the covariance",
        shares="the longer step",
    ),
    "mime": NamedMethod(
        "MIME[M]",
        "local steps with the server's momentum, corrected by c − ∇f̂(θ)",
        build_mime,
        adjust_mime,
        default_mime,
        sends="θ / ∇f; θ, s, c / Δ",
        keeps="s",
        cost="2 + 1/M",
    ),
    "mime-lite": NamedMethod(
        "MimeLite[M]",
        "local steps with the server's momentum or moments, not corrected",
        lambda h: build_mime(h, lite=True),
        adjust_mime,
        default_mime,
        sends="θ, s / Δ, ∇f",
        keeps="s",
        cost="1 + 1/M",
    ),
    "scaffold": NamedMethod(
        "SCAFFOLD[M]",
        "FedAvg with local gradients corrected by c − c_i",
        lambda h: fedpa.scaffold(build_local(h), build_server(h)),
        sends="θ, c / Δ, Δc_i",
        keeps="c_i, c",
    ),
    "local-precision": NamedMethod(
        "Local precision[M]",
        "FedAvg, local gradients divided by the client's own precision (FedPM)",
        build_local_precision,
        adjust_local_precision,
        takes=("local_epsilon",),
        cost="1 + 1/M plus a product per step",
    ),
}


def build_method(name: str, h: Hyperparameters) -> "Method":
    """Build a method from resolved settings, with a switch at the plateau if they ask for it."""
    build = METHODS[name].build
    if h.burn_in_rounds != "auto":
        return build(h)
    return fedpa.switch_at_plateau(
        lambda rounds: build(dataclasses.replace(h, burn_in_rounds=rounds)), build_rule(h)
    )


def label_private(label: str, is_private: bool) -> str:
    """A method's label, if its run is private: private FedPA[5]."""
    return f"private {label}" if is_private else label


def build_rule(h: Hyperparameters) -> "Plateau":
    """When burn-in of --burn-in-rounds auto ends."""
    assert h.plateau_metric is not None
    assert h.plateau_window is not None
    return fedpa.Plateau(h.plateau_metric, h.plateau_window)


def list_own_fields() -> dict[str, list[str]]:
    """Each setting that only some methods have → those methods."""
    found: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        for field in method.takes:
            found.setdefault(field, []).append(name)
    return found


def check_own(name: str, h: Hyperparameters) -> None:
    """Refuse a setting of other methods' than this one."""
    for field, takers in list_own_fields().items():
        value = getattr(h, field)
        if value is not None and name not in takers:
            raise refuse(
                field, value, f"does not apply to method {name}; only to {', '.join(takers)}"
            )


def reads_setting(name: str, h: Hyperparameters, field: str, values: Iterable[Any]) -> bool:
    """Whether a method with these settings reads one of them.

    values: the setting's values in other runs. A method that resets it to its default does not
        read it.
    """
    method = METHODS[name]
    takers = list_own_fields().get(field)
    if (takers is not None and name not in takers) or not applies(h, field):
        return False
    if not method.samples and field in list_sampling_fields(h):
        return False
    plain = getattr(Hyperparameters(), field)
    asked = [dataclasses.replace(h, **{field: value}) for value in values if value != plain]
    return all(getattr(method.adjust(other), field) != plain for other in asked)


def drop_others(name: str, h: Hyperparameters, among: Iterable[str]) -> Hyperparameters:
    """The same settings for this method, without those that others of `among` alone have."""
    others: dict[str, Any] = {
        field: None
        for field, takers in list_own_fields().items()
        if name not in takers and set(takers) & set(among)
    }
    return dataclasses.replace(h, **others)


def label_method(name: str, h: Hyperparameters) -> str:
    """The method's label with sampler and local work: FedPA[5], FedPA-SGLD[3×10 steps]."""
    work = f"{h.epochs}"
    if h.steps_per_sample is not None:
        work = f"{h.samples}×{h.steps_per_sample} steps"
    method = METHODS[name]
    named = "" if h.numerator in (None, "fedavg") else f" of {h.numerator}"
    named += f"-{h.sampler.upper()}" if method.samples and h.sampler != "iasg" else ""
    return method.label.replace("[M]", f"{named}[{work}]")
