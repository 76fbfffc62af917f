import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpa.data.readers.sqlite import decode_example
from fedpa.errors import DataError
from tests.data.examples import encoded, field, varint

VALUES = st.one_of(
    st.lists(st.binary(max_size=200), max_size=4),
    hnp.arrays(np.float32, st.integers(0, 5), elements=st.floats(width=32)),
    hnp.arrays(np.int64, st.integers(0, 5)),
)
FEATURES = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


@given(FEATURES, st.booleans())
def test_what_was_encoded_is_decoded(features, packed):
    found = decode_example(encoded(features, packed))
    assert set(found) == set(features)
    for name, values in features.items():
        if isinstance(values, list):
            assert found[name] == values
        else:
            assert found[name].dtype == values.dtype
            np.testing.assert_array_equal(found[name], values)


@given(FEATURES, st.booleans(), st.data())
def test_what_is_cut_is_refused(features, packed, data):
    message = encoded(features, packed)
    end = data.draw(st.integers(1, len(message) - 1))
    with pytest.raises(DataError):
        decode_example(message[:end])


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(message):
    with contextlib.suppress(DataError):
        decode_example(message)


def test_known_bytes():
    """{"a": [-1, 300]}, {"b": [0.5]} and {"c": ["xy"]}, written out by hand."""
    a = b"\x0a\x01a\x12\x10\x1a\x0e\x0a\x0c" + b"\xff" * 9 + b"\x01\xac\x02"
    b = b"\x0a\x01b\x12\x08\x12\x06\x0a\x04\x00\x00\x00\x3f"
    c = b"\x0a\x01c\x12\x06\x0a\x04\x0a\x02xy"
    entries = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in (a, b, c))
    found = decode_example(b"\x0a" + bytes([len(entries)]) + entries)
    assert found["a"].tolist() == [-1, 300]
    assert found["b"].tolist() == [0.5]
    assert found["c"] == [b"xy"]


def test_unknown_fields_are_passed_over():
    inner = encoded({"a": ["x"]})
    unknown = (
        field(9, b"anything")
        + varint(10 << 3)
        + varint(-5)
        + varint(11 << 3 | 1)
        + bytes(8)
        + varint(12 << 3 | 5)
        + bytes(4)
    )
    assert decode_example(unknown + inner + unknown) == {"a": [b"x"]}


def test_messages_in_parts_are_merged():
    parts = encoded({"a": ["x"]}) + encoded({"b": ["y"], "a": ["z"]})
    assert decode_example(parts) == {"a": [b"z"], "b": [b"y"]}
    feature = field(1, field(1, b"x")) + field(1, field(1, b"y"))
    assert decode_example(field(1, field(1, field(1, b"a") + field(2, feature)))) == {
        "a": [b"x", b"y"]
    }


def test_no_bytes_are_no_features():
    assert decode_example(b"") == {}


@pytest.mark.parametrize(
    "message",
    [
        b"\x0b",  # the start of a group
        b"\x02\x00",  # field 0
        b"\xff" * 11,
        field(1, field(1, field(1, b"\xff") + field(2, b""))),  # a name that is not UTF-8
        field(1, field(1, field(1, b"a") + field(2, field(2, field(1, b"123"))))),
        field(1, field(1, field(1, b"a") + field(2, field(3, field(1, b"\xff" * 10 + b"\1"))))),
        field(1, field(1, field(1, b"a") + field(2, field(3, field(1, b"\xff"))))),
    ],
)
def test_what_is_no_example_is_refused(message):
    with pytest.raises(DataError):
        decode_example(message)
