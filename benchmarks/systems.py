"""The systems that are compared, the environments they run in, and one process of one of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import Others

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
VENVS = ROOT / ".bench"
OURS = "ours"


class System(NamedTuple):
    peer: str
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.peer} ({self.variant})" if self.variant else self.peer


def interpreter(peer: str) -> Path:
    if peer == OURS:
        return Path(sys.executable)
    scripts = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return VENVS / peer / scripts


def prepare(peer: str) -> str | None:
    """Make the peer's environment unless it is there. Returns why it could not be made."""
    if peer == OURS:
        return None
    pins = PEERS / f"{peer}.txt"
    ready = VENVS / peer / ".ready"
    if ready.exists() and ready.read_text() == pins.read_text():
        return None
    print(f"{peer}: installing {pins.relative_to(ROOT)} into .bench/{peer}", flush=True)
    commands = [
        [sys.executable, "-m", "venv", str(VENVS / peer)],
        [str(interpreter(peer)), "-m", "pip", "install", "--quiet",
         "--disable-pip-version-check", "-r", str(pins)],
    ]  # fmt: skip
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return _last_line(done.stderr) or f"{command[0]} ended with {done.returncode}"
    ready.write_text(pins.read_text())
    return None


def run_once(
    peer: str, spec: Path, *, limit: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One process: its report, or `{"failed": why}`.

    To the report are added `wall`, the seconds it took, and `others`, the part of the cores that
    other processes took meanwhile.
    """
    if peer == OURS:
        command = [str(interpreter(peer)), "-m", "benchmarks.ours", str(spec)]
    else:
        command = [str(interpreter(peer)), str(PEERS / f"{peer}_peer.py"), str(spec)]
    return run_json(command, limit=limit, environment=environment)


def run_json(
    command: list[str], *, limit: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The last line of what a command prints, as JSON."""
    started, others = time.perf_counter(), Others()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it has started ends with it
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return {"failed": f"not done in {limit:g} s"}
    except BaseException:  # the driver must stop: end everything it has started
        _end(process)
        raise
    wall = time.perf_counter() - started
    if process.returncode:
        return {"failed": _last_line(errors) or f"ended with {process.returncode}"}
    try:
        return json.loads(_last_line(out)) | {"wall": wall, "others": others.share()}
    except ValueError:
        return {"failed": f"printed no report, but {_last_line(out)[:80]!r}"}


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
