"""Rows that concern only us: FedPA against FedAvg, the first round, the posterior delta."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.systems import OURS, run_json, run_once
from benchmarks.works import WORKS, Work, write_data, write_spec

Progress = Callable[[str], None]

# FedPA's share of a round does not depend on the number of clients: four of the CNN's will do.
COSTED = (
    WORKS["cnn"]._replace(name="cnn, 5 epochs", clients=4, epochs=5),
    WORKS["logistic-100"]._replace(name="logistic-100, 5 epochs", epochs=5),
)
COLD = ("logistic-100", "cnn")
"""In a quick run only the first."""


def methods(
    directory: Path, *, repeats: int, quick: bool, limit: float, say: Progress
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """FedPA and its control, FedAvg of as many local steps, in turn: work → method → processes."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for work in COSTED:
        data = write_data(work, directory)
        runs: dict[str, list[dict[str, Any]]] = {"fedavg": [], "fedpa": []}
        for _ in range(repeats):
            for method, reports in runs.items():
                spec = write_spec(work, data, quick=quick, method=method, rho=0.1)
                say(f"{work.name}: {method}")
                reports.append(run_once(OURS, spec, limit=limit))
        found[work.name] = runs
    return found


def first_rounds(
    directory: Path, works: list[Work], *, limit: float, say: Progress
) -> dict[str, dict[str, dict[str, Any]]]:
    """A fresh process with an empty compilation cache, then another with what that one left."""
    found = {}
    for work in works:
        spec = write_spec(work, write_data(work, directory), quick=True, rounds=1)
        with tempfile.TemporaryDirectory() as cache:
            environment = {"XDG_CACHE_HOME": cache}
            found[work.name] = {}
            for state in ("empty cache", "filled cache"):
                say(f"{work.name}: first round, {state}")
                found[work.name][state] = run_once(OURS, spec, limit=limit, environment=environment)
    return found


def deltas(*, quick: bool, limit: float, say: Progress) -> dict[str, Any]:
    """Measure the posterior delta of a million parameters, in a separate process."""
    say("posterior delta, a million parameters")
    command = [sys.executable, "-m", "benchmarks.posterior_delta", "--json"]
    return run_json(command + ["--quick"] * quick, limit=limit)
