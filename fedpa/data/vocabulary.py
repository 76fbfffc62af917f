"""Vocabularies: the most frequent words or tags of a corpus, from the files that count them."""

import itertools
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedpa.errors import DataError, check_integer, explain

File: TypeAlias = str | PathLike[str]


class Vocabulary(NamedTuple):
    words: tuple[str, ...]
    """Most frequent first."""
    ids: Mapping[str, int]
    """word → its place in `words`."""

    @property
    def size(self) -> int:
        return len(self.words)


def vocabulary(words: Iterable[str]) -> Vocabulary:
    """Of words that differ, most frequent first."""
    ordered = tuple(words)
    return Vocabulary(ordered, {word: place for place, word in enumerate(ordered)})


class Places(NamedTuple):
    places: np.ndarray
    """Of all words, one list after the other; the vocabulary's size for a word that is not in
    it."""
    lengths: np.ndarray
    """How many words each list has."""


def look_up(lists: Sequence[Sequence[str]], vocabulary: Vocabulary) -> Places:
    """All words of many lists at once."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    found = map(
        vocabulary.ids.get, itertools.chain.from_iterable(lists), itertools.repeat(vocabulary.size)
    )
    return Places(np.fromiter(found, np.int64, int(lengths.sum())), lengths)


def split(text: str, most: int = -1) -> list[str]:
    """The first `most` words of a text that is tokenised already, or all of them.

    At spaces only: other white space is part of a word, as in the files that count words. Spaces
    that follow one another, or stand at an end, make no empty words.
    """
    found = text.split(" ", most)
    if "" in found:
        found = [word for word in text.split(" ") if word]
    return found if most < 0 else found[:most]


def words(path: File, size: int) -> Vocabulary:
    """The first `size` words of a file of lines `word count`, most frequent first.

    The file's order is the vocabulary's, as in the originals, and no more of it is read than that.
    A corpus of fewer words gives them all, with a warning.
    """
    check_integer("size", size, 1)
    lines: dict[str, int] = {}
    try:
        # As bytes: text would also be cut into lines at characters that words may hold.
        with Path(path).open("rb") as file:
            for number, line in enumerate(itertools.islice(file, size), 1):
                word = _word(path, number, line)
                first = lines.setdefault(word, number)
                if first != number:
                    raise DataError(f"{path}, line {number}: {word!r} stands in line {first} too")
    except OSError as error:
        raise DataError(f"{path}: can't be read ({explain(error)})") from error
    return _complete(path, vocabulary(lines), size, "words")


def tags(path: File, size: int) -> Vocabulary:
    """The `size` most frequent tags of a JSON object tag → count.

    Tags of equal counts are in the file's order. A corpus of fewer tags gives them all, with a
    warning.
    """
    check_integer("size", size, 1)
    try:
        pairs = json.loads(Path(path).read_bytes(), object_pairs_hook=tuple)
    except OSError as error:
        raise DataError(f"{path}: can't be read ({explain(error)})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep lists
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(pairs, tuple):
        raise DataError(f"{path}: holds a {type(pairs).__name__}: must be an object tag → count")
    seen: set[str] = set()
    for tag, times in pairs:
        # A bool is an int too; anything nested is a tuple or a list here.
        if type(times) is not int or times < 0:
            raise DataError(f"{path}: the count of tag {tag!r} is no whole number")
        if not tag or "|" in tag:
            raise DataError(f"{path}: {tag!r} is no tag")
        if tag in seen:
            raise DataError(f"{path}: the tag {tag!r} is counted twice")
        seen.add(tag)
    most = sorted(pairs, key=_times, reverse=True)[:size]  # a stable sort, reversed too
    return _complete(path, vocabulary(tag for tag, _ in most), size, "tags")


def _times(pair: tuple[str, int]) -> int:
    return pair[1]


def _word(path: File, number: int, line: bytes) -> str:
    """The word of a line `word count`."""
    word, _, times = line.rstrip(b"\r\n").rpartition(b" ")
    if not word or b" " in word or not times.isdigit():
        shown: Any = line if len(line) <= 60 else line[:57] + b"..."
        raise DataError(f"{path}, line {number}: {shown!r} must be `word count`")
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 text ({error.reason})") from error


def _complete(path: File, found: Vocabulary, size: int, what: str) -> Vocabulary:
    if not found.size:
        raise DataError(f"{path}: holds no {what}")
    if found.size < size:
        warnings.warn(
            f"{path} has {found.size} {what}, fewer than the {size} asked for: the vocabulary is "
            "that small",
            stacklevel=3,
        )
    return found
