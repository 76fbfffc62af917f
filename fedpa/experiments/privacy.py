"""Privacy as plain values: the options that make any method of the command private.

Nothing here imports JAX until a method is built.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import fedpa
from fedpa.errors import refuse
from fedpa.privacy.accounting import Accountant, Budget, Sampling

if TYPE_CHECKING:
    from fedpa.algorithms.methods import Method


@dataclasses.dataclass(frozen=True)
class PrivacyOptions:
    """Differential privacy at the level of clients, around any method that averages."""

    clip: float | None = None
    """Clip what each client sends to this L2 norm, > 0, and add noise to the sum: the run is
    differentially private (default: it is not)."""
    noise_multiplier: float | None = None
    """Noise on the sum in units of --clip, > 0; fedpa privacy computes it for an ε."""
    delta: float | None = None
    """δ of (ε, δ), in (0, 1): below 1/clients."""
    sampling: Sampling | None = None
    """How a round's clients are drawn: poisson takes each by itself, --clients-per-round on
    average; fixed takes that many, without amplification by sampling; cyclic takes them in turns
    (default: poisson)."""
    accountant: Accountant | None = None
    """How rounds are composed: pld is tight, rdp fast (default: pld)."""
    max_epsilon: float | None = None
    """End the run before the round that would exceed this ε, > 0 (default: no limit)."""
    weight_cap: float | None = None
    """Clients weigh min(n_i, X)/X by their n_i examples, X > 0 (default: all weigh the same)."""
    extra_scale: float | None = None
    """Factor > 0, in the norm that is clipped, on what a method sends besides Δ (default: 1)."""
    clip_quantile: float | None = None
    """Let the clipping norm follow this quantile of the clients' norms, in (0, 1), from --clip on
    (default: --clip is fixed)."""
    clip_rate: float | None = None
    """How fast it follows, > 0 (default: 0.2)."""
    count_noise: float | None = None
    """Noise on the number of clients that are not clipped, above half of --noise-multiplier
    (default: a twentieth of --clients-per-round, at least --noise-multiplier)."""
    bands: int | None = None
    """Bands of DP-FTRL's correlated noise, at least 1; --sampling cyclic only (default: 1, fresh
    noise)."""
    force: bool = False
    """Accept a --delta of 1/clients or more."""


def resolve_privacy(options: PrivacyOptions) -> PrivacyOptions:
    """Fill in defaults; refuse options without the ones that they need."""
    if options.clip is None:
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if value is not None and field.name != "force":
                raise refuse(field.name, value, "needs clip: without it the run is not private")
        return dataclasses.replace(options, force=False)
    for name in ("noise_multiplier", "delta"):
        if getattr(options, name) is None:
            expected = "must be given with clip: `fedpa privacy` helps to choose"
            raise refuse(name, None, expected)
    if options.clip_quantile is None:
        for name in ("clip_rate", "count_noise"):
            if getattr(options, name) is not None:
                raise refuse(name, getattr(options, name), "needs clip_quantile")
    defaults: dict[str, Any] = {
        "sampling": "poisson",
        "accountant": "pld",
        "extra_scale": 1.0,
        "bands": 1,
    }
    if options.clip_quantile is not None:
        defaults["clip_rate"] = 0.2
    missing = {name: v for name, v in defaults.items() if getattr(options, name) is None}
    return dataclasses.replace(options, **missing)


def make_budget(options: PrivacyOptions) -> Budget:
    """The budget of resolved options."""
    names = ("noise_multiplier", "delta", "sampling", "accountant", "max_epsilon", "force")
    return Budget(**{name: getattr(options, name) for name in names})


def make_private(method: "Method", options: PrivacyOptions) -> "Method":
    """The method as resolved options ask for it."""
    if options.clip is None:
        return method
    given: dict[str, Any] = dataclasses.asdict(options)
    quantile, rate = given.pop("clip_quantile"), given.pop("clip_rate")
    count_noise = given.pop("count_noise")
    if quantile is not None:
        from fedpa.privacy import AdaptiveClip

        given["clip"] = AdaptiveClip(options.clip, quantile, rate, count_noise)
    return fedpa.private(method, **given)
