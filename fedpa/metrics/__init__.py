"""What is measured of a model."""

from fedpa.metrics.classification import classifier
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.next_word import next_words
from fedpa.metrics.streaming import streamed
from fedpa.metrics.tags import tagger

__all__ = ["Counts", "Metric", "classifier", "next_words", "streamed", "tagger"]
