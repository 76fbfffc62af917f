"""What is measured of a model."""

from fedpa.metrics.classification import classifier

__all__ = ["classifier"]
