"""Checkpoints: `checkpoints/<round>/`, each whole by itself, written by orbax.

One entry holds everything of one round (server state, client states, history, what callbacks
remember), so no kill can mix two rounds. Orbax gives an entry its name when it is complete; a
digest of all its content tells one that was damaged later. What can't be read is passed over for
the entry before it.
"""

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError
from fedpa.training.history import History, from_line, line
from fedpa.training.snapshot import Snapshot

CHECKPOINTS = "checkpoints"
FORMAT = 1
"""Raised when older entries can't be read any more."""


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


def save(out: Path, snapshot: Snapshot, settings: Mapping[str, Any]) -> None:
    """Write the entry of the snapshot's round; an entry that is there already is replaced.

    Raises FedpaError where it can't be written. Entries of other rounds are not touched.
    """
    import orbax.checkpoint as ocp  # takes a second to import

    path = entry(out, snapshot.round)
    names, stacked = _clients(snapshot.client_states)
    trees = {"params": snapshot.params, "state": snapshot.state, "clients": stacked}
    arrays, aliases = _flattened(trees)
    records = snapshot.history[: snapshot.round]
    about = {
        "format": FORMAT,
        "round": snapshot.round,
        "phase": records[-1]["phase"] if records else None,
        "aliases": aliases,
        "clients": names,
        "memory": snapshot.memory,
        "stopped": snapshot.stopped,
        "settings": settings,
        "history": [line(record) for record in records],
    }
    try:
        about = json.loads(json.dumps(about))
    except (TypeError, ValueError) as error:
        raise FedpaError(f"what callbacks remember can't be kept: {error}") from None
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
    with _checkpointer(ocp) as checkpointer:
        checkpointer.save(path.absolute(), args=items)


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


def last(out: Path, repair: bool = True) -> Stored | None:
    """The last entry that can be read; None if there is none.

    repair: unreadable ones behind it are removed: they are of rounds that will be run again.
    """
    if repair:
        _remove_unfinished(out / CHECKPOINTS)
    for t in reversed(entries(out)):
        try:
            return read(out, t)
        except FedpaError as error:
            warnings.warn(f"{error}; it is passed over", stacklevel=2)
            if repair:
                shutil.rmtree(entry(out, t), ignore_errors=True)
    return None


def read(out: Path, t: int) -> Stored:
    """The entry of a round. Refused if it is not whole."""
    import orbax.checkpoint as ocp

    path = entry(out, t)
    try:
        with _checkpointer(ocp) as checkpointer:
            found = checkpointer.restore(
                path.absolute(),
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeRestore(), about=ocp.args.JsonRestore()
                ),
            )
        about = dict(found["about"])
        arrays = {name: np.asarray(array) for name, array in found["arrays"].items()}
        digest = about.pop("digest")
    except Exception as error:
        raise FedpaError(f"checkpoint {str(path)!r} can't be read: {_reason(error)}") from None
    if about["format"] != FORMAT:
        raise FedpaError(
            f"checkpoint {str(path)!r} is of format {about['format']}: this version reads {FORMAT}"
        )
    if digest != _digest(arrays, about):
        raise FedpaError(f"checkpoint {str(path)!r} is damaged: its content is not what was saved")
    arrays |= {name: arrays[same] for name, same in about["aliases"].items()}
    return Stored(
        about["round"],
        arrays,
        about["clients"],
        History(from_line(text) for text in about["history"]),
        about["memory"],
        about["stopped"],
        about["settings"],
    )


def restored(stored: Stored, state: Any, params: Any, client_state: Any) -> Snapshot:
    """The snapshot, with arrays put where those of the templates are."""
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
    )


def filled(template: Any, arrays: Mapping[str, np.ndarray], root: str, row: Any = ()) -> Any:
    """The template with the arrays in place of its own; refused where they don't fit."""

    def fill(path: Any, leaf: Any) -> Any:
        name = path_name(path, root)
        if name not in arrays:
            raise FedpaError(f"there is no array {name}: it is of another model or algorithm")
        array = arrays[name][row]
        wanted = np.shape(_numbers(leaf))
        if array.shape != wanted:
            raise FedpaError(f"{name} has shape {list(array.shape)}: {list(wanted)} is needed")
        if _is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array, jnp.result_type(leaf))

    return jax.tree_util.tree_map_with_path(fill, template)


def path_name(path: Any, root: str = "") -> str:
    """An array's place in its tree, as a text: layers/0/weight."""
    name = jax.tree_util.keystr(path, simple=True, separator="/") or "theta"
    return f"{root}/{name}" if root else name


def _flattened(trees: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays by name, each once; and for names of the same array the name it is stored under."""
    arrays: dict[str, np.ndarray] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    for root, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path, root)
            if id(leaf) in seen:
                aliases[name] = seen[id(leaf)]
            else:
                seen[id(leaf)] = name
                arrays[name] = np.asarray(_numbers(leaf))
    return arrays, aliases


def _clients(states: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Names, and the states in the same order as rows of arrays."""
    names = sorted(states)
    if not names:
        return [], ()
    return names, jax.tree.map(
        lambda *leaves: np.stack([np.asarray(_numbers(leaf)) for leaf in leaves]),
        *(states[name] for name in names),
    )


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__
