import math

import numpy as np
import pytest
from hypothesis import given

from fedpa.metrics import next_words, tagger
from tests.metrics.guessing import most_frequent_label, most_frequent_tags, most_frequent_word
from tests.metrics.summing import values
from tests.strategies import labels


def test_labels_by_hand():
    clients = [np.array([3, 1, 1], np.int32), np.array([], np.int32), np.array([1, 0])]
    assert most_frequent_label(iter(clients)) == 3 / 5
    assert most_frequent_label(clients, guess=0) == 1 / 5
    assert most_frequent_label(clients, guess=9) == 0
    assert math.isnan(most_frequent_label([]))


def test_words_by_hand():
    # Words 1 … 3; 4 unknown, 6 an end, 0 padding.
    clients = [np.array([[1, 4, 6, 0], [2, 2, 6, 0]]), np.array([[4, 4, 4, 4]])]
    assert most_frequent_word(clients, 3) == 2 / 3
    assert most_frequent_word(clients, 3, guess=1) == 1 / 3
    assert math.isnan(most_frequent_word(clients[1:], 3))
    assert math.isnan(most_frequent_word([], 3))


def test_tags_by_hand():
    clients = [np.array([[1, 0, 1], [0, 0, 1]], np.uint8), np.array([[1, 1, 1]], np.uint8)]
    assert most_frequent_tags(clients, most=1) == 3 / 6
    assert most_frequent_tags(clients, most=2) == 5 / 6
    assert most_frequent_tags(clients) == 1
    assert most_frequent_tags(clients, guess=[1]) == 1 / 6
    assert math.isnan(most_frequent_tags([]))


WORDS, TAGS, EXAMPLES = 3, 8, 4
CONSTANT_WORD = next_words(WORDS, lambda params, x: params[x])
CONSTANT_TAGS = tagger(lambda params, batch: params[batch["x"]])


@given(labels(WORDS + 4, EXAMPLES, 5))
def test_a_model_that_guesses_the_same_word_gets_these_numbers(y):
    best = -math.inf
    for guess in 1, 2, 3:
        scores = np.zeros((1, WORDS + 4), np.float32)
        scores[0, guess] = 1
        found = values(CONSTANT_WORD, scores, [{"x": np.zeros_like(y), "y": y}])["accuracy"]
        best = found if math.isnan(found) else max(best, found)
        guessed = most_frequent_word([y[:1], y[1:]], WORDS, guess)
        assert found == pytest.approx(guessed, nan_ok=True)
    assert best == pytest.approx(most_frequent_word([y], WORDS), nan_ok=True)


@given(labels(2, EXAMPLES, TAGS).map(np.uint8))
def test_a_model_that_guesses_the_same_tags_gets_these_numbers(y):
    scores = y.sum(axis=0, dtype=np.float32)[None]
    batch = {"x": np.zeros(EXAMPLES, np.int32), "y": y}
    found = values(CONSTANT_TAGS, scores, [batch])["recall_at_5"]
    assert found == pytest.approx(most_frequent_tags([y]), nan_ok=True)
