import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data.text import look_up, make_vocabulary, read_tags, read_words, split
from fedpa.errors import DataError
from tests.refusals import refused


def written(tmp_path, content):
    path = tmp_path / "counted"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_words_come_in_the_files_order(tmp_path):
    found = read_words(written(tmp_path, "the 9\n, 9\nβ 3\nlast 1\n"), 3)
    assert found.words == ("the", ",", "β")
    assert found.size == 3
    assert dict(found.ids) == {"the": 0, ",": 1, "β": 2}


def test_no_more_lines_are_read_than_words_are_asked_for(tmp_path):
    assert read_words(written(tmp_path, "a 2\nb 1\nbroken\n"), 2).size == 2


def test_words_may_hold_white_space_other_than_spaces(tmp_path):
    path = written(tmp_path, "a\u2028b 3\nc\x85 2\nd\u00a0e 1")
    assert read_words(path, 3).words == ("a\u2028b", "c\x85", "d\u00a0e")


def test_lines_may_end_as_on_windows(tmp_path):
    assert read_words(written(tmp_path, "a 2\r\nb 1\r\n"), 2).words == ("a", "b")


@pytest.mark.parametrize(
    ("content", "anchor"),
    [
        ("a 3\nb\n", "line 2"),
        ("a 3\n\nb 1\n", "line 2"),
        ("a 3\nb x\n", "line 2"),
        ("a 3\nb -1\n", "line 2"),
        ("a 3\n 2\n", "line 2"),
        ("a 3\nb c 2\n", "line 2"),
        (b"a 3\n\xff 2\n", "line 2"),
        ("a 3\nb 2\na 1\n", "line 3: 'a'"),
        ("", "counted"),
        ("x" * 5000, "line 1"),
    ],
)
def test_broken_word_counts_are_refused(tmp_path, content, anchor):
    with refused(anchor, kind=DataError):
        read_words(written(tmp_path, content), 9)


def test_tags_come_by_count_and_then_in_the_files_order(tmp_path):
    path = written(tmp_path, '{"rare": 1, "b": 5, "most": 7, "a": 5, "none": 0}')
    assert read_tags(path, 4).words == ("most", "b", "a", "rare")


@pytest.mark.parametrize(
    ("content", "anchor"),
    [
        ('{"a": 3,\n"b" 2}', "line 2"),
        ('{"a": ' + "[" * 100_000, "counted"),
        ('{"a": ' + "1" * 5000 + "}", "counted"),
        ('["a"]', "list"),
        ('{"a": "3"}', "'a'"),
        ('{"a": true}', "'a'"),
        ('{"a": 1.5}', "'a'"),
        ('{"a": {}}', "'a'"),
        ('{"a": -1}', "'a'"),
        ('{"a": 2, "a": 1}', "'a'"),
        ('{"a|b": 2}', "'a|b'"),
        ("{}", "counted"),
        (b'{"\xff": 1}', "utf-8"),
    ],
)
def test_broken_tag_counts_are_refused(tmp_path, content, anchor):
    with refused(anchor, kind=DataError):
        read_tags(written(tmp_path, content), 9)


@pytest.mark.parametrize(
    ("read", "content"), [(read_words, "a 2\nb 1\n"), (read_tags, '{"a": 2, "b": 1}')]
)
def test_a_small_corpus_gives_a_small_vocabulary_and_says_so_once(tmp_path, read, content):
    path = written(tmp_path, content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = read(path, 5)
    assert found.words == ("a", "b")
    what = read.__name__.removeprefix("read_")
    assert [str(w.message)[:200].split("counted ")[1] for w in told] == [
        f"has 2 {what}, fewer than the 5 asked for: the vocabulary is that small"
    ]


@pytest.mark.parametrize("read", [read_words, read_tags])
def test_bad_calls_are_refused(tmp_path, read):
    with refused("nowhere", kind=DataError):
        read(tmp_path / "nowhere", 1)
    with refused("size = 0"):
        read(tmp_path / "nowhere", 0)


@given(st.text(" ab\u00a0", max_size=12), st.integers(0, 6))
def test_words_stand_between_spaces(text, most):
    plain = [word for word in text.split(" ") if word]
    assert split(text) == plain
    assert split(text, most) == plain[:most]


def test_many_lists_are_looked_up_at_once():
    found = look_up([["b", "x", "a"], [], ["a"]], make_vocabulary(["a", "b"]))
    np.testing.assert_array_equal(found.places, [1, 2, 0, 0])
    np.testing.assert_array_equal(found.lengths, [3, 0, 1])
