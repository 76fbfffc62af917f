"""A logger takes a copy of a run's records elsewhere: `metrics.jsonl` stays the truth.

What follows from that holds for all of them (`forgive`): one that can't be opened is refused
before training, one that fails later costs a warning and its copy, never the run.
"""

import contextlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, find_name, refuse
from fedpa.lazy import find_components

MEMORY = "loggers.json"
"""By what loggers find their run again when it is resumed."""

Write = Callable[[Mapping[str, Any]], None]
"""Takes one round's record: once per round, and once more at the end with {"round": the last one,
"test/…": …}."""

Open = Callable[
    [Path, Mapping[str, Any], Sequence[Mapping[str, Any]]], AbstractContextManager[Write]
]
"""(the run's directory, its resolved configuration, the records of rounds done before a resume)."""


class Logger(NamedTuple):
    summary: str
    check: Callable[[], None]
    """Refuses a library that is not there, before any work starts."""
    open: Open


def loggers() -> dict[str, Logger]:
    """Every logger by name: the files of this package that define `LOGGER`."""
    return find_components("fedpa.training.loggers", "LOGGER")


def check_loggers(names: Sequence[str]) -> None:
    """Refuse what is no logger, what is named twice, and what lacks its library."""
    known = loggers()
    for name in names:
        find_name("log", name, known, "logger")
    if len(set(names)) < len(names):
        raise refuse("log", list(names), "must name each logger once")
    for name in names:
        known[name].check()


def forgive(name: str, opened: Open) -> Open:
    """The same logger, which never ends a run that has begun: after an error it is left alone."""

    @contextlib.contextmanager
    def open_forgiving(
        out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
    ) -> Iterator[Write]:
        try:
            manager = opened(out, config, past)
            write = manager.__enter__()
        except FedpaError:
            raise
        except Exception as error:
            raise FedpaError(f"logger {name!r} can't be opened: {_reason(error)}") from error
        failed = False

        def give_up(error: Exception) -> None:
            nonlocal failed
            if not failed:
                failed = True
                warnings.warn(
                    f"logger {name!r} failed and is left alone from here on; metrics.jsonl has "
                    f"every round: {_reason(error)}",
                    stacklevel=3,
                )

        def attempt(record: Mapping[str, Any]) -> None:
            if not failed:
                try:
                    write(record)
                except Exception as error:
                    give_up(error)

        passing: BaseException | None = None
        try:
            yield attempt
        except BaseException as error:
            passing = error  # decides how the logger says that the run ended
            raise
        finally:
            kind, trace = (type(passing), passing.__traceback__) if passing else (None, None)
            try:
                manager.__exit__(kind, passing, trace)
            except Exception as error:
                give_up(error)

    return open_forgiving


def _reason(error: Exception) -> str:
    """One line, whatever the library makes of it."""
    return " ".join(str(error).split()) or type(error).__name__


def recall(out: Path, name: str) -> dict[str, Any]:
    """What this logger remembered, or nothing."""
    return _read(out).get(name, {})


def remember(out: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Keep these facts, in the place of earlier ones of this logger."""
    text = json.dumps({**_read(out), name: dict(facts)}, indent=2)
    write_atomically(out / MEMORY, (text + "\n").encode())


def _read(out: Path) -> dict[str, dict[str, Any]]:
    try:
        return json.loads((out / MEMORY).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FedpaError(
            f"{out / MEMORY} is cut or no JSON ({error}): remove it to start new logs"
        ) from None


def import_library(name: str, install: str) -> Any:
    """The library of this name; refused with what to install if it is not there."""
    missing = FedpaError(f"{name} is not installed: pip install {install!r} brings it")
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise missing from None
        raise FedpaError(f"{name} can't be imported: {error}") from error
    # W&B and MLflow write to directories of their own names. Where they are not installed, such a
    # directory beside the script is what an import finds: a package without a file.
    if getattr(found, "__file__", None) is None:
        raise missing
    return found


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn over rounds. NaN can: a gap says that there was no number."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "round" and isinstance(value, int | float) and not math.isinf(value)
    }


def select_new(record: Mapping[str, Any], told: Mapping[str, int]) -> dict[str, float]:
    """The record's scalars that a logger does not have, by the last round that it has of each.

    A run that was killed does its last rounds again, to the same numbers. Services can't take back
    what they were told, so they are not told again. By name, since the record that comes after the
    last round bears its number, too.
    """
    values = scalars(record)
    return {name: value for name, value in values.items() if record["round"] > told.get(name, 0)}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names; what is unset is left out."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found
