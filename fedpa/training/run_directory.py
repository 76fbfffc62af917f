"""A run's directory: `config.toml`, `metrics.jsonl`, `params.npz`; and loading it back."""

import contextlib
import json
import math
import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError
from fedpa.tasks.task import task_named
from fedpa.training.callbacks import Callback, Event
from fedpa.training.config import RunConfig, read_toml, resolve, write_toml

CONFIG, METRICS, PARAMS = "config.toml", "metrics.jsonl", "params.npz"
TABLE, CURVES = "table.csv", "curves.png"


def fresh_directory(name: str, root: Path = Path("runs")) -> Path:
    """Make a directory `runs/<time>-<name>` that nobody else has."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for suffix in ["", *(f"-{k}" for k in range(2, 1000))]:
        with contextlib.suppress(FileExistsError), _writing(root / (stem + suffix)):
            root.mkdir(parents=True, exist_ok=True)
            (root / (stem + suffix)).mkdir()
            return root / (stem + suffix)
    raise FedpaError(f"{str(root)!r} has no free name for {stem}: remove some runs")


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a path that can't become an output directory."""
    parent = next(path for path in [out, *out.absolute().parents] if path.exists())
    if not parent.is_dir():
        raise FedpaError(f"out = {str(out)!r}: {str(parent)!r} is a file: give a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FedpaError(f"out = {str(out)!r}: can't be written: choose another directory")
    if not overwrite and _contents(out):
        raise FedpaError(
            f"out = {str(out)!r}: already holds a run: choose another directory or give --overwrite"
        )


def clear(out: Path) -> None:
    """Remove what earlier runs and comparisons wrote to `out`, and nothing else."""
    with _writing(out):
        ours = _contents(out)
        for path in ours:
            path.unlink()
        for child in {path.parent for path in ours} - {out}:
            if not any(child.iterdir()):
                child.rmdir()


def _contents(out: Path) -> list[Path]:
    """The files of ours in `out`: a run's, or a comparison's with those of its runs."""
    own = [out / name for name in (CONFIG, METRICS, PARAMS, TABLE, CURVES)]
    runs = [config.parent for config in sorted(out.glob(f"*/{CONFIG}"))]
    children = [run / name for run in runs for name in (CONFIG, METRICS, PARAMS)]
    return [path for path in [*own, *children] if path.is_file()]


def create(out: Path, config: RunConfig, overwrite: bool = False) -> None:
    """Make the directory and write `config.toml`. An earlier run's files are removed first."""
    check_free(out, overwrite)
    clear(out)
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / CONFIG, write_toml(config).encode())


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise FedpaError(f"out = {str(out)!r}: can't be written: {error.strerror}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


@contextlib.contextmanager
def metrics_file(out: Path) -> Iterator[Callback]:
    """A callback that appends each round's record to `metrics.jsonl`, flushed each round."""
    with (out / METRICS).open("w") as file:

        def callback(event: Event) -> None:
            file.write(_line(event.record))
            file.flush()

        yield callback


def replace_last_record(out: Path, record: dict[str, Any]) -> None:
    """The last line of `metrics.jsonl` anew, with what became known after it was written."""
    lines = (out / METRICS).read_text().splitlines(keepends=True)
    write_atomically(out / METRICS, "".join([*lines[:-1], _line(record)]).encode())


def _line(record: dict[str, Any]) -> str:
    return json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n"


def _json_value(value: Any) -> Any:
    """JSON has no NaN or infinity: null says that there is no number."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_params(out: Path, params: Any) -> None:
    """`params.npz`: every array of the model by its path in the tree."""
    part = out / (PARAMS + ".part")
    with part.open("wb") as file:
        np.savez(file, **_arrays(params))
    os.replace(part, out / PARAMS)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate((out / METRICS).read_text().splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise FedpaError(f"{out / METRICS}: line {number} is cut or no JSON") from None
    return records


def _read_params(path: Path) -> dict[str, np.ndarray]:
    try:
        # Opened here: np.load leaves a file it can't read open.
        with path.open("rb") as file, np.load(file) as stored:
            return dict(stored)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise FedpaError(f"{path} is cut or no file of parameters: {error}") from None


class Run(NamedTuple):
    params: Any
    """The task's model with the final parameters."""
    config: RunConfig
    metrics: list[dict[str, Any]]
    """One record per round."""


def load(directory: str | Path) -> Run:
    """A finished run: its model with the final parameters, configuration and metrics."""
    out = Path(directory)
    for name in (CONFIG, METRICS, PARAMS):
        if not (out / name).is_file():
            raise FedpaError(f"{str(out)!r} holds no finished run: {name} is missing")
    config = resolve(read_toml(out / CONFIG))
    problem = task_named(config.task).load(config.task_options)
    skeleton = problem.init(jax.random.key(config.seed))
    stored = _read_params(out / PARAMS)
    if set(stored) != set(_arrays(skeleton)):
        raise FedpaError(f"{out / PARAMS} does not hold the arrays of task {config.task!r}")
    for name, array in _arrays(skeleton).items():
        if stored[name].shape != array.shape:
            raise FedpaError(
                f"{out / PARAMS}: {name} has shape {list(stored[name].shape)}: the model of task "
                f"{config.task!r} has {list(array.shape)}; the data set may be another one"
            )
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(stored[_name(path)]) if _is_array(leaf) else leaf, skeleton
    )
    return Run(params, config, read_metrics(out))


def _arrays(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_name(path): np.asarray(leaf) for path, leaf in leaves if _is_array(leaf)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "theta"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)
