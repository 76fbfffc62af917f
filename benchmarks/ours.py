"""Ours, by the peers' contract: `python -m benchmarks.ours SPEC.json` prints one line of JSON."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedpa
from benchmarks.models import MODELS
from benchmarks.works import initial_parameters

fedpa.configure()  # as the command does


def method_of(spec: dict[str, Any]) -> Any:
    """FedAvg, or FedPA that samples from the first round on, with as many local steps."""
    local = fedpa.LocalTraining(
        spec["learning_rate"], batch_size=spec["batch_size"], epochs=spec["epochs"]
    )
    server = fedpa.Server(fedpa.server.sgd(1.0))
    if spec["method"] == "fedavg":
        return fedpa.fedavg(local, server)
    return fedpa.fedpa(local, server, rho=spec["rho"], burn_in_rounds=0)


def mean_loss(loss: Any, params: Any, clients: dict[str, Any]) -> float:
    """Over all clients' data; clients are of one size."""
    one = jax.jit(lambda params, batch: jnp.mean(loss(params, batch, jax.random.key(0))))
    return float(np.mean([one(params, batch) for batch in clients.values()]))


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the spec through fedpa's public interface and its default engine."""
    arrays = dict(np.load(spec["data"]))
    ours = MODELS[spec["model"]](initial_parameters(arrays))
    clients = {
        str(i): ours.examples(arrays["x"][i], arrays["y"][i]) for i in range(len(arrays["x"]))
    }
    fit = fedpa.fit(
        fedpa.Objective(ours.loss, sparse=ours.sparse),
        ours.params,
        clients,
        method_of(spec),
        rounds=spec["warmup"] + spec["rounds"],
        clients_per_round=len(clients),
        seed=spec["seed"],
        progress=False,
    )
    seconds = [record["seconds"] for record in fit.history]
    return {
        "seconds": seconds[spec["warmup"] :],
        "warmup": seconds[: spec["warmup"]],
        "loss": mean_loss(ours.loss, fit.params, clients),
        "versions": {"fedpa": fedpa.__version__, "jax": jax.__version__},
    }


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(run(json.load(file))))
