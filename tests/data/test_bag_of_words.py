import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data.text import WIDTH, make_bags, make_vocabulary
from tests.refusals import refused

VOCABULARY = make_vocabulary(["the", "cat", "sat", "mat"])
TAGS = make_vocabulary(["pets", "grammar", "history"])


def bag_of(tokens, title="", tags="", width=4):
    """One example: its words with their weights, and its tags."""
    found = make_bags([tokens], [title], [tags], VOCABULARY, TAGS, width)
    ids, weights = found["ids"][0], found["weights"][0]
    assert not ids[weights == 0].any()
    known = {VOCABULARY.words[i]: float(w) for i, w in zip(ids, weights, strict=True) if w}
    return known, [TAGS.words[t] for t in np.flatnonzero(found["y"][0])]


@pytest.mark.parametrize(
    ("tokens", "title", "bag"),
    [
        ("the cat", "sat mat", {"the": 1 / 4, "cat": 1 / 4, "sat": 1 / 4, "mat": 1 / 4}),
        ("the the cat", "the", {"the": 3 / 4, "cat": 1 / 4}),
        ("the dog dog", "cow", {"the": 1 / 4}),
        ("dog", "cow", {}),
        ("", "", {}),
        ("", "cat", {"cat": 1.0}),
        ("cat", "", {"cat": 1.0}),
        (" cat  ", " cow", {"cat": 1 / 2}),
    ],
)
def test_bags_by_hand(tokens, title, bag):
    assert bag_of(tokens, title)[0] == bag


@pytest.mark.parametrize(
    ("tags", "known"),
    [
        ("grammar|pets", ["pets", "grammar"]),
        ("pets|cooking|pets", ["pets"]),
        ("cooking", []),
        ("", []),
        ("pet", []),
    ],
)
def test_tags_by_hand(tags, known):
    assert bag_of("cat", tags=tags)[1] == known


def test_too_many_words_leave_the_most_frequent_and_then_the_first():
    text = "the mat sat sat cat dog"
    assert bag_of(text, width=1)[0] == pytest.approx({"sat": 2 / 6})
    assert bag_of(text, width=2)[0] == pytest.approx({"sat": 2 / 6, "the": 1 / 6})
    assert bag_of(text, width=3)[0] == pytest.approx({"sat": 2 / 6, "the": 1 / 6, "mat": 1 / 6})


def test_shapes_and_types():
    for n in 0, 1, 3:
        texts = np.array(["the cat"] * n, object)
        found = make_bags(texts, texts, np.array(["pets"] * n, object), VOCABULARY, TAGS)
        assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
            "ids": ((n, WIDTH), np.int32),
            "weights": ((n, WIDTH), np.float32),
            "y": ((n, 3), np.uint8),
        }
        assert all(a.flags.c_contiguous for a in found.values())


def test_bad_calls_are_refused():
    with refused("width = 0"):
        bag_of("cat", width=0)
    with pytest.raises(ValueError, match="shorter"):
        make_bags(["cat"], ["cat"], [], VOCABULARY, TAGS)


WORDS = st.lists(st.sampled_from([*VOCABULARY.words, "dog", "cow"]), max_size=9)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=5), st.integers(0, 999))
def test_sparse_bags_are_means_of_one_hots(posts, seed):
    matrix = np.random.default_rng(seed).normal(size=(VOCABULARY.size, 2))
    tokens, titles = ([" ".join(post[i]) for post in posts] for i in range(2))
    found = make_bags(tokens, titles, ["pets"] * len(posts), VOCABULARY, TAGS, VOCABULARY.size)
    sparse = np.einsum("bw,bwt->bt", found["weights"], matrix[found["ids"]])
    dense = np.zeros((len(posts), VOCABULARY.size))
    for row, (first, second) in enumerate(posts):
        every = first + second
        one_hots = [[word == known for known in VOCABULARY.words] for word in every]
        if every:
            dense[row] = np.mean(one_hots, axis=0)
    np.testing.assert_allclose(sparse, dense @ matrix, atol=1e-6)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=5), st.integers(1, 4))
def test_a_narrow_bag_is_the_beginning_of_a_wide_one(posts, width):
    tokens, titles = ([" ".join(post[i]) for post in posts] for i in range(2))
    narrow, wide = (
        make_bags(tokens, titles, ["pets"] * len(posts), VOCABULARY, TAGS, w) for w in (width, 4)
    )
    for name in "ids", "weights":
        np.testing.assert_array_equal(narrow[name], wide[name][:, :width])
    assert (np.diff(wide["weights"], axis=1) <= 0).all()
