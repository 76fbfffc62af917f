"""A run's directory, file by file.

config.toml      everything resolved, and what the run was made with and of
metrics.jsonl    one record per round, appended as rounds end
checkpoints/     the last rounds whole, and the best (`fedpa.training.checkpoints`)
tensorboard/     the records again, for TensorBoard
params.npz       the parameters at the end
summary.json     what came of it; its being there says that the run is finished
clients.json     of a run over a network: its name, its clients and their sizes
"""

import contextlib
import json
import os
import shutil
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedpa.errors import FedpaError, refuse
from fedpa.training import checkpoints
from fedpa.training.checkpoints import CHECKPOINTS
from fedpa.training.config import ENVIRONMENT
from fedpa.training.history import History, Record, from_line, line
from fedpa.training.lock import LOCK, locked
from fedpa.training.loggers.logger import loggers
from fedpa.training.loggers.memory import MEMORY
from fedpa.training.named_arrays import named, portable
from fedpa.training.whole_files import PART, read_npz, write_atomically, write_npz

CONFIG, METRICS, PARAMS, SUMMARY = "config.toml", "metrics.jsonl", "params.npz", "summary.json"
INIT = "init.npz"
"""The parameters a warm start began with."""
TABLE, CURVES, REPORT = "table.csv", "curves.png", "report.html"
COMPARISON = "comparison.toml"
"""The words of the command that made a comparison."""
TRIALS = "trials"
"""Where a sweep has its runs."""
BURN_IN = "burn-in"
"""Where a comparison has the rounds that several of its runs share, by seed."""
CLIENTS = "clients.json"
_FILES = (METRICS, PARAMS, SUMMARY, INIT, MEMORY, CLIENTS)
_DIRECTORIES = (CHECKPOINTS, *loggers())
"""A logger's files are in a directory of its name."""


def fresh_directory(name: str, root: Path = Path("runs")) -> Path:
    """Make a directory `runs/<time>-<name>` that nobody else has."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for suffix in ["", *(f"-{k}" for k in range(2, 1000))]:
        with contextlib.suppress(FileExistsError), writing(root / (stem + suffix)):
            root.mkdir(parents=True, exist_ok=True)
            (root / (stem + suffix)).mkdir()
            return root / (stem + suffix)
    raise FedpaError(f"{str(root)!r} has no free name for {stem}: remove some runs")


def check_free(out: Path, overwrite: bool | None) -> None:
    """Refuse a path that can't become an output directory; overwrite: None if that's no choice."""
    check_writable(out)
    if not overwrite:
        instead = "choose another directory" + ("" if overwrite is None else " or give --overwrite")
        if is_run(out):
            raise FedpaError(
                f"out = {str(out)!r}: already holds a run: `fedpa resume {out}` goes on with it; "
                f"{instead}"
            )
        if _contents(out) or any((out / name).exists() for name in _FILES):
            what = "a comparison" if _contents(out) else "files of a run"
            raise FedpaError(f"out = {str(out)!r}: already holds {what}: {instead}")
    if not is_run(out):
        for name in _DIRECTORIES:
            if (out / name).exists():
                raise FedpaError(
                    f"out = {str(out)!r}: {name}/ in it is not of a run of ours: choose another "
                    "directory"
                )


def check_comparison(out: Path) -> None:
    """Refuse a directory for a comparison that holds something else than runs of one."""
    check_writable(out)
    if is_run(out):
        raise refuse("out", str(out), "holds a run: choose another directory")
    if not _runs_below(out):
        for name in (TABLE, CURVES, REPORT, TRIALS):
            if (out / name).exists():
                raise refuse("out", str(out), f"{name} is of others: choose another directory")


def check_writable(out: Path) -> None:
    parent = next(path for path in [out, *out.absolute().parents] if path.exists())
    if not parent.is_dir():
        raise FedpaError(f"out = {str(out)!r}: {str(parent)!r} is a file: give a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FedpaError(f"out = {str(out)!r}: can't be written: choose another directory")


def clear(out: Path) -> None:
    """Remove what earlier runs and comparisons wrote to `out`, and nothing else.

    The caller holds the lock of `out`; those of the runs below it are taken here.
    """
    with writing(out), contextlib.ExitStack() as stack:
        runs = _runs_below(out)
        for run in runs:
            stack.enter_context(locked(run))
        for run in runs:
            _remove([*_of_a_run(run), run / LOCK])
            for place in (run, run.parent):
                if place != out and not any(place.iterdir()):
                    place.rmdir()
        _remove(
            [
                *(out / name for name in (TABLE, CURVES, REPORT, COMPARISON)),
                *(_of_a_run(out) if is_run(out) else []),
            ]
        )


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def is_run(out: Path) -> bool:
    """Whether a run of ours lies there: others have files called config.toml, too."""
    try:
        return ENVIRONMENT in tomllib.loads((out / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False


def _of_a_run(run: Path) -> list[Path]:
    """A run's files; what says that it is one comes last, and so goes last."""
    names = [*_DIRECTORIES, *_FILES, *(path.name for path in run.glob(f"*{PART}"))]
    return [run / name for name in [*names, CONFIG] if (run / name).exists()]


def _runs_below(out: Path) -> list[Path]:
    """The runs of a comparison, and the rounds that some of them share."""
    found = [*sorted(out.glob(f"*/{CONFIG}")), *sorted(out.glob(f"{BURN_IN}/*/{CONFIG}"))]
    return [path.parent for path in found if is_run(path.parent)]


