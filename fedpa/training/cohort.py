"""Who takes part in a round, and with which randomness.

The cohort is a function of (seed, round) alone, so every method of a seed meets the same clients; a
client's key is a function of (seed, round, a stable hash of its id), whoever else takes part.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedpa.types import Key, Keys

_COHORT, _CLIENT = 0, 1  # streams derived from one seed


def select(seed: int, t: int, ids: Sequence[str], size: int) -> list[str]:
    """The clients of round t (from 0), drawn without replacement; all if there are not more."""
    if size >= len(ids):
        return list(ids)
    rng = np.random.default_rng([seed, _COHORT, t])
    return [ids[index] for index in rng.choice(len(ids), size, replace=False)]


def client_keys(seed: int, t: int, ids: Sequence[str]) -> Keys:
    """One key for each client of the round."""
    return _keys_at(_root(seed), np.int32(t), client_hashes(ids))


_root = functools.lru_cache(maxsize=64)(jax.random.key)


def client_hashes(ids: Sequence[str]) -> np.ndarray:
    """(clients, 2): 64 bits of each id, stable from run to run."""
    digests = b"".join(map(_digest, ids))
    return np.frombuffer(digests, dtype="<u4").reshape(-1, 2)


@functools.lru_cache(maxsize=1 << 16)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=8).digest()


def keys_at(root: Key, t: Any, hashes: jax.Array) -> Keys:
    """The clients' keys in round t, inside compiled code; `root` is `jax.random.key(seed)`."""
    key = jax.random.fold_in(jax.random.fold_in(root, _CLIENT), t)
    return jax.vmap(lambda h: jax.random.fold_in(jax.random.fold_in(key, h[0]), h[1]))(hashes)


_keys_at = jax.jit(keys_at)
