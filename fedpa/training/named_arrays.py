"""A tree's arrays by name (layers/0/weight), and as files: npz and safetensors."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.atomic_write import write_atomically
from fedpa.data.readers.npz import read_npz
from fedpa.errors import FedpaError, explain, refuse

FORMATS = (".npz", ".safetensors")


def path_name(path: Any, root: str = "") -> str:
    """Name an array by its path in the tree; a tree that is one array has the name `theta`."""
    name = jax.tree_util.keystr(path, simple=True, separator="/") or "theta"
    return f"{root}/{name}" if root else name


def name_arrays(tree: Any, root: str = "") -> dict[str, Any]:
    """Collect the tree's arrays by name. Two equal names are refused: files can't hold both."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(leaf):
            name = path_name(path, root)
            if name in found:
                raise FedpaError(
                    f"params: two arrays have the name {name} in files: keys with / must "
                    "not look like paths in the tree"
                )
            found[name] = leaf
    return found


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def to_numpy(leaf: Any) -> np.ndarray:
    """Convert an array to NumPy; random keys to their data."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def update_digest(digest: Any, tree: Any) -> int:
    """Add a tree's arrays and their names to a digest of `hashlib`.

    Returns:
        Their number of bytes.
    """
    size = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(leaf):
            array = np.asarray(to_numpy(leaf), order="C")
            if array.dtype == object:  # text
                array = np.frombuffer(repr(array.tolist()).encode(), np.uint8)
            place = jax.tree_util.keystr(path)
            digest.update(f"{place} {array.dtype} {array.shape}".strip().encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
            size += array.nbytes
    return size


def to_portable(leaf: Any) -> np.ndarray:
    """As `to_numpy`, but types that NumPy's files lack (bfloat16) become float32, exactly."""
    array = to_numpy(leaf)
    return (
        array.astype(np.float32) if array.dtype.kind == "V" or not array.dtype.isbuiltin else array
    )


def fill_tree(
    template: Any, arrays: Mapping[str, np.ndarray], root: str = "", row: Any = ()
) -> Any:
    """Fill the template with the arrays; refuses arrays that don't fit.

    row: index of a client, if arrays have one row per client.
    """

    def fill(path: Any, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        name = path_name(path, root)
        if name not in arrays:
            raise FedpaError(f"array {name} is missing: this belongs to another model or algorithm")
        array = arrays[name][row]
        wanted = to_numpy(leaf)
        if array.shape != wanted.shape:
            raise FedpaError(
                f"{name} has shape {list(array.shape)}: {list(wanted.shape)} is needed"
            )
        if array.dtype != wanted.dtype and array.dtype != to_portable(leaf).dtype:
            raise FedpaError(f"{name} has type {array.dtype}: {wanted.dtype} is needed")
        if is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array, wanted.dtype)

    return jax.tree_util.tree_map_with_path(fill, template)


def check_fits(model: Any, arrays: Mapping[str, np.ndarray], source: str) -> None:
    """Refuse arrays with other names, shapes or types than the model's, which may be shapes only.

    source: where the arrays come from, for messages.
    """
    own = {path_name(path): leaf for path, leaf in _leaves(model)}
    trained = {name for name, leaf in own.items() if _is_trained(leaf)}
    if set(arrays) - set(own) or trained - set(arrays):
        raise FedpaError(
            f"{source}: belongs to another model: it has {_list_names(arrays)}; this one needs "
            f"{_list_names(own)}"
        )
    for name, array in arrays.items():
        wanted = to_numpy(own[name]).shape if is_key(own[name]) else own[name].shape
        if array.shape != wanted:
            raise FedpaError(
                f"{source}: {name} has shape {list(array.shape)}: this model needs {list(wanted)}"
            )
        kind = np.dtype(np.uint32) if is_key(own[name]) else own[name].dtype
        if not _holds(kind, array.dtype):
            raise FedpaError(f"{source}: {name} has type {array.dtype}: this model needs {kind}")
        if jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(array).all():
            raise FedpaError(f"{source}: {name} has a value that is not finite")


def fill_model(model: Any, arrays: Mapping[str, np.ndarray], source: str) -> Any:
    """Fill the model with these arrays."""
    check_fits(model, arrays, source)

    def warm(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name not in arrays:
            return leaf
        if is_key(leaf):
            return fill_tree(leaf, {path_name(()): arrays[name]})
        return jnp.asarray(arrays[name], jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(warm, model)


def _leaves(model: Any) -> list[tuple[Any, Any]]:
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, kinds)]


def _is_trained(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact) and array.size > 0


def _holds(wanted: Any, given: Any) -> bool:
    """Whether numbers of one type can be cast to another: no fractions to integers, no complex
    numbers to real ones, only numbers.
    """
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    order = [
        next((place for place, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))
        for dtype in (given, wanted)
    ]
    return order[0] <= order[1] < len(kinds)


def _list_names(arrays: Mapping[str, Any]) -> str:
    names = sorted(arrays)
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def check_format(field: str, path: Path) -> None:
    if path.suffix not in FORMATS:
        raise refuse(field, str(path), f"must end in {' or '.join(FORMATS)}")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Write arrays by name; safetensors also stores strings about them."""
    if path.suffix == ".npz":
        write_npz(path, arrays)
        return
    from safetensors.numpy import save

    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_atomically(path, save(whole, metadata=dict(about)))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a file of parameters."""
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
        raise FedpaError(f"{path} is truncated or not a .safetensors file: {reason}") from None


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as np.savez does, with any names."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, array in arrays.items():
            with file.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
    write_atomically(path, content.getvalue())
