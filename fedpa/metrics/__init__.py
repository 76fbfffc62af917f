"""What is measured of a model."""

from fedpa.metrics.classification import classification, classifier
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.next_word import next_words
from fedpa.metrics.tags import tagger

__all__ = ["Counts", "Metric", "classification", "classifier", "next_words", "tagger"]
