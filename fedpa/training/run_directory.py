"""A run's directory, file by file.

config.toml      all settings, resolved, and the environment
metrics.jsonl    one record per round, appended as rounds end
checkpoints/     the last rounds, and the best (`fedpa.training.checkpoint`)
tensorboard/     the records again, for TensorBoard
params.npz       the final parameters
summary.json     the result; it exists only if the run is finished
clients.json     for a run over a network: its name, its clients and their sizes
privacy.jsonl    for a private one: a line for each release

One process at a time writes to it. The lock is the operating system's, on an open file: it ends
with its process, and nothing needs to be cleaned up.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import tomli_w

from fedpa.atomic_write import PART, write_atomically
from fedpa.errors import FedpaError, explain, refuse
from fedpa.privacy.ledger import LEDGER
from fedpa.training.checkpoint import CHECKPOINTS, list_checkpoints
from fedpa.training.history import History, Record, from_line, is_count, is_number, is_unicode, line
from fedpa.training.loggers import LIBRARIES, MEMORY
from fedpa.training.named_arrays import name_arrays, to_portable, write_npz

CONFIG, METRICS, PARAMS, SUMMARY = "config.toml", "metrics.jsonl", "params.npz", "summary.json"
ENVIRONMENT = "environment"
"""The table of `config.toml` with versions, devices and fingerprints."""
INIT = "init.npz"
"""The initial parameters of a warm start."""
TABLE, LATEX, CURVES, REPORT = "table.csv", "table.tex", "curves.png", "report.html"
OF_COMPARISON = (TABLE, LATEX, CURVES, REPORT)
COMPARISON = "comparison.toml"
"""The arguments of the command that made a comparison."""
TRIALS = "trials"
"""Directory of a sweep's runs."""
BURN_IN = "burn-in"
"""Directory of the rounds that several runs of a comparison share, by seed."""
TUNING = "tuning"
"""Directory of its tuning runs."""
CLIENTS = "clients.json"
_FILES = (METRICS, PARAMS, SUMMARY, INIT, MEMORY, CLIENTS, LEDGER)
_DIRECTORIES = (CHECKPOINTS, *LIBRARIES)
"""A logger's files are in a directory of its name."""
LEFT_OUT = ("seconds", "digest")
"""Fields of records and of the summary that a digest leaves out."""
LOCK = ".lock"
PATIENCE = 10.0
"""Seconds to wait for the lock of a process that was killed with its command."""


class Recorded(NamedTuple):
    """A run as recorded in its directory."""

    out: Path
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    """Versions, devices and fingerprints."""
    summary: Record | None
    """None if it is not finished."""

    def is_finished(self, rounds: int) -> bool:
        """Whether a run of this many rounds is finished.

        A run that a callback ended before its last round is finished, even if more rounds are
        requested. One that a callback ended in its last round is not: that round is always
        evaluated, and a longer run might not have ended there.
        """
        if self.summary is None:
            return False
        done = self.summary["round"]
        early = self.summary["stopped"] and done < self.settings.get("rounds", rounds)
        return bool(early) or done >= rounds


def read_run(out: Path) -> Recorded:
    """Read settings, environment and summary of the run in the directory."""
    return Recorded(out, *read_config(out), read_summary(out))


def fresh_directory(name: str, root: Path = Path("runs")) -> Path:
    """Make a new directory `runs/<time>-<name>`."""
    # A user's task may be module:NAME, and not every file system allows a colon.
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name.replace(':', '.')}"
    for suffix in ["", *(f"-{k}" for k in range(2, 1000))]:
        with contextlib.suppress(FileExistsError), writing(root / (stem + suffix)):
            root.mkdir(parents=True, exist_ok=True)
            (root / (stem + suffix)).mkdir()
            return root / (stem + suffix)
    raise FedpaError(f"{str(root)!r} has no free name for {stem}: remove some runs")


def check_free(out: Path, overwrite: bool, remedy: str = "") -> None:
    """Refuse a path that can't become an output directory.

    remedy: the option that overwrites it, if there is one.
    """
    check_writable(out)
    if not overwrite:
        instead = "choose another directory" + (f" or give {remedy}" if remedy else "")
        if is_run(out):
            raise FedpaError(
                f"out = {str(out)!r}: already contains a run: `fedpa resume {out}` continues it; "
                f"{instead}"
            )
        has_comparison = _has_comparison(out)
        if has_comparison or any((out / name).exists() for name in _FILES):
            what = "a comparison" if has_comparison else "files of a run"
            raise FedpaError(f"out = {str(out)!r}: already contains {what}: {instead}")
    if not is_run(out):
        for name in _DIRECTORIES:
            if (out / name).exists():
                raise FedpaError(
                    f"out = {str(out)!r}: contains {name}/, which fedpa did not write: choose "
                    "another directory"
                )


