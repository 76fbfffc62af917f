"""Metrics of models: how good they are, and how honest their probabilities."""

from fedpa.metrics.classification import classifier, next_words, tagger
from fedpa.metrics.conformal import (
    ScoreSketch,
    calibrate_sets,
    conformal_sets,
    conformal_threshold,
    sketch_scores,
)
from fedpa.metrics.metric import Counts, Metric, join_metrics
from fedpa.metrics.streaming import Evaluation, make_evaluator
from fedpa.metrics.temperature_scaling import fit_temperature, scale_outputs
from fedpa.metrics.uncertainty import Reliability, auroc, reliability, uncertainty

__all__ = [
    "Counts",
    "Evaluation",
    "Metric",
    "Reliability",
    "ScoreSketch",
    "auroc",
    "calibrate_sets",
    "classifier",
    "conformal_sets",
    "conformal_threshold",
    "fit_temperature",
    "join_metrics",
    "make_evaluator",
    "next_words",
    "reliability",
    "scale_outputs",
    "sketch_scores",
    "tagger",
    "uncertainty",
]
