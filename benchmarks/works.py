"""The works: what everybody is timed on, its data, and the parameters everybody starts from.

Data are synthetic but learnable, made once from a seed and given to all as the same bytes. Arrays
have JAX's layout (images NHWC, convolutions HWIO, dense layers in × out); peers that want another
turn them around when they load them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]

FEDERATED_PEERS = ("fedjax", "pfl", "flower")
STEP_PEERS = ("torch",)


class Work(NamedTuple):
    name: str
    model: str
    clients: int
    examples: int
    """Per client."""
    batch_size: int
    learning_rate: float
    peers: tuple[str, ...]
    tolerance: float
    """By how much the final losses of two systems may differ, relative to ours. Everyone shuffles
    differently, so equal work does not give equal bits."""
    warmup: int = 1
    rounds: int = 3
    """Timed rounds of a process."""
    quick_rounds: int = 2
    epochs: int = 1
    method: str = "fedavg"
    variants: tuple[str, ...] = ("",)
    """Ways in which a peer can do this work, each a separate row."""
    scored: str = "clients"
    """What a second is divided into for people: clients, or training steps."""

    @property
    def steps(self) -> int:
        """Local steps of a round, over all clients."""
        return self.clients * self.epochs * -(-self.examples // self.batch_size)


def _logistic(clients: int, rounds: int) -> Work:
    return Work(
        f"logistic-{clients}", "logistic", clients, 100, 10, 0.1, FEDERATED_PEERS, 0.01,
        rounds=rounds, quick_rounds=2 if clients == 1000 else 8, warmup=1 if clients == 1000 else 3,
    )  # fmt: skip


WORKS = {
    work.name: work
    for work in (
        Work("cnn", "cnn", 20, 200, 20, 0.01, FEDERATED_PEERS, 0.05),
        _logistic(10, 20),
        _logistic(100, 10),
        _logistic(1000, 4),
        Work("cnn-steps", "cnn", 1, 600, 20, 0.002, STEP_PEERS, 0.05, scored="steps"),
        Work("lstm-steps", "lstm", 1, 160, 16, 1.0, STEP_PEERS, 0.05, scored="steps"),
        Work(
            "bow-steps", "bow", 1, 3000, 100, 500.0, STEP_PEERS, 0.01,
            variants=("sparse", "dense"), scored="steps",
        ),
    )
}  # fmt: skip


def write_data(work: Work, directory: Path, seed: int = 0) -> Path:
    """The work's data and initial parameters as one .npz file; made only if it is not there."""
    path = directory / f"{work.model}-{work.clients}x{work.examples}-{seed}.npz"
    if not path.exists():
        rng = np.random.default_rng(seed)
        data, start = _DATA[work.model](rng, work.clients, work.examples), _START[work.model](rng)
        np.savez(path, **data, **{f"param/{name}": value for name, value in start.items()})
    return path


def write_spec(work: Work, data: Path, *, quick: bool, variant: str = "", **changes: Any) -> Path:
    """The spec that every system is given: one JSON file."""
    spec = {
        "work": work.name,
        "model": work.model,
        "variant": variant,
        "data": str(data),
        "batch_size": work.batch_size,
        "learning_rate": work.learning_rate,
        "epochs": work.epochs,
        "method": work.method,
        "warmup": work.warmup,
        "rounds": work.quick_rounds if quick else work.rounds,
        "seed": 0,
    } | changes
    label = "-".join(
        filter(None, [work.name, variant, spec["method"], f"{spec['epochs']}x{spec['rounds']}"])
    )
    path = data.parent / f"{label}.json"
    path.write_text(json.dumps(spec, indent=1))
    return path


def initial_parameters(arrays: Any) -> Arrays:
    """The `param/…` entries of a data file."""
    prefix = "param/"
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def _images(rng: np.random.Generator, clients: int, examples: int) -> Arrays:
    """62 blurred prototypes, and noise."""
    coarse = rng.normal(size=(62, 7, 7))
    prototypes = np.kron(coarse, np.ones((1, 4, 4)))[..., None]
    labels = rng.integers(0, 62, size=(clients, examples))
    noise = rng.normal(size=(clients, examples, 28, 28, 1))
    return {
        # Small numbers keep SGD away from the edge of stability, where losses tell nothing.
        "x": (0.3 * prototypes[labels] + 0.15 * noise).astype(np.float32),
        "y": labels.astype(np.int32),
    }


def _vectors(rng: np.random.Generator, clients: int, examples: int) -> Arrays:
    """Labels drawn from a softmax regression that is the same for all clients."""
    truth = rng.normal(size=(60, 10))
    x = rng.normal(size=(clients, examples, 60))
    labels = np.argmax(x @ truth + rng.gumbel(size=(clients, examples, 10)), axis=-1)
    return {"x": x.astype(np.float32), "y": labels.astype(np.int32)}


def _sentences(rng: np.random.Generator, clients: int, examples: int) -> Arrays:
    """Zipf's words; y is x moved by one."""
    words = np.arange(1, 10_004)
    chances = 1 / words
    text = rng.choice(words, size=(clients, examples, 21), p=chances / chances.sum())
    return {"x": text[..., :-1].astype(np.int32), "y": text[..., 1:].astype(np.int32)}


def _bags(rng: np.random.Generator, clients: int, examples: int) -> Arrays:
    """40 of Zipf's words; a tag is there if one of its two words is."""
    words = np.arange(10_000)
    chances = 1 / (words + 10.0)
    x = rng.choice(words, size=(clients, examples, 40), p=chances / chances.sum())
    y = np.zeros((clients, examples, 500), np.float32)
    owner = np.where(words < 1_000, words % 500, -1)[x]
    client, example, slot = np.nonzero(owner >= 0)
    y[client, example, owner[client, example, slot]] = 1
    return {"x": x.astype(np.int32), "y": y}


def _dense(rng: np.random.Generator, fan_in: int, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * np.sqrt(2 / fan_in)).astype(np.float32)


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _cnn_start(rng: np.random.Generator) -> Arrays:
    return {
        "conv1.w": _dense(rng, 9, 3, 3, 1, 32),
        "conv1.b": _zeros(32),
        "conv2.w": _dense(rng, 288, 3, 3, 32, 64),
        "conv2.b": _zeros(64),
        "dense1.w": _dense(rng, 9216, 9216, 128),
        "dense1.b": _zeros(128),
        "dense2.w": _dense(rng, 128, 128, 62),
        "dense2.b": _zeros(62),
    }


def _lstm_start(rng: np.random.Generator) -> Arrays:
    """Gates stand in the order input, forget, cell, output."""
    return {
        "embedding": (0.1 * rng.normal(size=(10_004, 96))).astype(np.float32),
        "lstm.wx": _dense(rng, 192, 96, 4 * 670),
        "lstm.wh": _dense(rng, 1340, 670, 4 * 670),
        "lstm.b": _zeros(4 * 670),
        "dense1.w": _dense(rng, 1340, 670, 96),
        "dense1.b": _zeros(96),
        "dense2.w": _dense(rng, 192, 96, 10_004),
        "dense2.b": _zeros(10_004),
    }


_DATA: dict[str, Callable[..., Arrays]] = {
    "cnn": _images,
    "logistic": _vectors,
    "lstm": _sentences,
    "bow": _bags,
}
_START: dict[str, Callable[..., Arrays]] = {
    "cnn": _cnn_start,
    "logistic": lambda _: {"w": _zeros(60, 10), "b": _zeros(10)},
    "lstm": _lstm_start,
    "bow": lambda _: {"w": _zeros(10_000, 500), "b": _zeros(500)},
}
