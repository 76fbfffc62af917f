"""The server: Flower's, with another strategy."""

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from fedpa.flower import FedPA
from numpy_app.model import fresh

app = ServerApp()


@app.main()
def main(grid, context):
    settings = context.run_config
    strategy = FedPA(
        rho=settings["rho"],
        epochs=settings["epochs"],
        burn_in_rounds=settings["burn-in-rounds"],
        min_nodes=settings["min-nodes"],
    )
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(fresh()), num_rounds=settings["rounds"]
    )
    if settings["out"]:
        np.savez(settings["out"], *result.arrays.to_numpy_ndarrays())
