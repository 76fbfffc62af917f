"""Two revisions of fedpa against each other: `python -m benchmarks.revisions OLD NEW`.

OLD and NEW are checkouts (`git worktree add /tmp/old REVISION`). For every row one process of each
stays open, and they take turns round by round: A B, B A, A B, … A machine that becomes slower or
faster affects both alike, so each pair's ratio new/old is more reliable than either time. Each
process is opened several times, since the placement of its memory affects its speed.

A row is slower if the whole 95 % interval of its median ratio is above 1.05.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.own import COSTED
from benchmarks.works import WORKS, Work, write_data, write_spec

SLOWER = 1.05
WARMUP = 2
METHODS = ("fedavg", "fedpa")


@dataclass
class Options:
    old: Path = field(metadata={"positional": "OLD"})
    """Checkout of the revision to compare with."""
    new: Path = field(default=Path(), metadata={"positional": "[NEW]"})
    """Checkout of the revision that is judged."""
    rows: str = ""
    """Only rows with one of these words in their name, with commas."""
    pairs: int = 24
    """Pairs of every row."""
    processes: int = 3
    """How often both processes are opened; the pairs are divided among them."""
    out: Path | None = None
    """Where the ratios are written as JSON."""


def rows() -> dict[str, Callable[[Path], Path | tuple[int, int]]]:
    """Each row's spec, written into a directory; a posterior delta's is its d and ℓ."""

    def spec(work: Work, **changes: Any) -> Callable[[Path], Path]:
        return lambda directory: write_spec(
            work, write_data(work, directory), quick=False, **changes
        )

    found: dict[str, Callable[[Path], Path | tuple[int, int]]] = {
        name: spec(work) for name, work in WORKS.items()
    }
    for work in COSTED:
        for method in METHODS:
            found[f"{work.name}, {method}"] = spec(work, method=method, rho=0.1)
    for ell in (5, 20, 100):
        found[f"posterior_delta of NumPy arrays, d = 10⁶, ℓ = {ell}"] = lambda _, ell=ell: (
            1_000_000,
            ell,
        )
    return found


@contextlib.contextmanager
def open_worker(checkout: Path, cache: Path, job: dict[str, Any]) -> Iterator[Callable[[], float]]:
    """A process of that checkout's code; each call does a round and returns its seconds."""
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, json.dumps(job)],
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": str(checkout.resolve()),
            "XDG_CACHE_HOME": str(cache / checkout.name),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def do_round() -> float:
        stdin.write("\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{checkout}: {job} ended with {process.wait()}")
        return float(line)

    try:
        yield do_round
    finally:
        stdin.close()
        process.kill()
        process.wait()


def take_turns(old: Path, new: Path, cache: Path, job: dict[str, Any], pairs: int) -> list[float]:
    """The ratios new/old of pairs of rounds."""
    ratios = []
    with open_worker(old, cache, job) as first, open_worker(new, cache, job) as second:
        for _ in range(WARMUP):
            first(), second()
        for pair in range(pairs):
            if pair % 2:
                after, before = second(), first()
            else:
                before, after = first(), second()
            ratios.append(after / before)
    return ratios


def median_interval(ratios: list[float], draws: int = 4000) -> tuple[float, float, float]:
    """The median and its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, size=(draws, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def main(options: Options) -> None:
    words = [word for word in options.rows.split(",") if word]
    table = Table(title="seconds of a round, new / old")
    for column in ("row", "median", "95 %", "pairs", ""):
        table.add_column(column)
    found, console = {}, Console(width=120)
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in rows().items():
            if words and not any(word in name for word in words):
                continue
            spec = make(Path(scratch))
            job: dict[str, Any]
            if isinstance(spec, Path):
                job = {"spec": str(spec), "rounds": WARMUP + options.pairs}
            else:
                job = {"delta": spec}
            started = time.perf_counter()
            ratios: list[float] = []
            for _ in range(options.processes):
                each = -(-options.pairs // options.processes)
                ratios += take_turns(options.old, options.new, Path(scratch), job, each)
            middle, low, high = median_interval(ratios)
            found[name] = {"median": middle, "low": low, "high": high, "ratios": ratios}
            verdict = "slower" if low > SLOWER else "faster" if high < 1 / SLOWER else ""
            row = (name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", str(len(ratios)), verdict)
            console.print(*row, f"({time.perf_counter() - started:.0f} s)")
            table.add_row(*row)
    console.print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def work(job: dict[str, Any]) -> None:
    """One process: a round whenever a line comes in."""
    import fedpa

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(seconds: float) -> None:
        answers.write(f"{seconds}\n")
        answers.flush()
        if not sys.stdin.readline():
            os._exit(0)

    sys.stdin.readline()
    if "delta" in job:
        d, ell = job["delta"]
        rng = np.random.default_rng(0)
        theta0 = rng.standard_normal(d, dtype=np.float32)
        samples = np.float32(1 / np.sqrt(0.1 * d)) * rng.standard_normal((ell, d), dtype=np.float32)
        while True:
            started = time.perf_counter()
            fedpa.posterior_delta(theta0, samples, 0.1)
            answer(time.perf_counter() - started)
    from benchmarks import ours  # that checkout's

    fit = fedpa.fit

    def report(event: Any) -> None:
        answer(event.record["seconds"])

    def fit_in_turns(*args: Any, **settings: Any) -> Any:
        return fit(*args, **settings, callbacks=[report])

    ours.fedpa.fit = fit_in_turns
    spec = json.loads(Path(job["spec"]).read_text())
    ours.run(spec | {"warmup": 0, "rounds": job["rounds"]})


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        from fedpa.experiments.cli.arguments import parse_words  # a worker's checkout may lack it

        main(parse_words(Options, sys.argv[1:], "python -m benchmarks.revisions"))
