"""A tree's arrays by name, for files: layers/0/weight."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError


def path_name(path: Any, root: str = "") -> str:
    """An array's place in its tree, as a text; a tree that is one array has the place `theta`."""
    name = jax.tree_util.keystr(path, simple=True, separator="/") or "theta"
    return f"{root}/{name}" if root else name


def named(tree: Any, root: str = "") -> dict[str, Any]:
    """The tree's arrays. Two with one name are refused: nobody could tell them apart again."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(leaf):
            name = path_name(path, root)
            if name in found:
                raise FedpaError(
                    f"params: two arrays have the name {name} in files: names with / in them must "
                    "not look like places in the tree"
                )
            found[name] = leaf
    return found


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def numbers(leaf: Any) -> np.ndarray:
    """An array's content in NumPy; of random keys, their words."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def portable(leaf: Any) -> np.ndarray:
    """As `numbers`; types that NumPy's files don't know (bfloat16) as float32, which is exact."""
    array = numbers(leaf)
    return (
        array.astype(np.float32) if array.dtype.kind == "V" or not array.dtype.isbuiltin else array
    )


def filled(template: Any, arrays: Mapping[str, np.ndarray], root: str = "", row: Any = ()) -> Any:
    """The template with the arrays in place of its own; refused where they don't fit.

    row: of each array, where it holds one for each of several clients.
    """

    def fill(path: Any, leaf: Any) -> Any:
        if not is_array(leaf) or leaf.size == 0:
            return leaf
        name = path_name(path, root)
        if name not in arrays:
            raise FedpaError(f"there is no array {name}: it is of another model or algorithm")
        array = arrays[name][row]
        wanted = numbers(leaf)
        if array.shape != wanted.shape:
            raise FedpaError(
                f"{name} has shape {list(array.shape)}: {list(wanted.shape)} is needed"
            )
        if array.dtype != wanted.dtype and array.dtype != portable(leaf).dtype:
            raise FedpaError(f"{name} is of type {array.dtype}: {wanted.dtype} is needed")
        if is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array, wanted.dtype)

    return jax.tree_util.tree_map_with_path(fill, template)
