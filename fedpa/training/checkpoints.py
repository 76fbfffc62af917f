"""Checkpoints: `checkpoints/<round>/`, each whole by itself, written by orbax.

One entry holds everything of one round (server state, client states, history, what callbacks
remember), so no kill can mix two rounds. Orbax gives an entry its name when it is complete; a
digest of all its content tells one that was damaged later, which is passed over for the entry
before it.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.errors import FedpaError, explain
from fedpa.training.history import History, Record, from_line, line
from fedpa.training.named_arrays import filled, named, numbers
from fedpa.training.snapshot import Snapshot

CHECKPOINTS = "checkpoints"
FORMAT = 1
"""Raised when older entries can't be read any more."""


class DamagedError(FedpaError):
    """An entry that is not what was saved; the one before it will do."""


class Stored(NamedTuple):
    """An entry as it lies on disk, before anybody says what its arrays belong to."""

    round: int
    arrays: Mapping[str, np.ndarray]
    """`params/…`, `state/…` by path in the tree; `clients/…`, one row per client."""
    clients: list[str]
    history: History
    memory: dict[str, Any]
    stopped: str | None
    settings: dict[str, Any]
    """The configuration of the run that wrote it."""
    untold: Record | None
    """As in `Snapshot`."""


def save(out: Path, snapshot: Snapshot, settings: Mapping[str, Any]) -> None:
    """Write the entry of the snapshot's round; an entry that is there already is replaced.

    Where it can't be written, what was written of it is removed, and the error names the last good
    one.
    """
    import orbax.checkpoint as ocp  # takes a second to import

    snapshot = snapshot.stored
    path = entry(out, snapshot.round)
    names, stacked = _clients(snapshot.client_states)
    trees = {"params": snapshot.params, "state": snapshot.state, "clients": stacked}
    arrays, aliases = _flattened(trees)
    records = snapshot.history[: snapshot.round]
    about = {
        "format": FORMAT,
        "round": snapshot.round,
        "aliases": aliases,
        "clients": names,
        "memory": snapshot.memory,
        "stopped": snapshot.stopped,
        "settings": settings,
        "history": [line(record) for record in records],
        "untold": None if snapshot.untold is None else line(snapshot.untold),
    }
    about = json.loads(json.dumps(about))
    items = ocp.args.Composite(
        arrays=ocp.args.PyTreeSave(dict(arrays)),
        about=ocp.args.JsonSave(about | {"digest": _digest(arrays, about)}),
    )
    try:
        try:
            _write(ocp, path, items)
        except OSError:
            raise
        except Exception:  # orbax waits by the wall clock: one that jumps makes it give up
            _remove_unfinished(path.parent)
            _write(ocp, path, items)
    except Exception as error:  # of the disk, by way of Python, tensorstore or orbax
        with contextlib.suppress(OSError):
            _remove_unfinished(path.parent)
        good = entries(out)
        left = f"round {good[-1]} is the last good one" if good else "there is none before it"
        raise FedpaError(
            f"the checkpoint of round {snapshot.round} can't be written to "
            f"{str(path.parent)!r}: {_reason(error)}; {left}"
        ) from None


def _write(ocp: Any, path: Path, items: Any) -> None:
    if path.exists():
        shutil.rmtree(path)
    with _silent(), _checkpointer(ocp) as checkpointer:
        checkpointer.save(path.absolute(), args=items)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """One error says what went wrong, not a hundred lines of each of orbax's threads."""
    log = logging.getLogger("absl")
    level, hook, unraisable = log.level, threading.excepthook, sys.unraisablehook
    log.setLevel(logging.CRITICAL + 1)
    threading.excepthook = lambda *_: None
    sys.unraisablehook = lambda *_: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
        threading.excepthook, sys.unraisablehook = hook, unraisable


def entry(out: Path, t: int) -> Path:
    return out / CHECKPOINTS / str(t)


def entries(out: Path) -> list[int]:
    """The rounds that have an entry, in order; whether they can be read is another question."""
    root = out / CHECKPOINTS
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def prune(out: Path, keep: int, also: Iterable[int] = ()) -> None:
    """Remove all but the last `keep` entries and those of the rounds in `also`."""
    there = entries(out)
    for t in set(there[:-keep]) - set(also):
        with contextlib.suppress(OSError):
            shutil.rmtree(entry(out, t))


