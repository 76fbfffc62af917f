"""Checkpoints: `checkpoints/<round>/` with `state.safetensors` and `state.json`.

One checkpoint contains everything of one round: server state, client states, history, states of
callbacks. It is an atomic write, so a kill at any time neither leaves half a checkpoint nor mixes
two rounds. `state.json` has a digest of itself and of every array; a checkpoint that was damaged
later is skipped, and the one before it is used.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save

from fedpa.atomic_write import remove_directory, write_directory
from fedpa.errors import FedpaError, explain
from fedpa.training.history import History, Record, from_line, line
from fedpa.training.loop import Snapshot
from fedpa.training.named_arrays import fill_tree, name_arrays, to_numpy, update_digest

CHECKPOINTS, ARRAYS, ABOUT = "checkpoints", "state.safetensors", "state.json"
FORMAT = 2
"""Format number, increased when older checkpoints can't be read any more."""
_ORBAX = "_CHECKPOINT_METADATA"
"""A file of format 1."""


class DamagedError(FedpaError):
    """A damaged checkpoint; the one before it is used instead."""


class _FormatError(FedpaError):
    """A checkpoint of another version."""


class Stored(NamedTuple):
    """A checkpoint as read from disk, its arrays by name."""

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


def save_checkpoint(out: Path, snapshot: Snapshot, settings: Mapping[str, Any]) -> None:
    """Write the checkpoint of the snapshot's round; one that exists is replaced.

    Raises:
        FedpaError: It can't be written; the message names the last good checkpoint.
    """
    snapshot = snapshot.stored
    path = checkpoint_path(out, snapshot.round)
    names, rows = _stack_clients(snapshot.client_states)
    trees = {"params": snapshot.params, "state": snapshot.state, "clients": rows}
    arrays = {
        name: to_numpy(leaf)
        for root, tree in trees.items()
        for name, leaf in name_arrays(tree, root).items()
    }
    kinds = {name: [str(array.dtype), _digest(array)] for name, array in arrays.items()}
    # The server's state has θ in it, too: arrays of the same content are stored once.
    stored = {digest: name for name, (_, digest) in reversed(kinds.items())}
    about = {
        "format": FORMAT,
        "round": snapshot.round,
        "arrays": kinds,
        "clients": names,
        "memory": snapshot.memory,
        "stopped": snapshot.stopped,
        "settings": settings,
        "history": [line(record) for record in snapshot.history[: snapshot.round]],
        "untold": None if snapshot.untold is None else line(snapshot.untold),
    }
    about = json.loads(json.dumps(about))
    try:
        with write_directory(path) as part:
            content = save({name: _make_storable(arrays[name]) for name in stored.values()})
            (part / ARRAYS).write_bytes(content)
            (part / ABOUT).write_text(json.dumps(about | {"digest": _digest_text(about)}))
    except OSError as error:
        good = list_checkpoints(out)
        left = (
            f"round {good[-1]} is the last good one" if good else "there is no earlier checkpoint"
        )
        raise FedpaError(
            f"the checkpoint of round {snapshot.round} can't be written to "
            f"{str(path.parent)!r}: {explain(error)}; {left}"
        ) from None


def checkpoint_path(out: Path, t: int) -> Path:
    return out / CHECKPOINTS / str(t)


def list_checkpoints(out: Path) -> list[int]:
    """List the rounds that have a checkpoint, in order, damaged or not."""
    root = out / CHECKPOINTS
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def prune_checkpoints(out: Path, keep: int, also: Iterable[int] = ()) -> None:
    """Remove all but the last `keep` checkpoints and those of the rounds in `also`."""
    for t in set(list_checkpoints(out)[:-keep]) - set(also):
        remove_directory(checkpoint_path(out, t))


def remove_checkpoints_after(out: Path, t: int) -> None:
    """Remove checkpoints of rounds that will be run again, and incomplete ones."""
    root = out / CHECKPOINTS
    for path in root.iterdir() if root.is_dir() else ():
        if not path.name.isdecimal() or int(path.name) > t:
            remove_directory(path)


def read_last_checkpoint(out: Path) -> Stored | None:
    """Read the last checkpoint that is not damaged, or None."""
    for t in reversed(list_checkpoints(out)):
        try:
            return read_checkpoint(out, t)
        except DamagedError as error:
            warnings.warn(f"{error}; it is skipped", stacklevel=2)
    return None


