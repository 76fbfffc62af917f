"""Posts as bags of words with their tags (appendix D)."""

from collections.abc import Sequence

import numpy as np

from fedpa.data.vocabulary import Places, Vocabulary, look_up, split
from fedpa.errors import check_integer

WIDTH = 64
"""Different words that are kept of an example.

Measured with 10,000 words on 163,760 posts of 19 small sites: the median is 21, the 99th
percentile 50, the most 113, and 0.1 % have more than 64.
"""


def bags(
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
