"""A posterior as one .safetensors file: its arrays, and as text what they are.

The text has the structure: names of types, and fields that are numbers or names. Only types of
`TYPES` are made when a file is read; a file can't name others.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError, explain, refuse
from fedpa.objectives.layer_inputs import Layer
from fedpa.posterior.density import Ensemble, Normal, Swag
from fedpa.posterior.posterior import Posterior, name_leaf, split_model
from fedpa.precision import ravel
from fedpa.precisions import (
    Dense,
    Diagonal,
    Eigenbasis,
    Kronecker,
    KroneckerPair,
    Layered,
    LowRank,
    Scalar,
)
from fedpa.precisions.gaussian import Gaussian
from fedpa.training.named_arrays import update_digest, write_arrays
from fedpa.training.provenance import arrays_fingerprint
from fedpa.types import Model

ENDING = ".safetensors"
KIND = "fedpa posterior"
FIELDS = {"kind", "density", "parameters", "over", "known", "converged"}
BROKEN = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What is raised for a file that is damaged."""
TYPES: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Dense, Diagonal, Eigenbasis, Gaussian, Kronecker, KroneckerPair),
        *(Layer, Layered, LowRank, Scalar, Ensemble, Normal, Swag),
    )
}


def save_posterior(posterior: Posterior, path: str | Path) -> None:
    """Write a posterior to a .safetensors file. Sites and records are not written.

    Args:
        posterior: The posterior.
        path: The file, which is replaced if it exists.
    Raises:
        FedpaError: The name has another ending, or the file can't be written.
    Example:
        >>> from fedpa.posterior.density import Normal
        >>> from fedpa.precisions import Diagonal
        >>> density = Normal(jnp.zeros(2), Diagonal(jnp.array([1.0, 4.0])))
        >>> save_posterior(fedpa.Posterior(density, np.zeros(2)), "posterior.safetensors")
        >>> load_posterior("posterior.safetensors", np.zeros(2)).sd.tolist()
        [1.0, 0.5]
    """
    path = _check_ending(path)
    arrays: dict[str, np.ndarray] = {}
    theta, known = split_model(posterior.model, posterior.over)
    density = posterior.density
    if isinstance(density, Normal):  # of a pytree, its parameters in their order
        density = density._replace(center=density.mean)
    about = {
        "kind": KIND,
        "density": _describe("density", density, arrays),
        "parameters": _list_parameters(theta),
        "over": None if posterior.over is None else list(posterior.over),
        "known": _fingerprint(known),
        "converged": posterior.converged,
    }
    about = json.loads(json.dumps(about))
    about["digest"] = _digest(about, arrays)
    write_arrays(path, arrays, {"fedpa": json.dumps(about)})


def load_posterior(path: str | Path, model: Model) -> Posterior:
    """Read a posterior that `save_posterior` or `fedpa posterior` wrote.

    Args:
        path: The file.
        model: The model it is a posterior of, e.g. `fedpa.load(directory).params`. Of its
            parameters only those are read that the posterior is not over, and they must be the
            same; a posterior over all of them takes any model of this structure.
    Returns:
        The posterior, without sites and records.
    Raises:
        FedpaError: The file is damaged or no posterior, or belongs to another model.
    Example:
        >>> from fedpa.posterior.density import Ensemble
        >>> posterior = fedpa.Posterior(Ensemble(jnp.ones((3, 2))), np.zeros(2, np.float32))
        >>> save_posterior(posterior, "posterior.safetensors")
        >>> load_posterior("posterior.safetensors", np.zeros(2, np.float32)).mean.tolist()
        [1.0, 1.0]
    """
    path = _check_ending(path)
    about, arrays = _read(path)
    over = None if about["over"] is None else tuple(map(str, about["over"]))
    theta, known = split_model(model, over)
    own = _list_parameters(theta)
    if own != about["parameters"]:
        differing = sorted(set(map(str, own.items())) ^ set(map(str, about["parameters"].items())))
        raise refuse(
            "path",
            str(path),
            f"is the posterior of another model: the parameters differ in {differing[0]}",
        )
    if about["known"] != _fingerprint(known):
        raise refuse(
            "path",
            str(path),
            "is the posterior of another model: its parameters besides "
            f"{', '.join(over or ())} differ. Give the trained model",
        )
    d = sum(math.prod(shape) for shape in own.values())
    try:
        density = _make(about["density"], arrays)
        if jnp.shape(density.mean) != (d,):
            raise ValueError(f"means of shape {jnp.shape(density.mean)}, of {d:,} parameters")
        if isinstance(density, Normal) and isinstance(density.precision, Layered):
            density = density._replace(center=ravel(theta)[1](density.center))
        shapes = jax.eval_shape(lambda key: (density.sd, density.sample(key, 1)), jax.random.key(0))
        if [shape.shape for shape in shapes] != [(d,), (1, d)]:
            raise ValueError(f"draws of shape {shapes[1].shape}, of {d:,} parameters")
    except Exception as error:  # arrays of other shapes than a type's make any of its parts fail
        reason = " ".join(str(error).split())[:300]
        raise FedpaError(f"{path} is damaged: {type(error).__name__}: {reason}") from None
    return Posterior(density, model, converged=bool(about["converged"]), over=over)


def _check_ending(path: str | Path) -> Path:
    if Path(path).suffix != ENDING:
        raise refuse("path", str(path), f"must end in {ENDING}")
    return Path(path)


def _fingerprint(known: Any) -> str | None:
    """Of the parameters that the posterior is not over; None if there are none."""
    arrays = eqx.filter(known, eqx.is_inexact_array_like)
    return arrays_fingerprint(arrays) if jax.tree.leaves(arrays) else None


def _list_parameters(theta: Any) -> dict[str, list[int]]:
    """The shape of each, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    return {name_leaf(path): list(np.shape(leaf)) for path, leaf in leaves}


def _describe(name: str, value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The value as JSON, its arrays put aside by name."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        arrays[name] = np.asarray(value)
        return {"array": name}
    kind = type(value).__name__
    if kind in TYPES:
        fields = zip(value._fields, value, strict=True)
        return {"type": kind} | {k: _describe(f"{name}.{k}", v, arrays) for k, v in fields}
    if isinstance(value, tuple | list):
        return [_describe(f"{name}.{place}", one, arrays) for place, one in enumerate(value)]
    return value


def _make(described: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(described, list):
        return tuple(_make(one, arrays) for one in described)
    if not isinstance(described, dict):
        return described
    if "array" in described:
        return jnp.asarray(arrays[described["array"]])
    fields = {k: _make(v, arrays) for k, v in described.items() if k != "type"}
    return TYPES[described["type"]](**fields)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get("fedpa", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise FedpaError(f"{path} can't be read: {explain(error)}") from None
    except (*BROKEN, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise FedpaError(f"{path} is truncated or not a {ENDING} file: {reason}") from None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise FedpaError(f"{path} is no posterior: fedpa posterior and save_posterior write them")
    digest = about.pop("digest", None)
    if digest != _digest(about, arrays) or set(about) != FIELDS:
        raise FedpaError(f"{path} is damaged: its content is not what was saved")
    over = about["over"]
    if not isinstance(about["parameters"], dict) or not isinstance(over, list | None):
        raise FedpaError(f"{path} is damaged: it does not list its parameters")
    return about, arrays


def _digest(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Hash all that the file has."""
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    update_digest(digest, dict(arrays))
    return digest.hexdigest()
