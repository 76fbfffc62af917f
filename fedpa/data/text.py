"""Text for models (appendix D): vocabularies, posts as bags of words, sentences as ids."""

import itertools
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedpa.data.readers.reader import read_json, refuse_damaged
from fedpa.errors import DataError, check_integer

File: TypeAlias = str | PathLike[str]


class Vocabulary(NamedTuple):
    words: tuple[str, ...]
    """Most frequent first."""
    ids: Mapping[str, int]
    """word → its place in `words`."""

    @property
    def size(self) -> int:
        return len(self.words)


def make_vocabulary(words: Iterable[str]) -> Vocabulary:
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


def read_words(path: File, size: int) -> Vocabulary:
    """The first `size` words of a file of lines `word count`, most frequent first.

    The file's order is the vocabulary's, as in the originals, and no more of it is read than that.
    A corpus of fewer words gives them all, with a warning.
    """
    check_integer("size", size, 1)
    lines: dict[str, int] = {}
    # As bytes: text would also be cut into lines at characters that words may hold.
    with refuse_damaged(f"{path} can't be read", OSError), Path(path).open("rb") as file:
        for number, line in enumerate(itertools.islice(file, size), 1):
            word = _parse_word(path, number, line)
            first = lines.setdefault(word, number)
            if first != number:
                raise DataError(f"{path}, line {number}: {word!r} is also in line {first}")
    return _complete(path, make_vocabulary(lines), size, "words")


def read_tags(path: File, size: int) -> Vocabulary:
    """The `size` most frequent tags of a JSON object tag → count.

    Tags of equal counts are in the file's order. A corpus of fewer tags gives them all, with a
    warning.
    """
    check_integer("size", size, 1)
    pairs = read_json(Path(path), object_pairs_hook=tuple)
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
    most = sorted(pairs, key=operator.itemgetter(1), reverse=True)[
        :size
    ]  # a stable sort, reversed too
    return _complete(path, make_vocabulary(tag for tag, _ in most), size, "tags")


def _parse_word(path: File, number: int, line: bytes) -> str:
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


WIDTH = 64
"""Different words that are kept of an example.

Measured with 10,000 words on 163,760 posts of 19 small sites: the median is 21, the 99th
percentile 50, the most 113, and 0.1 % have more than 64.
"""


def make_bags(
    tokens: Sequence[str] | np.ndarray,
    titles: Sequence[str] | np.ndarray,
    tags: Sequence[str] | np.ndarray,
    vocabulary: Vocabulary,
    tag_set: Vocabulary,
    width: int = WIDTH,
) -> dict[str, np.ndarray]:
    """{"ids": (n, width) int32, "weights": (n, width) float32, "y": (n, tags) uint8}.

    A bag is the mean of the one-hots of all words of tokens and title, in which unknown words
    count, and are then left out: a known word's weight is its share of all words. Words with the
    largest weights stand first, equal ones as they occur. An example with more than `width`
    different words loses the last of them (with the usual width one in a thousand does); the
    others keep their weights. Padding is word 0 with weight 0, and all there is without any known
    word.

    tags: joined by `|`; those that are not in `tag_set` are ignored.
    """
    check_integer("width", width, 1)
    posts = list(zip(tokens, titles, tags, strict=True))
    found = look_up([split(text + " " + title) for text, title, _ in posts], vocabulary)
    row, word, share = _shares(found, vocabulary.size)
    # Rows come in order: a word's column is how far it stands from its row's first.
    column = np.arange(len(row)) - np.searchsorted(row, row)
    row, word, share, column = (a[column < width] for a in (row, word, share, column))
    ids = np.zeros((len(posts), width), np.int32)
    weights = np.zeros((len(posts), width), np.float32)
    ids[row, column], weights[row, column] = word, share
    y = _labels(look_up([joined.split("|") for *_, joined in posts], tag_set), tag_set.size)
    return {"ids": ids, "weights": weights, "y": y}


def _shares(found: Places, known: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, word and share of every different known word, in a bag's order."""
    here = found.places < known
    pairs, first, times = np.unique(
        (_rows(found) * known + found.places)[here], return_index=True, return_counts=True
    )
    row, word = np.divmod(pairs, known)
    order = np.lexsort((first, -times, row))
    return row[order], word[order], (times / found.lengths[row])[order]


def _labels(found: Places, known: int) -> np.ndarray:
    # One column more for all other tags, which is then left out.
    y = np.zeros((len(found.lengths), known + 1), np.uint8)
    y[_rows(found), found.places] = 1
    return np.ascontiguousarray(y[:, :-1])


def _rows(found: Places) -> np.ndarray:
    """Which list each word is in."""
    return np.repeat(np.arange(len(found.lengths)), found.lengths)


LENGTH = 20
"""Words of a sentence that are kept, and targets of an example."""
PAD = 0


def out_of_vocabulary(size: int) -> int:
    """The id of all words but the `size` known ones, which are 1 … size."""
    return size + 1


def begin(size: int) -> int:
    return size + 2


def end(size: int) -> int:
    return size + 3


def inputs_and_targets(
    sentences: Sequence[str] | np.ndarray, vocabulary: Vocabulary, length: int = LENGTH
) -> dict[str, np.ndarray]:
    """{"x": (n, length), "y": (n, length)}, int32: at every place the word there and the next.

    A sentence is cut to `length` *words*; a shorter one gets an end. Then a begin stands first and
    padding last. So a sentence of `length` words or more has no end.
    """
    known = vocabulary.size
    places, lengths = look_up([split(sentence, length) for sentence in sentences], vocabulary)
    ids = np.full((len(lengths), length + 1), PAD, np.int32)
    ids[:, 0] = begin(known)
    # Places count from 0, and the size stands for unknown words: ids are one more.
    ids[:, 1:][np.arange(length) < lengths[:, None]] = places + 1
    short = np.flatnonzero(lengths < length)
    ids[short, lengths[short] + 1] = end(known)
    return {"x": ids[:, :-1].copy(), "y": ids[:, 1:].copy()}
