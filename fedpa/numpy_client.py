"""FedPA's client in NumPy, for nodes that train with PyTorch or another library, without JAX.

A function that runs one epoch on a list of arrays becomes FedPA's client. Each epoch gives one
posterior sample: the mean of its iterates if the function returns it, otherwise the last iterate.

    burn-in rounds:  Δ = θ − θ_M
    then:            Δ̂ = Σ̂⁻¹(θ − x̄)  from the samples x_1 … x_ℓ      (eq. 4, Theorem 3)

`reply` answers a message of the strategy `fedpa.flower.FedPA`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedpa.deltas.gram import solve
from fedpa.deltas.shrinkage import fixed
from fedpa.errors import FedpaError, check_integer, check_number

if TYPE_CHECKING:
    from flwr.app import Message

__all__ = ["Arrays", "ClientWork", "Epoch", "client_delta", "posterior_delta", "reply"]

Arrays = list[np.ndarray]
"""A model: its arrays in a fixed order."""
Epoch = Callable[[Arrays], Any]
"""Parameters → parameters after one epoch; or (those, the mean of the epoch's iterates)."""


class ClientWork(NamedTuple):
    """The work that the server requests of a client in a round.

    Args:
        sampling: Whether samples are drawn; if not, the round is FedAvg's.
        epochs: Epochs in the round, ≥ 1.
        burn_in_epochs: Epochs before the first sample, ≥ 0, below `epochs`.
        rho: Shrinkage ρ ≥ 0.
    Example:
        >>> ClientWork(sampling=True, epochs=5, burn_in_epochs=1, rho=0.1).epochs
        5
    """

    sampling: bool
    epochs: int
    burn_in_epochs: int
    rho: float


def client_delta(theta: Sequence[np.ndarray], epoch: Epoch, work: ClientWork) -> Arrays:
    """Compute one client's Δ: train from θ for some epochs, then eq. 4 on their samples.

    Args:
        theta: θ, the model's arrays.
        epoch: Runs one epoch: arrays → arrays, or (arrays, the mean of the epoch's iterates).
        work: The requested work.
    Returns:
        Δ of the floating-point arrays, in their order.
    Raises:
        FedpaError: The work is invalid, or an epoch returns arrays of other shapes.
    Example:
        >>> work = ClientWork(sampling=True, epochs=3, burn_in_epochs=0, rho=0.1)
        >>> client_delta([np.zeros(2)], lambda arrays: [a + 0.5 for a in arrays], work)
        [array([-1.09090909, -1.09090909])]
    """
    check_work(work)
    start = [np.array(array) for array in theta]  # the function may train in place
    now, samples = [array.copy() for array in start], []
    for number in range(work.epochs):
        now, mean = _run(epoch, now, start)
        if work.sampling and number >= work.burn_in_epochs:
            samples.append(_select_trained(mean))
    if not work.sampling:
        return [
            np.asarray(a - b)
            for a, b in zip(_select_trained(start), _select_trained(now), strict=True)
        ]
    return posterior_delta(_select_trained(start), samples, work.rho)


def describe_work(work: ClientWork) -> dict[str, Any]:
    """Format the work as a message's config: fedpa-burn-in-epochs."""
    return {f"fedpa-{name.replace('_', '-')}": value for name, value in work._asdict().items()}


def read_work(config: Mapping[str, Any]) -> ClientWork:
    """Read the work from a message of the strategy."""
    names = describe_work(ClientWork(False, 1, 0, 0.0))
    if not names.keys() <= config.keys():
        raise FedpaError("the message does not come from the strategy fedpa.flower.FedPA")
    return ClientWork(*(type(value)(config[name]) for name, value in names.items()))


def is_trained(array: np.ndarray) -> bool:
    """Whether an array is trained; integers (such as a count of batches) stay the server's."""
    return bool(np.issubdtype(array.dtype, np.floating))


def _select_trained(arrays: Arrays) -> Arrays:
    return [array for array in arrays if is_trained(array)]


def _run(epoch: Epoch, now: Arrays, like: Arrays) -> tuple[Arrays, Arrays]:
    given = epoch([array.copy() for array in now])
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list | tuple)
    after, mean = given if pair else (given, given)
    return _check_arrays(after, like), _check_arrays(mean, like)


