"""tf.train.Example from its bytes: protobuf's wire format, as far as that message needs it.

Example  { Features features = 1; }
Features { map<string, Feature> feature = 1; }    entries { key = 1; value = 2; }
Feature  { BytesList = 1 | FloatList = 2 | Int64List = 3 }    each { repeated value = 1; }
"""

from typing import TypeAlias

import numpy as np

from fedpa.errors import DataError

Value: TypeAlias = list[bytes] | np.ndarray
"""Bytes, float32 or int64."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST = 10
"""Bytes of a varint of 64 bits."""


def decode(message: bytes) -> dict[str, Value]:
    """The features of one example. Fields that are not known are passed over."""
    features: dict[str, Value] = {}
    for number, kind, value in _fields(message):
        if (number, kind) == (1, LENGTH):
            for inner, kind_inside, entry in _fields(value):
                if (inner, kind_inside) == (1, LENGTH):
                    name, feature = _entry(entry)
                    features[name] = feature
    return features


def _entry(entry: bytes) -> tuple[str, Value]:
    name, parts = b"", []
    for number, kind, value in _fields(entry):
        if (number, kind) == (1, LENGTH):
            name = value
        elif (number, kind) == (2, LENGTH):
            parts.append(value)  # messages that come in parts are merged, which is to append them
    try:
        return name.decode(), _feature(b"".join(parts))
    except UnicodeDecodeError:
        raise DataError(f"a feature's name is not UTF-8: {name!r}") from None


def _feature(feature: bytes) -> Value:
    """Of the three lists the last one that is there counts; one that comes in parts is merged."""
    chosen, parts = 1, list[bytes]()
    for number, kind, value in _fields(feature):
        if number in (1, 2, 3) and kind == LENGTH:
            if number != chosen:
                chosen, parts = number, []
            parts.append(value)
    merged = b"".join(parts)
    if chosen == 1:
        return [value for number, kind, value in _fields(merged) if (number, kind) == (1, LENGTH)]
    return _floats(merged) if chosen == 2 else _integers(merged)


def _floats(message: bytes) -> np.ndarray:
    pieces = []
    for number, kind, value in _fields(message):
        if number == 1 and kind in (LENGTH, FIXED32):
            if len(value) % 4:
                raise DataError(f"a packed list of floats has {len(value)} bytes")
            pieces.append(value)
    return np.frombuffer(b"".join(pieces), "<f4").astype(np.float32)


def _integers(message: bytes) -> np.ndarray:
    # One by one and packed are the same bytes without their tags.
    kinds = (LENGTH, VARINT)
    pieces = [v for number, kind, v in _fields(message) if number == 1 and kind in kinds]
    return _varints(b"".join(pieces))


def _varints(data: bytes) -> np.ndarray:
    """Packed int64 numbers, seven bits a byte, lowest first; negative ones take all 64."""
    if not data:
        return np.zeros(0, np.int64)
    if len(data) == 1 and data[0] < 0x80:  # a label: not worth the machinery below
        return np.array([data[0]], np.int64)
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise DataError("a number is cut")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > LONGEST:
        raise DataError(f"a number has more than {LONGEST} bytes")
    place = np.arange(len(raw)) - np.repeat(starts, lengths)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


def _fields(message: bytes) -> list[tuple[int, int, bytes]]:
    """(number, wire type, the value's bytes) of each field."""
    at, found = 0, []
    while at < len(message):
        tag, at = _varint(message, at)
        kind, start = tag & 7, at
        if kind == LENGTH:
            size, start = _varint(message, at)
            at = start + size
        elif kind == VARINT:
            _, at = _varint(message, at)
        elif kind == FIXED64:
            at += 8
        elif kind == FIXED32:
            at += 4
        else:
            raise DataError(f"wire type {kind} at byte {start} is none of tf.train.Example")
        if at > len(message):
            raise DataError(f"a field at byte {start} is cut")
        if not tag >> 3:
            raise DataError(f"a field at byte {start} has number 0")
        found.append((tag >> 3, kind, message[start:at]))
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    if at < len(message) and message[at] < 0x80:  # most are of one byte
        return message[at], at + 1
    number = 0
    for i, byte in enumerate(message[at : at + LONGEST]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, at + i + 1
    raise DataError(f"a number at byte {at} is cut")
