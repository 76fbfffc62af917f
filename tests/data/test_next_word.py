import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data.text import begin, end, inputs_and_targets, make_vocabulary, out_of_vocabulary

VOCABULARY = make_vocabulary(["the", "cat", "sat"])
OOV, BEGIN, END = 4, 5, 6


def ids_of(sentence):
    """All 21 ids of a sentence."""
    found = inputs_and_targets(np.array([sentence], object), VOCABULARY)
    (x,), (y,) = found["x"], found["y"]
    np.testing.assert_array_equal(x[1:], y[:-1])
    return [x[0], *y]


def test_special_ids_follow_the_words():
    assert (out_of_vocabulary(3), begin(3), end(3)) == (OOV, BEGIN, END)
    assert end(10_000) == 10_003


@pytest.mark.parametrize(
    ("sentence", "ids"),
    [
        ("the cat sat", [BEGIN, 1, 2, 3, END] + [0] * 16),
        ("the dog sat", [BEGIN, 1, OOV, 3, END] + [0] * 16),
        ("", [BEGIN, END] + [0] * 19),
        ("  ", [BEGIN, END] + [0] * 19),
        (" cat  sat ", [BEGIN, 2, 3, END] + [0] * 17),
        (" ".join(["cat"] * 19), [BEGIN] + [2] * 19 + [END]),
        (" ".join(["cat"] * 20), [BEGIN] + [2] * 20),
        (" ".join(["cat"] * 20 + ["the"]), [BEGIN] + [2] * 20),
        (" ".join(["cat"] * 200), [BEGIN] + [2] * 20),
        ("Cat", [BEGIN, OOV, END] + [0] * 18),
    ],
)
def test_by_hand(sentence, ids):
    assert ids_of(sentence) == ids


def test_shapes_and_types():
    for n in 0, 1, 3:
        found = inputs_and_targets(np.array(["the cat"] * n, object), VOCABULARY)
        assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
            "x": ((n, 20), np.int32),
            "y": ((n, 20), np.int32),
        }
        assert all(a.flags.c_contiguous for a in found.values())


def plain(sentence, length):
    """One sentence, written down as the rule is told."""
    ids = [VOCABULARY.words.index(w) + 1 if w in VOCABULARY.ids else OOV for w in sentence]
    ids = ids[:length]
    if len(ids) < length:
        ids = [*ids, END]
    ids = [BEGIN, *ids]
    return ids + [0] * (length + 1 - len(ids))


@given(
    st.lists(st.lists(st.sampled_from(["the", "cat", "sat", "dog", "."]), max_size=8), max_size=5),
    st.integers(1, 6),
)
def test_many_sentences_are_what_each_is(sentences, length):
    found = inputs_and_targets([" ".join(words) for words in sentences], VOCABULARY, length)
    ids = np.array([plain(words, length) for words in sentences]).reshape(-1, length + 1)
    np.testing.assert_array_equal(found["x"], ids[:, :-1])
    np.testing.assert_array_equal(found["y"], ids[:, 1:])