def _check_arrays(arrays: Any, like: Arrays) -> Arrays:
    arrays = [np.array(array) for array in arrays]
    shapes, wanted = [a.shape for a in arrays], [a.shape for a in like]
    if shapes != wanted:
        raise FedpaError(f"epoch: returned arrays of shapes {shapes}: must be θ's, {wanted}")
    return [a.astype(b.dtype, copy=False) for a, b in zip(arrays, like, strict=True)]


def check_work(work: ClientWork) -> None:
    check_integer("epochs", work.epochs, 1)
    check_integer("burn_in_epochs", work.burn_in_epochs, 0)
    check_number("rho", work.rho)
    if work.sampling and work.burn_in_epochs >= work.epochs:
        raise FedpaError(
            f"burn_in_epochs = {work.burn_in_epochs}: must be less than epochs = {work.epochs}, "
            "which leaves at least one sample"
        )


def posterior_delta(
    theta: Sequence[np.ndarray], samples: Sequence[Sequence[np.ndarray]], rho: float
) -> Arrays:
    """Compute Δ̂ = Σ̂⁻¹(θ − x̄) (eq. 4, Theorem 3) in float64, without JAX.

    Args:
        theta: θ, the server's arrays.
        samples: ℓ ≥ 1 lists of arrays like them.
        rho: Shrinkage ρ ≥ 0.
    Returns:
        Δ̂ with the shapes and dtypes of θ's arrays.
    Example:
        >>> [delta] = posterior_delta([np.ones(2)], [[np.array([x, 0.0])] for x in (-1, 0, 1)], 0.1)
        >>> delta.round(3)
        array([1. , 1.2])
    """
    rows = np.stack([_flatten(sample) for sample in samples])
    delta = solve(_flatten(theta), rows, fixed(rho)).delta
    ends = np.cumsum([array.size for array in theta])[:-1]
    return [
        part.reshape(array.shape).astype(array.dtype)
        for part, array in zip(np.split(delta, ends), theta, strict=True)
    ]


def _flatten(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(array).astype(np.float64) for array in arrays])


def reply(message: "Message", epoch: Epoch, num_examples: int, **metrics: float) -> "Message":
    """Answer a `train` message of the strategy `fedpa.flower.FedPA` with the model θ − Δ.

    The strategy computes Δ = θ − reply. Flower's mods and wrappers that clip or add noise do so,
    too. Arrays of integers are sent back unchanged.

    Args:
        message: From the strategy.
        epoch: Takes and returns the model's arrays in the order of the message's: those of
            `message.content["arrays"].to_torch_state_dict()`, or `.to_numpy_ndarrays()`.
        num_examples: Number of examples of the client, ≥ 0: its weight.
        metrics: Numbers to report, averaged over clients.
    Returns:
        The message to return from the app's `train` function.
    Example:
        >>> from flwr.clientapp import ClientApp
        >>> app = ClientApp()
        >>> @app.train()
        ... def train(message, context):
        ...     return reply(message, lambda arrays: train_epoch(arrays, data), len(data))
    """
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    check_integer("num_examples", num_examples, 0)
    arrays: Any = message.content["arrays"]
    config: Any = message.content["config"]
    work = read_work(config)
    theta = {name: arrays[name].numpy() for name in arrays}
    deltas = iter(client_delta(list(theta.values()), epoch, work))
    model = {
        name: np.asarray(array - next(deltas).astype(np.float64), array.dtype)
        if is_trained(array)
        else array
        for name, array in theta.items()
    }
    said = MetricRecord({"num-examples": num_examples, **{k: float(v) for k, v in metrics.items()}})
    sent = ArrayRecord({name: Array(array) for name, array in model.items()})
    return Message(RecordDict({"arrays": sent, "metrics": said}), reply_to=message)
