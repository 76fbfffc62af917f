"""The training that every engine must agree on; also a program, to run it elsewhere.

python -m tests.engines.federation OUT ENGINE [COORDINATOR PROCESSES ID]
"""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.algorithms.mime import momentum
from fedpa.data import from_mapping
from fedpa.engines import ENGINES, EngineOptions
from fedpa.engines.distributed import join
from fedpa.engines.options import Processes
from fedpa.objectives import Objective, least_squares
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(5, 2, 3, 6, 6))
LOCAL = LocalTraining(optax.sgd(0.05), batch_size=3, epochs=4)
SIDE = Server(server.sgd(0.5, 0.9))
METHODS = {
    "fedavg": fedpa.fedavg(LOCAL, SIDE),
    "fedpa": fedpa.fedpa(LOCAL, SIDE, rho=0.5, burn_in_rounds=1),
    "mime": fedpa.mime(LOCAL, SIDE, base=momentum(0.9)),
    "precision": fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE), every=1, epsilon=0.5),
    "robust": fedpa.scaffold(
        LOCAL, SIDE._replace(aggregation=server.centered_clipping()), population=22
    ),
    "scaffold": fedpa.scaffold(LOCAL, SIDE, population=22),
}


# Built once: what an engine has compiled for one test serves the next. Not when this is imported:
# processes join before they use JAX.
@functools.cache
def algorithm(method):
    return METHODS[method](Objective(least_squares.loss, like=CLIENTS["client-0000"]))


@functools.cache
def built(engine, **options):
    return ENGINES[engine](EngineOptions(**options))


def train(engine, method, examples=None, **options):
    data = from_mapping(CLIENTS)
    if examples is not None:
        read = data.examples
        data = data._replace(examples=lambda name: examples(name, read))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a client takes part")  # SCAFFOLD, in so few rounds
        return fedpa.train(
            algorithm(method),
            jnp.ones(3),
            data,
            rounds=2,
            clients_per_round=4,
            engine=built(engine, **options),
        )


def leaves(fit):
    """The server's state and every number of the records that is one of the run's."""
    numbers = [
        [record[key] for key in sorted(record) if key.startswith("train/")]
        for record in fit.history
    ]
    return [*map(np.asarray, jax.tree.leaves(fit.state)), np.array(numbers)]


def main(out, engine, *process):
    if process:
        coordinator, number, own = process
        join(Processes(coordinator, int(number), int(own)))
    arrays = {
        f"{method}-{place}": leaf
        for method in METHODS
        for place, leaf in enumerate(leaves(train(engine, method)))
    }
    if jax.process_index() == 0:
        np.savez(out, **arrays)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    main(*sys.argv[1:])
