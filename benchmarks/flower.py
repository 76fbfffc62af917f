"""Seconds per round on three loopback nodes: fedpa and Flower's own FedAvg, in turn.

The same model, as many examples, the same local work; one SuperLink and the same nodes for both.
Each node has one client in every round.

    python -m benchmarks.flower [--turns 2] [--rounds 6]
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.flower.deployment import Deployment, until

STOCK = Path(__file__).parent / "flower_fedavg"


def ours(there, out, rounds):
    """Seconds of each round, by phase; the first of a phase, which compiles, is left out."""
    settings = {
        "out": str(out),
        "rounds": rounds,
        "burn-in-rounds": rounds // 2,
        "clients-per-round": 3,
        "epochs": 5,
        "min-nodes": 3,
        "eval-every": rounds,
    }
    number = there.run(**settings)
    until(lambda: (out / "summary.json").is_file(), "our run", 900)
    there.ended(number)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for record in records:
        found.setdefault(record["phase"], []).append(record["seconds"])
    return {phase: seconds[1:] for phase, seconds in found.items()}


def stock(there, out, rounds):
    ours_app, there.app = there.app, STOCK
    try:
        number = there.run(out=str(out), rounds=rounds, epochs=5)
    finally:
        there.app = ours_app
    until(out.is_file, "Flower's run", 900)
    there.ended(number)
    return json.loads(out.read_text())[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    times = {"burn-in": [], "sampling": [], "Flower's FedAvg": []}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        with Deployment(root, node_config=one_client) as there:
            for turn in range(given.turns):
                for phase, seconds in ours(there, root / f"ours{turn}", given.rounds).items():
                    times[phase] += seconds
                times["Flower's FedAvg"] += stock(there, root / f"stock{turn}.json", given.rounds)
                print_table(times)


def one_client(number, of):
    return f'partition-id={number} num-partitions={of} clients="client-00{number}"'


def print_table(times):
    reference = statistics.median(times["Flower's FedAvg"])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(
            f"{name:16s} {middle:6.2f} s a round (median of {len(seconds)}, "
            f"{min(seconds):.2f} to {max(seconds):.2f}), ratio {middle / reference:.2f}"
        )
    print(flush=True)


if __name__ == "__main__":
    main()