def read_checkpoint(out: Path, t: int) -> Stored:
    """Read the checkpoint of a round.

    Raises:
        DamagedError: Its content is not what was saved.
        FedpaError: It can't be read now, or has another format.
    """
    path = checkpoint_path(out, t)
    try:
        about = dict(json.loads((path / ABOUT).read_bytes()))
        digest = about.pop("digest")
        if about.get("format") != FORMAT:
            raise _another_format(path, about.get("format"))
        if digest != _digest_text(about):
            raise ValueError("its content is not what was saved")
        loaded = load_file(path / ARRAYS)
        dtypes = {name: np.dtype(dtype) for name, (dtype, _) in about["arrays"].items()}
        found = {}
        for name, array in loaded.items():
            array = array.view(dtypes[name])
            found[_digest(array)] = array
        if not all(digest in found for _, digest in about["arrays"].values()):
            raise ValueError("its content is not what was saved")
        return _check_stored(
            t,
            Stored(
                about["round"],
                {name: found[digest] for name, (_, digest) in about["arrays"].items()},
                about["clients"],
                History(from_line(text) for text in about["history"]),
                about["memory"],
                about["stopped"],
                about["settings"],
                None if about["untold"] is None else from_line(about["untold"]),
            ),
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if (path / _ORBAX).exists():
            raise _another_format(path, 1) from None
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: files are missing") from None
    except OSError as error:  # an error of disk or network: the checkpoint may be intact
        raise FedpaError(f"checkpoint {str(path)!r} can't be read: {explain(error)}") from None
    except (_FormatError, MemoryError):
        raise
    except Exception as error:  # damaged bytes make JSON, safetensors and NumPy raise many types
        reason = " ".join(str(error).split())[:300]
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: {reason}") from None


def _check_stored(t: int, stored: Stored) -> Stored:
    """Refuse content of other types, or of another round, than are written: a digest is no proof.

    Where a digest was made again, as by a program that edits checkpoints.
    """
    untold = [] if stored.untold is None else [stored.untold]
    rounds = [record["round"] for record in [*stored.history, *untold]]
    right = {
        "round": type(stored.round) is int and stored.round == t,
        "history": rounds == [*range(1, t + 1)],
        "clients": _is_list_of_text(stored.clients),
        "memory": isinstance(stored.memory, dict),
        "stopped": isinstance(stored.stopped, str | None),
        "settings": isinstance(stored.settings, dict),
    }
    rows = [len(a) for name, a in stored.arrays.items() if name.startswith("clients/") and a.ndim]
    right["clients"] &= set(rows) <= {len(stored.clients)}
    for field, is_right in right.items():
        if not is_right:
            raise ValueError(f"{field} is not what fedpa writes")
    return stored


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def restore_snapshot(stored: Stored, state: Any, params: Any, client_state: Any) -> Snapshot:
    """Put the stored arrays into trees like the templates."""
    states = {
        name: fill_tree(client_state, stored.arrays, "clients", row)
        for row, name in enumerate(stored.clients)
    }
    return Snapshot(
        stored.round,
        fill_tree(state, stored.arrays, "state"),
        fill_tree(params, stored.arrays, "params"),
        states,
        stored.history,
        stored.memory,
        stored.stopped,
        stored.untold,
    )


def _another_format(path: Path, number: Any) -> FedpaError:
    return _FormatError(
        f"checkpoint {str(path)!r} has format {number}, written by another version of fedpa; "
        f"this version reads {FORMAT}: start the run again"
    )


def _stack_clients(states: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Stack client states: names, and arrays with one row per client."""
    names = sorted(states)
    if not names:
        return [], ()
    return names, jax.tree.map(
        lambda *leaves: np.stack([to_numpy(leaf) for leaf in leaves]),
        *(states[name] for name in names),
    )


def _make_storable(array: np.ndarray) -> np.ndarray:
    """Make an array contiguous; types that safetensors and NumPy don't share become bytes."""
    array = np.asarray(array, order="C")
    shared = array.dtype.isbuiltin == 1 or array.dtype.name == "bfloat16"
    return array if shared else array.view(np.uint8)


def _digest(array: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    update_digest(digest, array)
    return digest.hexdigest()


def _digest_text(about: Mapping[str, Any]) -> str:
    text = json.dumps(about, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
