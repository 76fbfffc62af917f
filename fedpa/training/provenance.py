"""What a run was made with and of: versions, revision, data; and what is different now.

A resumed run is the uninterrupted one, bit for bit, only where all this is the same.
"""

import functools
import hashlib
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate
from fedpa.data.federated import FederatedData
from fedpa.objectives.client_data import ClientData
from fedpa.training.loggers.logger import flatten
from fedpa.types import Params

PACKAGES = ("fedpa", "jax", "jaxlib", "numpy", "optax", "equinox", "blackjax")
"""Those whose code a run's numbers come from."""
LOOKED_AT = 2**23
"""Bytes of a federation's examples that its fingerprint is taken of."""
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")
_PHASES = 10_000
"""Rounds whose phases tell one switch from another."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from its sources, not installed
            found[name] = "unknown"
    return found


def environment(**fingerprints: str) -> dict[str, Any]:
    """The table `[environment]` of `config.toml`."""
    found: dict[str, Any] = {
        "versions": versions(),
        "source": source_fingerprint(),
        "machine": machine(),
    }
    known = revision(Path.cwd())
    return found | ({} if known is None else {"revision": known}) | fingerprints


def machine() -> dict[str, Any]:
    """What decides how JAX computes here, to the last digit."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    } | {name: str(getattr(jax.config, name)) for name in _JAX_SETTINGS}


def source_fingerprint() -> str:
    """Of the code that numbers come from; a version says little about one under development."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[:2] not in [("experiments", name) for name in ("cli", "report", "studies")]:
            digest.update(f"{place.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def revision(directory: Path) -> str | None:
    """The git revision of the directory, with `-dirty` if files differ; None without git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None if said.returncode == 0 else None


def data_fingerprint(federations: Mapping[str, FederatedData | None]) -> str:
    """Tells whether the data is what it was: all ids and sizes, and what clients hold.

    What is packed in memory is looked at as a whole. Of what is read lazily the examples of clients
    in a fixed shuffled order are looked at, up to some megabytes: reading all would take as long as
    a run.
    """
    digest = hashlib.blake2b(f"{LOOKED_AT}".encode(), digest_size=16)
    for split, data in federations.items():
        digest.update(split.encode())
        if data is None:
            continue
        for name in data.ids:
            digest.update(f"{name}\0{data.num_examples(name)}\0".encode())
        if data.packed is not None and data.packed.load == data.examples:
            _add(digest, data.packed.arrays)  # all of them in a moment
            continue
        left = LOOKED_AT
        for place in np.random.default_rng(0).permutation(len(data.ids)).tolist():
            left -= _add(digest, data.examples(data.ids[place]))
            if left <= 0:
                break
    return digest.hexdigest()


def arrays_fingerprint(tree: Any) -> str:
    """Of a model's parameters."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, tree)
    return digest.hexdigest()


def program_fingerprint(algorithm: Algorithm, theta: Params, data: FederatedData) -> str:
    """Of what clients and server will compute, with all settings, as JAX sees it.

    A function can't be compared with one of last week; the program traced from it can.
    """
    some = next((name for name in data.ids if data.num_examples(name) > 0), data.ids[0])
    examples = jax.tree.map(lambda x: np.asarray(x)[:1], data.examples(some))

    def whole_round(client: ClientUpdate, t: Any, theta: Params, examples: Any, key: Any) -> Any:
        state = algorithm.init(theta)
        one = ClientData(examples, jnp.asarray(1, jnp.int32))

        def sent(client: ClientUpdate, message: Any) -> Any:
            out = client(message, one, algorithm.client_init(theta), key)
            empty = algorithm.aggregation.init(out.result, out.weight)
            total, _ = algorithm.aggregation.add(empty, out.result, out.weight)
            return algorithm.aggregation.value(total)

        if algorithm.inquiry is not None:
            answer = sent(algorithm.inquiry.client, algorithm.inquiry.broadcast(state))
            state = algorithm.inquiry.receive(state, answer)
        return algorithm.server(state, sent(client, algorithm.broadcast(state, t)), t)

    digest = hashlib.blake2b(digest_size=16)
    digest.update(" ".join(algorithm.phase(t) for t in range(_PHASES)).encode())
    for phase, client in algorithm.clients.items():
        traced = jax.make_jaxpr(functools.partial(whole_round, client))(
            jnp.asarray(0), theta, examples, jax.random.key(0)
        )
        digest.update(phase.encode())
        # Functions are printed with their addresses, which are another run's.
        digest.update(_ADDRESS.sub("", str(traced.jaxpr)).encode())
        _add(digest, _constants(traced))
    return digest.hexdigest()


def _constants(traced: Any) -> list[Any]:
    """All arrays that a program has in it, also those of the programs in it."""
    found = list(traced.consts)
    for equation in traced.jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=_is_program):
            if isinstance(value, jax.extend.core.ClosedJaxpr):
                found += _constants(value)
            elif isinstance(value, jax.extend.core.Jaxpr):
                found += _constants(jax.extend.core.ClosedJaxpr(value, []))
    return found


def _is_program(value: Any) -> bool:
    return isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)


def _add(digest: Any, tree: Any) -> int:
    """Add a tree's arrays, with their places; how many bytes there were."""
    size = 0
    leaves, structure = jax.tree.flatten(tree)
    for place, leaf in zip(_places(structure), leaves, strict=True):
        if not isinstance(leaf, jax.Array | np.ndarray):
            continue
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        if array.dtype == object:  # text
            array = np.frombuffer(repr(array.tolist()).encode(), np.uint8)
        digest.update(f"{place} {_named(array.dtype)} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        size += array.nbytes
    return size


_named = functools.lru_cache(maxsize=64)(str)  # NumPy puts a dtype's name together every time


@functools.lru_cache(maxsize=8)
def _places(structure: Any) -> list[str]:
    """Of a tree's leaves. Clients have the same."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], left_out: Sequence[str] = ()
) -> list[str]:
    """Each field that differs, as a text: `hyperparameters.rho was 0.1 and is 0.2`.

    left_out: fields and tables that don't matter.
    """
    before, after = flatten(then), flatten(now)
    names = [
        name
        for name in dict.fromkeys([*before, *after])
        if not any(name == field or name.startswith(field + ".") for field in left_out)
    ]
    changed = [name for name in names if before.get(name) != after.get(name)]
    return [
        _FINGERPRINTS.get(name)
        or f"{name} was {_shown(before.get(name))} and is {_shown(after.get(name))}"
        for name in changed
    ]


_FINGERPRINTS = {
    "data": "the data is not what it was",
    "source": "fedpa's own code is not what it was",
    "params": "the initial parameters are not what they were",
    "program": "what clients and server compute (the method, its settings, the loss) is not what "
    "it was",
}


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
