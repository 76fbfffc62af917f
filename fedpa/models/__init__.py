"""The benchmarks' models, one file each (section 5, appendix D)."""

from fedpa.models.bag_of_words import BagOfWords
from fedpa.models.cnn import CNN
from fedpa.models.kernels.convolution import convolution_input
from fedpa.models.lstm import NextWordLSTM
from fedpa.models.model import Model, models
from fedpa.models.resnet18 import ResNet18
from fedpa.models.small_resnet import SmallResNet

__all__ = [
    "CNN",
    "BagOfWords",
    "Model",
    "NextWordLSTM",
    "ResNet18",
    "SmallResNet",
    "convolution_input",
    "models",
]
