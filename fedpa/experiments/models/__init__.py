"""The benchmarks' models, one file each (section 5, appendix D).

Layers are written for speed where XLA's CPU code is slow; each equals a plain formulation.
"""

from fedpa.experiments.models.bag_of_words import BagOfWords
from fedpa.experiments.models.cnn import CNN
from fedpa.experiments.models.lstm import NextWordLSTM
from fedpa.experiments.models.resnet import ResNet, resnet18, small_resnet

__all__ = ["CNN", "BagOfWords", "NextWordLSTM", "ResNet", "resnet18", "small_resnet"]
