"""Run directories as training leaves them, made without training."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedpa.experiments.config import as_table, default_config, resolve
from fedpa.training import run_directory


def record(t: int, value: float, sampling: bool) -> dict[str, Any]:
    numbers = {
        "train/loss": 0.5,
        "train/delta_norm": 1.0 / t,
        "train/correction_norm": 0.3 if sampling else 0.0,
        "train/correction_cosine": 0.9 if sampling else 1.0,
        "train/rho": 0.1 if sampling else 0.0,
        "train/ess": 1.5 if sampling else 0.0,
        "train/rejected": 0,
        "comm/bytes_up": 1000,
        "comm/bytes_down": 2000,
        "eval/accuracy": value,
    }
    phase = "sampling" if sampling else "burn-in"
    return {"round": t, "phase": phase, "seconds": 0.5} | numbers


def made_run(
    directory: Path,
    method: str = "fedpa",
    seed: int = 0,
    rounds: int = 30,
    done: int | None = None,
    task: str = "digits",
    more: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run of `rounds` rounds of which `done` are there; all, and a summary, if not given.

    more: into every record; settings: over those of config.toml, tables by name.
    """
    config = as_table(resolve(default_config(task, method)))
    config |= {"seed": seed, "rounds": rounds}
    for name, value in (settings or {}).items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    directory.mkdir(parents=True)
    run_directory.write_config(directory, config, {"source": "abc"})
    noise = np.random.default_rng(seed)
    count = rounds if done is None else done
    values = [1 - 0.9 * np.exp(-t / 12) + 0.02 * noise.normal() for t in range(1, count + 1)]
    history = [
        record(t, float(value), method != "fedavg" and t > 15) | (more or {})
        for t, value in enumerate(values, start=1)
    ]
    if done is None:
        history[-1]["test/accuracy"] = history[-1]["eval/accuracy"]
        summary = {"round": rounds, "stopped": None}
        (directory / run_directory.SUMMARY).write_text(json.dumps(summary))
    lines = [json.dumps(r) + "\n" for r in history]
    (directory / run_directory.METRICS).write_text("".join(lines))
    return directory


def made_comparison(directory: Path, seeds: int = 2) -> Path:
    for method in ("fedavg", "fedpa", "mean-scaled"):
        for seed in range(seeds):
            made_run(directory / f"{method}-{seed}", method, seed)
    return directory
