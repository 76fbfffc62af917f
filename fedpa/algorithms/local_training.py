"""A client's local training as its user says it, and the sampler that it means.

M epochs of ClientOpt give M samples, one per epoch; or samples are counted in steps (Algorithm 4).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedpa.errors import FedpaError, check_integer, check_type, refuse
from fedpa.objectives.minibatches import check_order
from fedpa.objectives.objective import Objective
from fedpa.samplers.iasg import iasg, plain_sgd
from fedpa.samplers.sampler import Epochs, Sampler, Steps
from fedpa.server.schedules import constant

SamplerFactory = Callable[[Objective, Any], Sampler]
"""(objective, learning-rate multiplier of the round) → a sampler."""


class LocalTraining(NamedTuple):
    """M epochs of ClientOpt give M samples, one per epoch, unless something else is said."""

    optimizer: optax.GradientTransformation | float
    """ClientOpt, an optax transformation or a number, the rate of plain SGD: fresh each round, its
    state carried across epochs and samples."""
    batch_size: int
    epochs: int = 1
    """M."""
    samples: int | None = None
    """ℓ. Below M, the first M − ℓ epochs are in-round burn-in."""
    burn_in_epochs: int | None = None
    """In-round burn-in; another way to say `samples`."""
    steps_per_sample: int | None = None
    """K of Algorithm 4: count in steps instead of epochs. Needs `samples`; `epochs` is unused."""
    burn_in_steps: int = 0
    """B of Algorithm 4, with `steps_per_sample`."""
    discard_steps: int = 0
    """Steps dropped before each sample, with `steps_per_sample`."""
    order: str = "shuffle"
    """Mini-batches from reshuffled epochs, or drawn with `replacement`."""
    schedule: Callable[[Any], Any] = constant(1.0)
    """Multiplies the client's learning rate, by round."""


class Work(NamedTuple):
    window: Epochs | Steps
    samples: int
    """ℓ."""


def local_work(local: LocalTraining) -> Work:
    """What makes a sample and how many there are; refuses contradictions."""
    check_type("local", local, LocalTraining, "fedpa.LocalTraining(optax.sgd(0.1), batch_size=20)")
    as_optimizer(local.optimizer)
    check_integer("batch_size", local.batch_size, 1)
    check_order(local.order)
    if local.samples is not None:
        check_integer("samples", local.samples, 1)
    for name in ("burn_in_steps", "discard_steps"):
        check_integer(name, getattr(local, name), 0)
    if local.steps_per_sample is not None:
        return _by_steps(local, local.steps_per_sample)
    return _by_epochs(local)


def _by_steps(local: LocalTraining, per_sample: int) -> Work:
    check_integer("steps_per_sample", per_sample, 1)
    if local.samples is None:
        raise refuse("samples", None, "steps_per_sample needs the number of samples")
    if local.burn_in_epochs:
        raise refuse(
            "burn_in_epochs", local.burn_in_epochs, "with steps_per_sample, use burn_in_steps"
        )
    return Work(Steps(per_sample, local.burn_in_steps, local.discard_steps), local.samples)


def _by_epochs(local: LocalTraining) -> Work:
    epochs, samples, burn_in = local.epochs, local.samples, local.burn_in_epochs
    check_integer("epochs", epochs, 1)
    for name in ("burn_in_steps", "discard_steps"):
        if getattr(local, name):
            raise refuse(name, getattr(local, name), "applies only with steps_per_sample")
    if burn_in is not None and not 0 <= burn_in < epochs:
        raise refuse("burn_in_epochs", burn_in, f"must be between 0 and epochs − 1 = {epochs - 1}")
    if samples is None:
        samples = epochs - (burn_in or 0)
    if samples > epochs:
        raise refuse(
            "samples",
            samples,
            f"one sample per epoch gives at most {epochs}; raise epochs or set steps_per_sample",
        )
    if burn_in is not None and burn_in + samples != epochs:
        raise refuse(
            "samples", samples, f"epochs − burn_in_epochs gives {epochs - burn_in}; set one of them"
        )
    return Work(Epochs(epochs - samples), samples)


def local_sampler(
    objective: Objective, local: LocalTraining, rate: jax.Array, average: bool
) -> Sampler:
    """IASG (or, without averaging, local SGD) with the learning rate multiplied by `rate`."""
    return iasg(
        objective,
        scaled(local.optimizer, rate),
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


def scaled(optimizer: Optimizer, rate: jax.Array) -> Optimizer:
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
    if isinstance(optimizer, optax.GradientTransformation | jax.Array):
        return optimizer if isinstance(optimizer, tuple) else plain_sgd(optimizer)
    known = isinstance(optimizer, int | float) and not isinstance(optimizer, bool)
    if not known or not 0 < optimizer < float("inf"):
        raise refuse("optimizer", optimizer, "must be an optax transformation, or a number > 0")
    return plain_sgd(optimizer)
