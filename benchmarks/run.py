"""The driver: `make bench`, or `make bench QUICK=1`.

Ours and the peers take turns, one process at a time, several times over, so that a machine that
becomes slower or faster affects all of them alike.
"""

import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import own, show
from benchmarks.compare import Row, rows
from benchmarks.machine import describe, matmul_peak
from benchmarks.systems import OURS, ROOT, System, prepare, run_once
from benchmarks.works import FEDERATED_PEERS, STEP_PEERS, WORKS, Work, write_data, write_spec
from fedpa.errors import FedpaError
from fedpa.experiments.cli.arguments import parse_words

PEERS = (*FEDERATED_PEERS, *STEP_PEERS)
OWN = "own"
"""The name, among works, of the rows that concern only us."""


@dataclass
class Options:
    works: str = ",".join([*WORKS, OWN])
    """Which works, with commas; `own` is what concerns only us."""
    peers: str = ",".join(PEERS)
    """Which peers, with commas; empty for none."""
    quick: bool = False
    """Fewer rounds and repetitions: a few minutes."""
    repeats: int | None = None
    """Processes of every system on every work: 5, quick 1."""
    limit: float | None = None
    """Seconds that a process may take: 1,800, quick 90."""
    out: Path = field(default_factory=lambda: ROOT / "benchmarks")
    """Where results.json and results.png go."""


def main(options: Options) -> None:
    works, peers = choose_works(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running process ends, too
    repeats = options.repeats or (1 if options.quick else 5)
    limit = options.limit or (90.0 if options.quick else 1800.0)
    console = Console(width=150)
    available = [peer for peer in peers if _available(peer, console)]
    machine = describe()
    peaks = [matmul_peak()]
    results: dict[str, Any] = {"quick": options.quick, "repeats": repeats, "machine": machine}
    with tempfile.TemporaryDirectory(prefix="fedpa-bench-") as scratch:
        directory = Path(scratch)
        said = time.perf_counter()

        def say(text: str) -> None:
            console.print(f"[dim]{time.perf_counter() - said:6.0f} s  {text}[/dim]")

        results["works"] = {}
        for work in works:
            results["works"][work.name] = take_turns(
                work, available, directory, repeats, options.quick, limit, say
            )
            peaks.append(matmul_peak())
        if OWN in options.works.split(","):
            common = {"limit": limit, "say": say}
            results["methods"] = own.methods(
                directory, repeats=repeats, quick=options.quick, **common
            )
            cold = [WORKS[name] for name in own.COLD[: 1 if options.quick else None]]
            results["first_rounds"] = own.first_rounds(directory, cold, **common)
            results["deltas"] = own.deltas(quick=options.quick, **common)
    machine |= {"peak": max(peaks), "others": others_share(results["works"])}
    write(results, options.out)
    report(results, console)


def choose_works(options: Options) -> tuple[list[Work], list[str]]:
    works = [name for name in options.works.split(",") if name]
    peers = [name for name in options.peers.split(",") if name]
    for name, known in [(n, [*WORKS, OWN]) for n in works] + [(n, list(PEERS)) for n in peers]:
        if name not in known:
            raise FedpaError(f"{name!r} is not known: must be of {', '.join(known)}")
    return [WORKS[name] for name in works if name != OWN], peers


def systems_of(work: Work, peers: list[str]) -> list[System]:
    """Ours and every way in which the peers do this work."""
    theirs = [
        System(peer, variant) for peer in work.peers if peer in peers for variant in work.variants
    ]
    return [System(OURS), *theirs]


def take_turns(
    work: Work,
    peers: list[str],
    directory: Path,
    repeats: int,
    quick: bool,
    limit: float,
    say: own.Progress,
) -> dict[str, list[dict[str, Any]]]:
    """A B C D, A B C D, …: each system's reports by its name."""
    data = write_data(work, directory)
    systems = systems_of(work, peers)
    reports: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    for repeat in range(repeats):
        for system in systems:
            spec = write_spec(work, data, quick=quick, variant=system.variant)
            say(f"{work.name}: {system.name} ({repeat + 1} of {repeats})")
            reports[system.name].append(run_once(system.peer, spec, limit=limit))
    return reports


def others_share(found: dict[str, dict[str, list[dict[str, Any]]]]) -> float:
    """What others took of the cores, on average over the processes of this run."""
    shares = [
        run["others"]
        for reports in found.values()
        for name, runs in reports.items()
        for run in runs
        # Flower's workers are not this process's children, and would count as others.
        if name != "flower" and run.get("others") is not None
    ]
    return sum(shares) / len(shares) if shares else 0.0


def write(results: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if results["works"]:
        show.chart(compare_rows(results), out / "results.png")


def compare_rows(results: dict[str, Any]) -> dict[str, list[Row]]:
    return {name: rows(WORKS[name], found) for name, found in results["works"].items()}


def report(results: dict[str, Any], console: Console) -> None:
    machine = results["machine"]
    found = compare_rows(results)
    for name, some in found.items():
        console.print(show.make_table(WORKS[name], some, machine["peak"]))
    if any(WORKS[name].model == "logistic" for name in found):
        console.print(show.scaling_table(found))
    if "methods" in results:
        console.print(show.methods_table(results["methods"]))
        console.print(show.first_table(results["first_rounds"]))
        console.print(show.deltas_table(results["deltas"]))
    for line in show.machine_lines(machine):
        console.print(line)


def _available(peer: str, console: Console) -> bool:
    why = prepare(peer)
    if why is not None:
        console.print(f"{peer}: left out, its packages could not be installed: {why}")
    return why is None


if __name__ == "__main__":
    try:
        main(parse_words(Options, sys.argv[1:], "python -m benchmarks.run"))
    except FedpaError as error:
        raise SystemExit(f"error: {error}") from None
