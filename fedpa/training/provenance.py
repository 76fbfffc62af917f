"""The environment of a run (versions, revision, data), and its differences from now.

A resumed run equals the uninterrupted one, bit for bit, only if all of it is the same.
"""

import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpa.algorithms.fedopt import Algorithm, Cohort, fed_round
from fedpa.algorithms.methods import Described, has_functions, sample_functions
from fedpa.data.federated import FederatedData
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.minibatches import Minibatch
from fedpa.objectives.objective import Objective, minibatch_loss
from fedpa.objectives.prior import NormalPrior
from fedpa.training.named_arrays import update_digest
from fedpa.training.problem import Prepared, count_examples
from fedpa.types import Params

PACKAGES = ("fedpa", "jax", "jaxlib", "numpy", "optax", "equinox", "blackjax")
"""Packages whose code computes a run's numbers."""
LOOKED_AT = 2**23
"""Bytes of examples in a federation's fingerprint."""
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")
MADE_UP = 24
"""Synthetic examples for probes: more than one batch of the usual size."""
PROBED = 5
"""Synthetic clients of a probe: enough for aggregations to differ."""
_PHASES = 10_000
"""Rounds whose phases are compared."""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from its sources, not installed
            found[name] = "unknown"
    return found


def environment(**fingerprints: str) -> dict[str, Any]:
    """Collect the table `[environment]` of `config.toml`."""
    found: dict[str, Any] = {
        "versions": versions(),
        "source": source_fingerprint(),
        "machine": machine(),
    }
    known = revision(Path.cwd())
    return found | ({} if known is None else {"revision": known}) | fingerprints


def machine() -> dict[str, Any]:
    """Collect the settings that affect JAX's results, to the last digit."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    } | {name: str(getattr(jax.config, name)) for name in _JAX_SETTINGS}


def source_fingerprint() -> str:
    """Hash the code that computes numbers, since its version may not change in development."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[:2] not in [("experiments", name) for name in ("cli", "report", "studies")]:
            digest.update(f"{place.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def revision(directory: Path) -> str | None:
    """Read the git revision of the directory, with `-dirty` if files differ; None without git."""
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
    """Hash the data: all ids and sizes, and the clients' examples.

    Data in memory is hashed completely. Of lazily read data only the first megabytes are hashed,
    with clients in a fixed shuffled order, because reading all would take as long as a run.
    """
    digest = hashlib.blake2b(f"{LOOKED_AT}".encode(), digest_size=16)
    for split, data in federations.items():
        digest.update(split.encode())
        if data is None:
            continue
        for name in data.ids:
            digest.update(f"{name}\0{data.num_examples(name)}\0".encode())
        if data.packed is not None and data.packed.load == data.examples:
            update_digest(digest, data.packed.arrays)  # all of them in a moment
            continue
        left = LOOKED_AT
        for place in np.random.default_rng(0).permutation(len(data.ids)).tolist():
            left -= update_digest(digest, data.examples(data.ids[place]))
            if left <= 0:
                break
    return digest.hexdigest()


def arrays_fingerprint(tree: Any) -> str:
    """Hash a model's parameters."""
    digest = hashlib.blake2b(digest_size=16)
    update_digest(digest, tree)
    return digest.hexdigest()


def describe_program(method: Any, prepared: Prepared, loss: str | None = None) -> str:
    """Describe the functions of a run: the loss and the method.

    The settings of fedpa's methods are recorded as values; a user's method, or a method that was
    given a sampler, a delta, an aggregation or another function, is probed.

    loss: the result of `probe_objective`, if known.
    """
    algorithm, theta, _, objective = prepared
    loss = probe_objective(objective, theta) if loss is None else loss
    if not isinstance(method, Described):
        return f"{loss} {probe_algorithm(algorithm, theta, objective.like)}"
    functions = repr(sample_functions(method.arguments)).encode()
    described = f"{loss} {hashlib.blake2b(functions, digest_size=8).hexdigest()}"
    if has_functions(method):
        return f"{described} {probe_algorithm(algorithm, theta, objective.like)}"
    return described


def probe_objective(objective: Objective, theta: Params) -> str:
    """Describe an objective by its value and the norm of its gradient on synthetic examples.

    Functions can't be stored and compared, their values can: to four digits, because processors
    differ in the last ones.
    """

    def value(theta: Params, data: ClientData) -> Any:
        batch = Minibatch(data.examples, jnp.ones(MADE_UP))
        return minibatch_loss(objective, theta, batch, jax.random.key(0))

    data = _make_up_client(objective.like)
    loss, gradient = jax.jit(jax.value_and_grad(value))(theta, data)
    return f"{float(loss):.3e} {float(optax.tree.norm(gradient)):.3e}"


def describe_prior(prepared: Prepared, data: FederatedData) -> dict[str, Any]:
    """The table `[prior]` of `config.toml`, if there is a prior.

    Numbers are recorded as they are, arrays by a fingerprint. A prior of one's own, which is a
    function, is tried; at other parameters than the first, where a density may have its maximum.
    """
    _, theta, _, objective = prepared
    prior, n = objective.prior, objective.num_examples
    if prior is None or n is None:
        return {}
    told: dict[str, Any] = {} if float(n) == count_examples(data) else {"num_examples": float(n)}
    if not isinstance(prior, NormalPrior):
        moved = jax.tree.map(
            lambda x: x + jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), theta
        )
        value, gradient = jax.jit(jax.value_and_grad(prior.log_density))(moved)
        probe = f"{float(value):.3e} {float(optax.tree.norm(gradient)):.3e}"
        return {"prior": {"density": probe, **told}}
    numbers = {k: float(v) for k, v in prior._asdict().items() if isinstance(v, int | float)}
    if len(numbers) < 2:
        told |= {"fingerprint": arrays_fingerprint(prior.natural(theta))}
    return {"prior": {**numbers, **told}}