def _contents(out: Path) -> list[Path]:
    """What a comparison left."""
    own = [out / name for name in (TABLE, CURVES, REPORT) if (out / name).exists()]
    return [*own, *_runs_below(out)]


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise FedpaError(f"out = {str(out)!r}: can't be written: {error.strerror}") from None


def write_config(out: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """`config.toml`, whole or not at all."""
    with writing(out):
        text = tomli_w.dumps({**settings, ENVIRONMENT: environment})
        write_atomically(out / CONFIG, text.encode())


def read_config(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and environment of `config.toml`."""
    try:
        values = tomllib.loads((out / CONFIG).read_text("utf-8"))
    except FileNotFoundError:
        raise FedpaError(f"{str(out)!r} {_no_run(out)}") from None
    except NotADirectoryError:
        raise FedpaError(f"{str(out)!r} is a file: give the run's directory") from None
    except OSError as error:
        raise FedpaError(f"{out / CONFIG} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedpaError(f"{out / CONFIG} is not valid TOML: {error}") from None
    return values, values.pop(ENVIRONMENT, {})


def _no_run(out: Path) -> str:
    if not out.exists():
        return "does not exist"
    runs = [str(run) for run in _runs_below(out)]
    if runs:
        return f"is a comparison, not a run: its runs are {', '.join(runs)}"
    return f"holds no run: {CONFIG} is missing"


def write_metrics(out: Path, history: History) -> None:
    """All of `metrics.jsonl` anew."""
    with writing(out):
        text = "".join(line(record) for record in history)
        write_atomically(out / METRICS, text.encode())


def read_metrics(out: Path, torn: bool = False) -> History:
    """The records; `torn`: a last line that was cut is left out."""
    records = History()
    lines = (out / METRICS).read_text("utf-8").splitlines(keepends=True)
    for number, text in enumerate(lines, start=1):
        try:
            record = from_line(text)
            int(record["round"])
        except (ValueError, TypeError, KeyError, AttributeError):
            if torn and number == len(lines):
                break
            raise FedpaError(f"{out / METRICS}: line {number} is cut or no record") from None
        records.append(record)
    return records


def past(out: Path, branch: Path | None = None) -> History:
    """For a view: the records of the rounds that will not be run again."""
    for place in (out, branch):
        done = checkpoints.entries(place) if place is not None else []
        if place is not None and done:
            try:
                return History(read_metrics(place, torn=True)[: done[-1]])
            except (OSError, ValueError):  # written anew from the checkpoint, whatever is in it
                return History()
    return History()


def save_params(out: Path, params: Any) -> None:
    """`params.npz`: every array of the model by its place in the tree."""
    with writing(out):
        write_npz(out / PARAMS, arrays(params))


def arrays(params: Any) -> dict[str, np.ndarray]:
    """A model's arrays by their places in the tree."""
    return {name: portable(leaf) for name, leaf in named(params).items()}


def write_summary(out: Path, summary: Mapping[str, Any]) -> None:
    with writing(out):
        text = json.dumps(json.loads(line(summary)), indent=2)
        write_atomically(out / SUMMARY, (text + "\n").encode())


def read_summary(out: Path) -> Record | None:
    """What came of the run; None if it is not finished."""
    try:
        summary = json.loads((out / SUMMARY).read_text("utf-8"))
    except (FileNotFoundError, ValueError):  # a cut one is none: the end is written again
        return None
    except OSError as error:
        raise FedpaError(f"{out / SUMMARY} can't be read: {error.strerror}") from None
    return summary if isinstance(summary, dict) and {"round", "stopped"} <= set(summary) else None


def is_finished(out: Path, rounds: int) -> bool:
    """Whether a run of so many rounds is over."""
    summary = read_summary(out)
    return summary is not None and (bool(summary["stopped"]) or summary["round"] >= rounds)


def remove_end(out: Path) -> None:
    """What the end of a run left, when it is to go on."""
    with writing(out):
        for name in (SUMMARY, PARAMS):
            (out / name).unlink(missing_ok=True)


def stored_arrays(out: Path, which: str | int = "last") -> tuple[int, dict[str, np.ndarray]]:
    """(round, the model's trained arrays by name) of the end, the best or a numbered round.

    A run that is not finished is as far as its last checkpoint.
    """
    summary = read_summary(out)
    if which == "last":
        if summary is not None and (out / PARAMS).is_file():
            try:
                return summary["round"], read_npz(out / PARAMS)
            except FedpaError as error:
                warnings.warn(f"{error}; the last checkpoint is taken", stacklevel=2)
        stored = checkpoints.last(out)
    else:
        wanted = _best(out, summary) if which == "best" else int(which)
        stored = checkpoints.read(out, wanted) if wanted in checkpoints.entries(out) else None
    if stored is None:
        there = checkpoints.entries(out)
        have = f"there are {', '.join(map(str, there))}" if there else "there is none"
        raise FedpaError(f"{str(out)!r} has no checkpoint of {_called(which)}: {have}")
    return stored.round, {
        name.removeprefix("params/"): portable(array)
        for name, array in stored.arrays.items()
        if name.startswith("params/")
    }


def _best(out: Path, summary: Record | None) -> int | None:
    if summary is not None:
        return (summary.get("best") or {}).get("round")
    stored = checkpoints.last(out)
    return None if stored is None else stored.memory.get("best", {}).get("round")


def _called(which: str | int) -> str:
    return f"the {which} round" if isinstance(which, str) else f"round {which}"
