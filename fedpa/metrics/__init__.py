"""What is measured of a model."""

from fedpa.metrics.classification import classification

__all__ = ["classification"]
