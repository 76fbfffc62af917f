"""A run's directory, file by file.

config.toml      everything resolved, and what the run was made with and of
metrics.jsonl    one record per round, appended as rounds end
checkpoints/     the last rounds whole, and the best (`fedpa.training.checkpoints`)
tensorboard/     the records again, for TensorBoard
params.npz       the parameters at the end
summary.json     what came of it; its being there says that the run is finished
"""

import contextlib
import json
import os
import shutil
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tomli_w

from fedpa.errors import FedpaError
from fedpa.training import checkpoints
from fedpa.training.checkpoints import CHECKPOINTS, path_name
from fedpa.training.config import ENVIRONMENT
from fedpa.training.history import History, Record, from_line, line
from fedpa.training.lock import LOCK
from fedpa.training.loggers.logger import loggers
from fedpa.training.loggers.memory import MEMORY

CONFIG, METRICS, PARAMS, SUMMARY = "config.toml", "metrics.jsonl", "params.npz", "summary.json"
INIT = "init.npz"
"""The parameters a warm start began with."""
TABLE, CURVES = "table.csv", "curves.png"
_OF_A_RUN = (CONFIG, METRICS, PARAMS, SUMMARY, INIT, MEMORY, CHECKPOINTS, *loggers(), LOCK)
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


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a path that can't become an output directory."""
    check_writable(out)
    if not overwrite and _contents(out):
        hint = f"`fedpa resume {out}` goes on with it; " if (out / CONFIG).is_file() else ""
        raise FedpaError(
            f"out = {str(out)!r}: already holds a run: {hint}choose another directory or give "
            "--overwrite"
        )


def check_writable(out: Path) -> None:
    parent = next(path for path in [out, *out.absolute().parents] if path.exists())
    if not parent.is_dir():
        raise FedpaError(f"out = {str(out)!r}: {str(parent)!r} is a file: give a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FedpaError(f"out = {str(out)!r}: can't be written: choose another directory")


def clear(out: Path) -> None:
    """Remove what earlier runs and comparisons wrote to `out`, and nothing else."""
    with writing(out):
        ours = _contents(out)
        for path in ours:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for child in {path.parent for path in ours} - {out}:
            if not any(child.iterdir()):
                child.rmdir()


def _contents(out: Path) -> list[Path]:
    """The files of ours in `out`: a run's, or a comparison's with those of its runs."""
    own = [out / name for name in (*_OF_A_RUN, TABLE, CURVES) if name != LOCK]
    runs = [config.parent for config in sorted(out.glob(f"*/{CONFIG}"))]
    children = [run / name for run in runs for name in _OF_A_RUN]
    return [path for path in [*own, *children] if path.exists()]


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise FedpaError(f"out = {str(out)!r}: can't be written: {error.strerror}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_config(out: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """`config.toml`, whole or not at all."""
    with writing(out):
        text = tomli_w.dumps({**settings, ENVIRONMENT: environment})
        write_atomically(out / CONFIG, text.encode())


def read_config(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and environment of `config.toml`."""
    try:
        values = tomllib.loads((out / CONFIG).read_text())
    except FileNotFoundError:
        raise FedpaError(f"{str(out)!r} holds no run: {CONFIG} is missing") from None
    except OSError as error:
        raise FedpaError(f"{out / CONFIG} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedpaError(f"{out / CONFIG} is not valid TOML: {error}") from None
    return values, values.pop(ENVIRONMENT, {})


def write_metrics(out: Path, history: History) -> None:
    """All of `metrics.jsonl` anew."""
    with writing(out):
        text = "".join(line(record) for record in history)
        write_atomically(out / METRICS, text.encode())


def read_metrics(out: Path, torn: bool = False) -> History:
    """The records; `torn`: a last line that was cut is left out."""
    records = History()
    lines = (out / METRICS).read_text().splitlines(keepends=True)
    for number, text in enumerate(lines, start=1):
        try:
            records.append(from_line(text))
        except ValueError:
            if torn and number == len(lines):
                break
            raise FedpaError(f"{out / METRICS}: line {number} is cut or no JSON") from None
    return records


def past(out: Path) -> History:
    """The records of the rounds that have a checkpoint: those a resumed run does not run again."""
    done = checkpoints.entries(out)
    if not done or not (out / METRICS).is_file():
        return History()
    return History(read_metrics(out, torn=True)[: done[-1]])


def save_params(out: Path, params: Any) -> None:
    """`params.npz`: every array of the model by its path in the tree."""
    with writing(out):
        save_arrays(out / PARAMS, arrays(params))


def save_arrays(path: Path, named: Mapping[str, np.ndarray]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez(file, **named)  # type: ignore[arg-type]
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        # Opened here: np.load leaves a file it can't read open.
        with path.open("rb") as file, np.load(file) as stored:
            return dict(stored)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise FedpaError(f"{path} is cut or no file of parameters: {error}") from None


def arrays(params: Any) -> dict[str, np.ndarray]:
    """A model's arrays by their places in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves if is_array(leaf)}


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def write_summary(out: Path, summary: Mapping[str, Any]) -> None:
    with writing(out):
        text = json.dumps(json.loads(line(summary)), indent=2)
        write_atomically(out / SUMMARY, (text + "\n").encode())


def read_summary(out: Path) -> Record | None:
    """What came of the run; None if it is not finished."""
    try:
        return json.loads((out / SUMMARY).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FedpaError(f"{out / SUMMARY} can't be read: {error}") from None


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
    if which == "last" and summary is not None and (out / PARAMS).is_file():
        return summary["round"], read_arrays(out / PARAMS)
    there = checkpoints.entries(out)
    if which == "best":
        wanted = _best(out, summary, there)
    elif which == "last":
        wanted = there[-1] if there else None
    else:
        wanted = int(which)
    if wanted not in there or wanted is None:
        have = f"there are {', '.join(map(str, there))}" if there else "there is none yet"
        raise FedpaError(f"{str(out)!r} has no checkpoint of {_called(which)}: {have}")
    found = checkpoints.read(out, wanted).arrays
    return wanted, {
        name.removeprefix("params/"): array
        for name, array in found.items()
        if name.startswith("params/")
    }


def _best(out: Path, summary: Record | None, there: list[int]) -> int | None:
    if summary is not None:
        return (summary.get("best") or {}).get("round")
    if not there:
        return None
    return checkpoints.read(out, there[-1]).memory.get("best", {}).get("round")


def _called(which: str | int) -> str:
    return f"the {which} round" if isinstance(which, str) else f"round {which}"
