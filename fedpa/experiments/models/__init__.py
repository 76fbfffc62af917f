"""The benchmarks' models, one file each (section 5, appendix D)."""

from fedpa.experiments.models.bag_of_words import BagOfWords
from fedpa.experiments.models.cnn import CNN
from fedpa.experiments.models.lstm import NextWordLSTM
from fedpa.experiments.models.model import Model, models
from fedpa.experiments.models.resnet18 import ResNet18
from fedpa.experiments.models.small_resnet import SmallResNet

__all__ = [
    "CNN",
    "BagOfWords",
    "Model",
    "NextWordLSTM",
    "ResNet18",
    "SmallResNet",
    "models",
]