def last(out: Path) -> Stored | None:
    """The last entry that is whole; None if there is none. Damaged ones are passed over."""
    for t in reversed(entries(out)):
        try:
            return read(out, t)
        except DamagedError as error:
            warnings.warn(f"{error}; it is passed over", stacklevel=2)
    return None


def remove_after(out: Path, t: int) -> None:
    """Remove what is of rounds that will be run again, and what a kill left half-written."""
    _remove_unfinished(out / CHECKPOINTS)
    for later in entries(out):
        if later > t:
            shutil.rmtree(entry(out, later), ignore_errors=True)


def read(out: Path, t: int) -> Stored:
    """The entry of a round."""
    import orbax.checkpoint as ocp

    path = entry(out, t)
    try:
        with _silent(), _checkpointer(ocp) as checkpointer:
            found = checkpointer.restore(
                path.absolute(),
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeRestore(), about=ocp.args.JsonRestore()
                ),
            )
        about = dict(found["about"])
        arrays = {name: np.asarray(array) for name, array in found["arrays"].items()}
        digest = about.pop("digest")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: files are missing") from None
    except OSError as error:  # of the disk or the network: the entry may be sound
        raise FedpaError(f"checkpoint {str(path)!r} can't be read: {_reason(error)}") from None
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: {_reason(error)}") from None
    if about.get("format") != FORMAT:
        raise FedpaError(
            f"checkpoint {str(path)!r} is of format {about.get('format')}: this version reads "
            f"{FORMAT}"
        )
    if digest != _digest(arrays, about):
        raise DamagedError(
            f"checkpoint {str(path)!r} is damaged: its content is not what was saved"
        )
    arrays |= {name: arrays[same] for name, same in about["aliases"].items()}
    return Stored(
        about["round"],
        arrays,
        about["clients"],
        History(from_line(text) for text in about["history"]),
        about["memory"],
        about["stopped"],
        about["settings"],
        None if about.get("untold") is None else from_line(about["untold"]),
    )


def restored(stored: Stored, state: Any, params: Any, client_state: Any) -> Snapshot:
    """The snapshot: the stored arrays in trees like the templates."""
    states = {
        name: filled(client_state, stored.arrays, "clients", place)
        for place, name in enumerate(stored.clients)
    }
    return Snapshot(
        stored.round,
        filled(state, stored.arrays, "state"),
        filled(params, stored.arrays, "params"),
        states,
        stored.history,
        stored.memory,
        stored.stopped,
        stored.untold,
    )


def _flattened(trees: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays by name, each once; and for names of the same array the name it is stored under.

    Arrays without elements are left out: orbax does not take them, and there is nothing in them.
    """
    arrays: dict[str, np.ndarray] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    for root, tree in trees.items():
        for name, leaf in named(tree, root).items():
            if id(leaf) in seen:
                aliases[name] = seen[id(leaf)]
            elif leaf.size:
                seen[id(leaf)] = name
                arrays[name] = numbers(leaf)
    return arrays, aliases


def _clients(states: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Names, and the states in the same order as rows of arrays."""
    names = sorted(states)
    if not names:
        return [], ()
    return names, jax.tree.map(
        lambda *leaves: np.stack([numbers(leaf) for leaf in leaves]),
        *(states[name] for name in names),
    )


def _digest(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _checkpointer(ocp: Any) -> Any:
    """Of this process alone: where several run together, the first writes for all."""
    mine = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=mine, active_processes={mine}, barrier_sync_key_prefix=f"fedpa{mine}"
    )
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
        ),
        multiprocessing_options=alone,
    )


def _remove_unfinished(root: Path) -> None:
    """What a process that ended in the middle of writing left behind."""
    if root.is_dir():
        for path in root.iterdir():
            if not path.name.isdecimal():
                shutil.rmtree(path, ignore_errors=True)


def _reason(error: Exception) -> str:
    if re.search(r"RESOURCE_EXHAUSTED|No space left|ENOSPC", str(error)):
        return os.strerror(errno.ENOSPC)
    if isinstance(error, OSError):
        return explain(error)
    return " ".join(str(error).split())[:300] or type(error).__name__
