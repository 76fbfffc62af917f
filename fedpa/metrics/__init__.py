"""What is measured of a model."""

from fedpa.metrics.classification import classifier, next_words, tagger
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.streaming import make_evaluator

__all__ = ["Counts", "Metric", "classifier", "make_evaluator", "next_words", "tagger"]