def check_comparison(out: Path) -> None:
    """Refuse a directory for a comparison that contains something else."""
    check_writable(out)
    if is_run(out):
        raise refuse("out", str(out), "contains a run: choose another directory")
    if not _runs_below(out):
        for name in (*OF_COMPARISON, TRIALS):
            if (out / name).exists():
                raise refuse(
                    "out",
                    str(out),
                    f"contains {name}, which fedpa did not write: choose another directory",
                )


def check_writable(out: Path) -> None:
    parent = next(path for path in [out, *out.absolute().parents] if path.exists())
    if not parent.is_dir():
        raise FedpaError(f"out = {str(out)!r}: {str(parent)!r} is a file: give a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FedpaError(f"out = {str(out)!r}: can't be written: choose another directory")


def clear(out: Path) -> None:
    """Remove what earlier runs and comparisons wrote to `out`, and nothing else.

    The caller holds the lock of `out`; this takes the locks of the runs below it.
    """
    with writing(out), contextlib.ExitStack() as stack:
        runs = _runs_below(out)
        for run in runs:
            stack.enter_context(lock_directory(run))
        for run in runs:
            _remove([*_list_files(run), run / LOCK])
            for place in (run, run.parent):
                if place != out and not any(place.iterdir()):
                    place.rmdir()
        _remove(
            [
                *(out / name for name in (*OF_COMPARISON, COMPARISON)),
                *(_list_files(out) if is_run(out) else []),
            ]
        )


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def is_run(out: Path) -> bool:
    """Whether the directory contains a run: other programs have files config.toml, too."""
    try:
        return ENVIRONMENT in tomllib.loads((out / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False


def _list_files(run: Path) -> list[Path]:
    """List a run's files; those that identify it as a run come last, and are removed last."""
    names = [*_DIRECTORIES, *_FILES, *(path.name for path in run.glob(f"*{PART}"))]
    return [run / name for name in [*names, CONFIG] if (run / name).exists()]


def _runs_below(out: Path) -> list[Path]:
    """List the runs of a comparison, with shared burn-in and tuning runs."""
    below = ("*", f"{BURN_IN}/*", f"{TUNING}/{BURN_IN}/*", f"{TUNING}/*")
    found = [path.parent for place in below for path in sorted(out.glob(f"{place}/{CONFIG}"))]
    return [place for place in found if is_run(place)]


def _has_comparison(out: Path) -> bool:
    """Whether the directory has files of a comparison."""
    return any((out / name).exists() for name in OF_COMPARISON) or bool(_runs_below(out))


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise FedpaError(f"out = {str(out)!r}: can't be written: {explain(error)}") from None


def write_config(out: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Write `config.toml`."""
    _write_text(out / CONFIG, tomli_w.dumps({**settings, ENVIRONMENT: environment}))


def _write_text(path: Path, text: str) -> None:
    """Write a file of the run's directory, complete or not at all."""
    with writing(path.parent):
        write_atomically(path, text.encode())


def read_config(out: Path) -> tuple[Record, Record]:
    """Read settings and environment from `config.toml`."""
    try:
        values = tomllib.loads((out / CONFIG).read_text("utf-8"))
    except FileNotFoundError:
        raise FedpaError(f"{str(out)!r} {_no_run(out)}") from None
    except NotADirectoryError:
        raise FedpaError(f"{str(out)!r} is a file: give the run's directory") from None
    except OSError as error:
        raise FedpaError(f"{out / CONFIG} can't be read: {explain(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FedpaError(f"{out / CONFIG} is not valid TOML: {error}") from None
    environment = values.pop(ENVIRONMENT, {})
    versions = environment.get("versions", {}) if isinstance(environment, dict) else None
    if not isinstance(versions, dict):
        raise refuse(f"{out / CONFIG}: {ENVIRONMENT}", environment, "must be a table, as written")
    changed = environment.get("changed", [])
    if not isinstance(changed, list):
        raise refuse(f"{out / CONFIG}: {ENVIRONMENT}.changed", changed, "must be a list of strings")
    if not is_count(values.get("rounds", 0)):
        raise refuse(f"{out / CONFIG}: rounds", values["rounds"], "must be a whole number")
    return values, environment


def _no_run(out: Path) -> str:
    if not out.exists():
        return "does not exist"
    runs = [str(run) for run in _runs_below(out)]
    if runs:
        return f"is a comparison, not a run: its runs are {', '.join(runs)}"
    return f"contains no run: {CONFIG} is missing"


def write_metrics(out: Path, history: History) -> None:
    """Write all of `metrics.jsonl` again."""
    _write_text(out / METRICS, "".join(line(record) for record in history))


def read_metrics(out: Path, torn: bool = False) -> History:
    """Read the records; `torn`: an incomplete last line is left out."""
    records = History()
    lines = (out / METRICS).read_bytes().splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            record = from_line(text)
            if record["round"] != number:
                raise refuse("round", record["round"], f"must be {number}")
        except FedpaError as error:
            raise FedpaError(f"{out / METRICS}: line {number}: {error}") from None
        except (ValueError, RecursionError):
            if torn and number == len(lines):
                break
            raise FedpaError(f"{out / METRICS}: line {number} is truncated or not JSON") from None
        records.append(record)
    return records


def past(out: Path, branch: Path | None = None) -> History:
    """Read the records of rounds that will not be run again, for a display."""
    for place in (out, branch):
        done = list_checkpoints(place) if place is not None else []
        if place is not None and done:
            try:
                return History(read_metrics(place, torn=True)[: done[-1]])
            except (OSError, ValueError):  # rewritten from the checkpoint in any case
                return History()
    return History()


def save_params(out: Path, params: Any) -> None:
    """Write `params.npz`: every array of the model by its path in the tree."""
    with writing(out):
        arrays = name_arrays(params)
        write_npz(out / PARAMS, {name: to_portable(leaf) for name, leaf in arrays.items()})


def write_summary(out: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`."""
    _write_text(out / SUMMARY, json.dumps(json.loads(line(summary)), indent=2) + "\n")


def digest_result(out: Path, summary: Mapping[str, Any]) -> str:
    """Hash a run's records, parameters and summary, but for times: a resumed run has the same."""
    digest = hashlib.blake2b((out / PARAMS).read_bytes(), digest_size=16)
    for record in [*read_metrics(out), summary]:
        digest.update(line({k: v for k, v in record.items() if k not in LEFT_OUT}).encode())
    return digest.hexdigest()


def read_summary(out: Path) -> Record | None:
    """Read the result of the run; None if it is not finished."""
    try:
        summary: Record = json.loads((out / SUMMARY).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):  # truncated: it will be written again
        return None
    except OSError as error:
        raise FedpaError(f"{out / SUMMARY} can't be read: {explain(error)}") from None
    _check_summary(out / SUMMARY, summary)
    return summary


def _check_summary(path: Path, summary: Any) -> None:
    """Check the content of `summary.json`."""

    def check(field: str, value: Any, right: bool, expected: str) -> None:
        if not right:
            again = f"must be {expected}; without the file, `fedpa resume` writes it again"
            raise refuse(f"{path}: {field}", value, again)

    check("content", summary, isinstance(summary, dict), "an object")
    check("content", summary, is_unicode(summary), "text in UTF-8")
    t, stopped, best = (summary.get(name) for name in ("round", "stopped", "best"))
    check("round", t, is_count(t), "a whole number")
    known = "stopped" in summary and isinstance(stopped, str | None)
    check("stopped", stopped, known, "a string or null")
    check("best", best, isinstance(best, dict | None), "an object or null")
    if best is not None:
        metric, value, t = (best.get(name) for name in ("metric", "value", "round"))
        check("best.metric", metric, isinstance(metric, str), "a text")
        check("best.value", value, value is None or is_number(value), "a number or null")
        check("best.round", t, is_count(t), "a whole number")


def remove_end(out: Path) -> None:
    """Remove the final files of a run that is extended."""
    with writing(out):
        for name in (SUMMARY, PARAMS):
            (out / name).unlink(missing_ok=True)


@contextlib.contextmanager
def lock_directory(out: Path) -> Iterator[None]:
    """Lock the directory; refused while another process holds the lock."""
    try:
        file = (out / LOCK).open("a+")
    except OSError as error:
        raise FedpaError(f"out = {str(out)!r}: can't be written: {explain(error)}") from None
    with file:
        if not _take(file):
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise FedpaError(
                f"{str(out)!r} is being written by {owner}: wait until it ends, or end it"
            )
        with contextlib.suppress(OSError):  # the owner, for messages; a full disk may have no room
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def wait_for_lock(out: Path) -> None:
    """Wait until no process holds the lock; refused if that takes long."""
    end = time.monotonic() + PATIENCE
    while (out / LOCK).exists() and os.access(out / LOCK, os.W_OK):
        try:
            with lock_directory(out):
                return
        except FedpaError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


if os.name == "nt":
    import msvcrt

    def _take(file: IO[str]) -> bool:
        try:
            # A byte far after the text, which other processes must be able to read.
            os.lseek(file.fileno(), 2**20, os.SEEK_SET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True

else:
    import fcntl

    def _take(file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise FedpaError(
                f"{file.name}: can't be locked ({explain(error)}): the file system has no "
                "locks; choose a directory on another"
            ) from None
        return True
