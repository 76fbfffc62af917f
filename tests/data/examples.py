"""tf.train.Example as bytes, for tests: packed lists or one by one, as both are allowed."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np


def encoded(features: Mapping[str, Sequence], packed: bool = True) -> bytes:
    """Lists of bytes or str, of float32 or of int64."""
    entries = [
        field(1, field(1, name.encode()) + field(2, _feature(values, packed)))
        for name, values in features.items()
    ]
    return field(1, b"".join(entries))


def _feature(values: Sequence, packed: bool) -> bytes:
    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        pieces = [struct.pack("<f", value) for value in values]
        return field(2, _numbers(pieces, 5, packed))
    if isinstance(values, np.ndarray):
        return field(3, _numbers([varint(int(value)) for value in values], 0, packed))
    texts = [value.encode() if isinstance(value, str) else value for value in values]
    return field(1, b"".join(field(1, text) for text in texts))


def _numbers(pieces: list[bytes], kind: int, packed: bool) -> bytes:
    if packed:
        return field(1, b"".join(pieces)) if pieces else b""
    return b"".join(bytes([1 << 3 | kind]) + piece for piece in pieces)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = []
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
