"""FedJAX: FedAvg rounds with its own algorithm and back end. `python fedjax_peer.py SPEC.json`."""

import json
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

# Of jax.tree_map, which FedJAX calls on every client.
warnings.filterwarnings("ignore", category=DeprecationWarning)


def cnn(batch: dict[str, Any]) -> jax.Array:
    x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID", name="conv1")(batch["x"]))
    x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID", name="conv2")(x))
    x = hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)
    x = jax.nn.relu(hk.Linear(128, name="dense1")(hk.Flatten()(x)))
    return hk.Linear(62, name="dense2")(x)


def logistic(batch: dict[str, Any]) -> jax.Array:
    return hk.Linear(10, name="dense")(batch["x"])


def start(model: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The initial parameters under haiku's names."""
    if model == "logistic":
        return {"dense": {k: jnp.asarray(arrays[f"param/{k}"]) for k in ("w", "b")}}
    layers = ("conv1", "conv2", "dense1", "dense2")
    return {
        layer: {k: jnp.asarray(arrays[f"param/{layer}.{k}"]) for k in ("w", "b")}
        for layer in layers
    }


def model_of(forward: Any, x: np.ndarray) -> fedjax.Model:
    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(forward),
        sample_batch={"x": x[0][:1], "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, out: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], out),
        eval_metrics={"loss": fedjax.metrics.CrossEntropyLoss()},
    )


def main(path: str) -> None:
    with open(path) as file:
        spec = json.load(file)
    arrays = dict(np.load(spec["data"]))
    x, y = arrays["x"], arrays["y"]
    data = fedjax.InMemoryFederatedData(
        {f"{i}".encode(): {"x": x[i], "y": y[i]} for i in range(len(x))}
    )
    model = model_of({"cnn": cnn, "logistic": logistic}[spec["model"]], x)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(spec["learning_rate"]),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(spec["batch_size"], num_epochs=spec["epochs"]),
    )
    state = algorithm.init(start(spec["model"], arrays))
    key = jax.random.PRNGKey(spec["seed"])
    seconds = []
    for _ in range(spec["warmup"] + spec["rounds"]):
        key, *keys = jax.random.split(key, 1 + len(x))
        cohort = [(name, client, k) for (name, client), k in zip(data.clients(), keys, strict=True)]
        started = time.perf_counter()
        state, _ = algorithm.apply(state, cohort)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
    batches = fedjax.padded_batch_federated_data(data, batch_size=len(x[0]))
    report = {
        "seconds": seconds[spec["warmup"] :],
        "warmup": seconds[: spec["warmup"]],
        "loss": float(fedjax.evaluate_model(model, state.params, batches)["loss"]),
        "versions": {name: version(name) for name in ("fedjax", "jax", "dm-haiku")},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
