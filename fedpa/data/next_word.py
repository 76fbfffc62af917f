"""Sentences as ids, for models of the next word (appendix D)."""

from collections.abc import Sequence

import numpy as np

from fedpa.data.vocabulary import Vocabulary, look_up, split

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
