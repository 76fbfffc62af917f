"""The settings of a client's local training, and the sampler that they define.

M epochs of ClientOpt give M samples, one per epoch; or samples are counted in steps (Algorithm 4).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedpa.errors import FedpaError, check_integer, check_type, refuse
from fedpa.objectives.minibatches import Order, check_order
from fedpa.objectives.objective import Objective
from fedpa.samplers.iasg import iasg, plain_sgd
from fedpa.samplers.sampler import Epochs, Sampler, Steps
from fedpa.server.schedules import Schedule, constant

SamplerFactory = Callable[[Objective, Any], Sampler]
"""(objective, learning-rate multiplier of the round) → a sampler."""


class LocalTraining(NamedTuple):
    """A client's local work: by default M epochs of ClientOpt, which give a sample each.

    Args:
        optimizer: ClientOpt, an optax transformation or a number, the rate of plain SGD: fresh each
            round, its state carried across epochs and samples.
        batch_size: Examples of a mini-batch, ≥ 1.
        epochs: M ≥ 1, passes over the client's examples in a round (default: 1).
        samples: ℓ ≥ 1, posterior samples in a round (default: one per epoch). Below M, the first
            M − ℓ epochs are in-round burn-in.
        burn_in_epochs: Epochs before the first sample, from 0 to M − 1; another way to say
            `samples` (default: M − ℓ).
        steps_per_sample: K ≥ 1 of Algorithm 4: count in steps instead of epochs. Needs `samples`;
            `epochs` is unused (default: one epoch per sample).
        burn_in_steps: B ≥ 0 of Algorithm 4, steps before the first sample; with `steps_per_sample`
            (default: 0).
        discard_steps: Steps ≥ 0 dropped before each sample, with `steps_per_sample` (default: 0).
        order: "shuffle", mini-batches from reshuffled epochs, or "replacement", drawn with
            replacement (default: "shuffle").
        schedule: Round → the factor of the client's learning rate (default: constant(), which is
            1).
    Example:
        >>> import fedpa, optax
        >>> local = fedpa.LocalTraining(optax.sgd(0.1, momentum=0.9), batch_size=20, epochs=5)
        >>> steps = fedpa.LocalTraining(0.1, batch_size=20, samples=10, steps_per_sample=50)
    """

    optimizer: optax.GradientTransformation | float
    batch_size: int
    epochs: int = 1
    samples: int | None = None
    burn_in_epochs: int | None = None
    steps_per_sample: int | None = None
    burn_in_steps: int = 0
    discard_steps: int = 0
    order: Order = "shuffle"
    schedule: Schedule = constant()


class Work(NamedTuple):
    window: Epochs | Steps
    samples: int
    """ℓ."""


def local_work(local: LocalTraining) -> Work:
    """What makes a sample and how many there are; refuses contradictions."""
    check_type("local", local, LocalTraining, "fedpa.LocalTraining(optax.sgd(0.1), batch_size=20)")
    as_optimizer(local.optimizer)
    check_order(local.order)
    for name, least in _LEAST.items():
        if getattr(local, name) is not None:
            check_integer(name, getattr(local, name), least)
    epochs, samples, burn_in = local.epochs, local.samples, local.burn_in_epochs
    if local.steps_per_sample is not None:
        if samples is None:
            raise refuse("samples", None, "steps_per_sample needs the number of samples")
        if burn_in:
            raise refuse("burn_in_epochs", burn_in, "with steps_per_sample, use burn_in_steps")
        steps = Steps(local.steps_per_sample, local.burn_in_steps, local.discard_steps)
        return Work(steps, samples)
    for name in ("burn_in_steps", "discard_steps"):
        if getattr(local, name):
            raise refuse(name, getattr(local, name), "applies only with steps_per_sample")
    if burn_in is not None and burn_in >= epochs:
        raise refuse("burn_in_epochs", burn_in, f"must be between 0 and epochs − 1 = {epochs - 1}")
    if samples is None:
        samples = epochs - (burn_in or 0)
    if samples > epochs:
        expected = (
            f"one sample per epoch gives at most {epochs}; raise epochs or set steps_per_sample"
        )
        raise refuse("samples", samples, expected)
    if burn_in is not None and burn_in + samples != epochs:
        expected = f"epochs − burn_in_epochs gives {epochs - burn_in}; set one of them"
        raise refuse("samples", samples, expected)
    return Work(Epochs(epochs - samples), samples)


_LEAST = {
    "batch_size": 1,
    "epochs": 1,
    "samples": 1,
    "burn_in_epochs": 0,
    "steps_per_sample": 1,
    "burn_in_steps": 0,
    "discard_steps": 0,
}


def local_sampler(
    objective: Objective, local: LocalTraining, rate: jax.Array, average: bool
) -> Sampler:
    """IASG (or, without averaging, local SGD) with the learning rate multiplied by `rate`."""
    return iasg(
        objective,
        scale_rate(local.optimizer, rate),
        batch_size=local.batch_size,
        window=local_work(local).window,
        order=local.order,
        average=average,
    )


def sampler_for(
    objective: Objective, local: LocalTraining, rate: jax.Array, factory: SamplerFactory | None
) -> Sampler:
    """The sampler that `factory` makes, or IASG on `local`."""
    if isinstance(factory, Sampler):
        raise FedpaError(
            "sampler is a Sampler: must be a function that makes one, "
            "lambda objective, rate: fedpa.samplers.sgld(objective, 0.1 * rate, batch_size=10, "
            "temperature=0.01)"
        )
    if factory is not None:
        return factory(objective, rate)
    return local_sampler(objective, local, rate, average=True)


Optimizer: TypeAlias = optax.GradientTransformation | float | jax.Array
"""ClientOpt; a number is the rate of plain SGD."""


def scale_rate(optimizer: Optimizer, rate: jax.Array) -> Optimizer:
    """The optimizer with its learning rate multiplied by `rate`."""
    if not isinstance(optimizer, optax.GradientTransformation):
        return optimizer * rate
    # optax.scale would promote; parameters keep their dtype here.
    by_rate = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: jnp.asarray(rate, u.dtype) * u, updates)
    )
    return optax.chain(optimizer, by_rate)


def as_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """The transformation; of a number, plain SGD."""
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    is_number = isinstance(optimizer, int | float) and not isinstance(optimizer, bool)
    if not isinstance(optimizer, jax.Array) and not (is_number and 0 < optimizer < float("inf")):
        raise refuse("optimizer", optimizer, "must be an optax transformation, or a number > 0")
    return plain_sgd(optimizer)