def probe_algorithm(algorithm: Algorithm, theta: Params, like: Any) -> str:
    """Describe a method by how far two rounds of a few clients move the parameters.

    They are rounds of the algorithm's last phase, on synthetic examples. Clients differ, and are
    enough for the aggregation.

    Args:
        algorithm: The method, for an objective.
        theta: The parameters it starts from.
        like: Examples of any client; only their shapes and types are used.
    """
    if algorithm.switch is not None:  # its round is not known: any
        algorithm = algorithm.switch.at(_PHASES // 2)
    number = max(PROBED, algorithm.aggregation.least_clients)
    clients = [_make_up_client(like, client) for client in range(number)]
    phases = [algorithm.phase(t) for t in range(_PHASES)]
    cohort = Cohort(
        jax.tree.map(lambda *arrays: jnp.stack(arrays), *clients),
        jax.random.split(jax.random.key(0), number),
        jax.tree.map(lambda x: jnp.stack([x] * number), algorithm.client_init(theta)),
    )
    start = state = algorithm.init(theta)
    noise = jax.random.key(1)  # of a private algorithm
    step = jax.jit(
        lambda state, cohort, t: fed_round(algorithm, state, cohort, t, phases[-1], noise)[0]
    )
    for _ in range(2):  # the second shows the server's state after the first
        state = step(state, cohort, jnp.asarray(_PHASES - 1))
    moved = _distance(algorithm.parameters(state), algorithm.parameters(start))
    switches = [k for k in range(1, _PHASES) if phases[k] != phases[k - 1]]
    digest = hashlib.blake2b(repr((phases[0], switches)).encode(), digest_size=8)
    return f"{moved:.3e} {_distance(state, start):.3e} {digest.hexdigest()}"


def _make_up_client(like: Any, client: int = 0) -> ClientData:
    examples = jax.tree.map(lambda array: _make_up(array, client), like)
    return ClientData(examples, jnp.asarray(MADE_UP, jnp.int32))


def _make_up(array: Any, client: int) -> np.ndarray:
    """Make synthetic examples: numbers between −1 and 1; for integers (maybe classes) 0 and 1."""
    array = np.asarray(array)
    shape = (MADE_UP, *array.shape[1:])
    numbers: np.ndarray = np.arange(np.prod(shape)).reshape(shape) + client
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    made: np.ndarray = np.cos(numbers) if is_real else numbers >= numbers.size // 2
    return made.astype(array.dtype)


def _distance(now: Any, then: Any) -> float:
    """Compute Σ |a − b| over all floating-point numbers of two trees."""
    pairs = zip(jax.tree.leaves(now), jax.tree.leaves(then), strict=True)
    return sum(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum())
        for a, b in pairs
        if jnp.issubdtype(a.dtype, jnp.floating)
    )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten settings to dotted names, without unset ones."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], left_out: Sequence[str] = ()
) -> list[str]:
    """List the fields that differ: `hyperparameters.rho was 0.1 and is 0.2`.

    left_out: fields and tables to ignore.
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
        or f"{name} was {_format(before.get(name))} and is {_format(after.get(name))}"
        for name in changed
    ]


_FINGERPRINTS = {
    "data": "the data has changed",
    "source": "the source code of fedpa has changed",
    "params": "the initial parameters have changed",
    "program": "the method, its settings or the loss have changed (a probe gives other numbers)",
}


def _format(value: Any) -> str:
    return "not set" if value is None else repr(value)
