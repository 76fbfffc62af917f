"""Metrics of models."""

from fedpa.metrics.classification import classifier, next_words, tagger
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.streaming import Evaluation, make_evaluator

__all__ = ["Counts", "Evaluation", "Metric", "classifier", "make_evaluator", "next_words", "tagger"]
