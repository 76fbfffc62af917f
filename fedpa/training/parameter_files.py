"""A model's parameters as files that others read: npz and safetensors; and starting from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError, explain, refuse
from fedpa.training import run_directory
from fedpa.training.named_arrays import filled, is_key, numbers, path_name
from fedpa.training.whole_files import read_npz, write_atomically, write_npz

FORMATS = (".npz", ".safetensors")


def export(
    directory: str | Path,
    path: str | Path,
    which: str | int = "last",
    overwrite: bool = False,
) -> int:
    """Write a run's parameters to a .npz or .safetensors file; the round they are of.

    which: `last`, `best` or the number of a round that has a checkpoint. Names are the arrays'
    places in the model's tree: layers/0/weight.
    """
    out, path = Path(directory), Path(path)
    check_format("path", path)
    if path.exists() and not overwrite:
        raise refuse("path", str(path), "exists already: choose another, or give --overwrite")
    settings, environment = run_directory.read_config(out)
    t, arrays = run_directory.stored_arrays(out, which_round("which", which))
    about = {
        "format": "fedpa",
        "version": environment.get("versions", {}).get("fedpa", "unknown"),
        "task": str(settings.get("task", "")),
        "method": str(settings.get("method", "")),
        "round": str(t),
    }
    run_directory.check_writable(path.parent)
    with run_directory.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, arrays, about)
    return t


def check_format(field: str, path: Path) -> None:
    if path.suffix not in FORMATS:
        raise refuse(field, str(path), f"must end in {' or '.join(FORMATS)}")


def write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """The arrays by name; safetensors takes texts about them along."""
    if path.suffix == ".npz":
        write_npz(path, arrays)
        return
    from safetensors.numpy import save

    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomically(path, save(whole, metadata=dict(about)))


def read(path: Path) -> dict[str, np.ndarray]:
    check_format("path", path)
    if path.suffix == ".npz":
        return read_npz(path)
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(path.read_bytes())
    except OSError as error:
        raise FedpaError(f"{path} can't be read: {explain(error)}") from None
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise FedpaError(f"{path} is cut or no .safetensors file: {reason}") from None


def initial(source: str, which: str = "last") -> dict[str, np.ndarray]:
    """What a warm start begins with: a run's parameters, or a file of them."""
    path = Path(source)
    if path.is_file():
        if which != "last":
            raise refuse(
                "init_round", which, f"{source} is a file: it has no rounds to choose from"
            )
        return read(path)
    if not path.is_dir():
        raise refuse("init", source, "is neither a run's directory nor a file of parameters")
    return run_directory.stored_arrays(path, which_round("init_round", which))[1]


def which_round(field: str, word: str | int) -> str | int:
    """`last`, `best` or the number of a round, which may be a word."""
    if word in ("last", "best"):
        return word
    if isinstance(word, str) and not word.isdecimal():
        raise refuse(field, word, "must be last, best or the number of a round")
    return int(word)


def check_fits(model: Any, arrays: Mapping[str, np.ndarray], source: str) -> None:
    """Refuse arrays that are not the model's, or of other shapes; its own may be shapes alone.

    source: what the arrays are of, as messages call it.
    """
    own = {path_name(path): leaf for path, leaf in _leaves(model)}
    trained = {name for name, leaf in own.items() if _is_trained(leaf)}
    if set(arrays) - set(own) or trained - set(arrays):
        raise FedpaError(
            f"{source}: is of another model: it has {_listed(arrays)}; {_listed(own)} are needed"
        )
    for name, array in arrays.items():
        wanted = numbers(own[name]).shape if is_key(own[name]) else own[name].shape
        if array.shape != wanted:
            raise FedpaError(
                f"{source}: {name} has shape {list(array.shape)}: this model needs {list(wanted)}"
            )
        kind = np.dtype(np.uint32) if is_key(own[name]) else own[name].dtype
        if not _holds(kind, array.dtype):
            raise FedpaError(f"{source}: {name} is of type {array.dtype}: this model needs {kind}")
        if jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(array).all():
            raise FedpaError(f"{source}: {name} holds a value that is not finite: all must be")


def warmed(model: Any, arrays: Mapping[str, np.ndarray], source: str) -> Any:
    """The model with these arrays in place of its own."""
    check_fits(model, arrays, source)

    def warm(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name not in arrays:
            return leaf
        if is_key(leaf):
            return filled(leaf, {path_name(()): arrays[name]})
        return jnp.asarray(arrays[name], jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(warm, model)


def _leaves(model: Any) -> list[tuple[Any, Any]]:
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, kinds)]


def _is_trained(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact) and array.size > 0


def _holds(wanted: Any, given: Any) -> bool:
    """Whether numbers of one type can stand for those of another: no fractions for integers, no
    complex numbers for real ones, nothing but numbers for any.
    """
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    order = [
        next((place for place, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))
        for dtype in (given, wanted)
    ]
    return order[0] <= order[1] < len(kinds)


def _listed(arrays: Mapping[str, Any]) -> str:
    names = sorted(arrays)
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
