"""What the same guess for every example achieves: below it, a model has learnt nothing.

Each function reads a stream of clients' arrays once. Without a guess it takes the best there is
for this very stream; one found elsewhere (in what clients train on, say) can be given.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from fedpa.metrics.classification import HIGHEST
from fedpa.metrics.metric import ratio


def most_frequent_label(labels: Iterable[np.ndarray], guess: int | None = None) -> float:
    """The accuracy of one label for all; `labels` are clients' "y"."""
    return _share(_times(labels), 1, None if guess is None else [guess])


def most_frequent_word(
    targets: Iterable[np.ndarray], vocabulary: int, guess: int | None = None
) -> float:
    """The accuracy (as in `next_words`) of one word for all; `targets` are clients' "y": (n, t).

    guess: an id; 1 is the vocabulary's first word.
    """
    times = _times(targets)[: vocabulary + 1]
    times[:1] = 0  # padding; ids beyond the words are cut off
    return _share(times, 1, None if guess is None else [guess])


def most_frequent_tags(
    tags: Iterable[np.ndarray], guess: Sequence[int] | None = None, most: int = HIGHEST
) -> float:
    """The recall (as in `tagger`'s recall_at_5) of five tags for all; `tags` are clients' "y".

    guess: ids; range(5) are the tag set's first.
    """
    times = np.zeros(0, np.int64)
    for y in tags:
        times = _added(times, np.sum(y > 0, axis=0))
    return _share(times, most, guess)


def _times(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """How often every id occurs."""
    times = np.zeros(0, np.int64)
    for ids in arrays:
        times = _added(times, np.bincount(np.ravel(ids)))
    return times


def _added(times: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The sum of two vectors, of which the shorter ends in zeros."""
    long, short = (times, more) if len(times) >= len(more) else (more, times)
    long = long.astype(np.int64)
    long[: len(short)] += short
    return long


def _share(times: np.ndarray, most: int, guess: Sequence[int] | None) -> float:
    """The share of all that is one of the guesses; NaN of nothing."""
    if guess is None:
        right = np.sort(times)[::-1][:most].sum()
    else:
        right = sum(times[i] for i in set(guess) if i < len(times))
    return ratio(float(right), float(times.sum()))
