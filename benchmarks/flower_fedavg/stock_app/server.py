"""Flower's usual server; notes when each round ended."""

import itertools
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from stock_app.model import fresh

app = ServerApp()


@app.main()
def main(grid, context):
    ends = []

    def note(server_round, arrays):
        ends.append(time.perf_counter())

    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(fresh()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=note,
    )
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    Path(context.run_config["out"]).write_text(json.dumps(seconds))
