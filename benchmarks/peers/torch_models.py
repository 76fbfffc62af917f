"""The works' models as PyTorch users write them, for the peers that train in PyTorch."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Arrays = dict[str, np.ndarray]


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dense1, self.dense2 = nn.Linear(9216, 128), nn.Linear(128, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.dense2(functional.relu(self.dense1(torch.flatten(x, 1))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x), y)

    def load(self, start: Arrays) -> None:
        _set(self.conv1.weight, start["conv1.w"].transpose(3, 2, 0, 1))
        _set(self.conv2.weight, start["conv2.w"].transpose(3, 2, 0, 1))
        # Ours flattens rows, columns, channels; here channels come first.
        flat = start["dense1.w"].reshape(12, 12, 64, 128).transpose(2, 0, 1, 3).reshape(9216, 128)
        _set(self.dense1.weight, flat.T)
        _set(self.dense2.weight, start["dense2.w"].T)
        for name in ("conv1", "conv2", "dense1", "dense2"):
            _set(getattr(self, name).bias, start[f"{name}.b"])


class Logistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(60, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x), y)

    def load(self, start: Arrays) -> None:
        _set(self.dense.weight, start["w"].T)
        _set(self.dense.bias, start["b"])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_004, 96)
        self.lstm = nn.LSTM(96, 670, batch_first=True)
        self.dense1, self.dense2 = nn.Linear(670, 96), nn.Linear(96, 10_004)
        # PyTorch has two biases that are added; trained both, they would move twice as fast.
        self.lstm.bias_hh_l0.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense2(self.dense1(self.lstm(self.embedding(x))[0]))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def load(self, start: Arrays) -> None:
        _set(self.embedding.weight, start["embedding"])
        _set(self.lstm.weight_ih_l0, start["lstm.wx"].T)
        _set(self.lstm.weight_hh_l0, start["lstm.wh"].T)
        _set(self.lstm.bias_ih_l0, start["lstm.b"])
        _set(self.lstm.bias_hh_l0, np.zeros_like(start["lstm.b"]))
        for name in ("dense1", "dense2"):
            _set(getattr(self, name).weight, start[f"{name}.w"].T)
            _set(getattr(self, name).bias, start[f"{name}.b"])


class Bow(nn.Module):
    """The mean of one-hots times a matrix: `sparse` picks rows, dense multiplies."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.sparse = sparse
        if sparse:
            self.bag = nn.EmbeddingBag(10_000, 500, mode="mean", sparse=True)
            self.bias = nn.Parameter(torch.zeros(500))
        else:
            self.dense = nn.Linear(10_000, 500)

    def forward(self, x: Tensor) -> Tensor:
        if self.sparse:
            return self.bag(x) + self.bias
        counts = torch.zeros(x.shape[0], 10_000)
        counts.scatter_add_(1, x, torch.ones(x.shape))
        return self.dense(counts / x.shape[1])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(self(x), y)

    def load(self, start: Arrays) -> None:
        if self.sparse:
            _set(self.bag.weight, start["w"])
            _set(self.bias, start["b"])
        else:
            _set(self.dense.weight, start["w"].T)
            _set(self.dense.bias, start["b"])


def _set(parameter: Tensor, value: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def build(model: str, arrays: Arrays, variant: str = "") -> nn.Module:
    """The model at its initial parameters."""
    makers = {"cnn": Cnn, "logistic": Logistic, "lstm": Lstm}
    module = Bow(sparse=variant == "sparse") if model == "bow" else makers[model]()
    prefix = "param/"
    module.load({k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})
    return module


def tensors(model: str, arrays: Arrays) -> tuple[Tensor, Tensor]:
    """Clients × examples × …, as PyTorch has them: channels first, 64-bit labels and word ids."""
    x, y = arrays["x"], arrays["y"]
    if model == "cnn":
        x = np.ascontiguousarray(x.transpose(0, 1, 4, 2, 3))
    x = torch.from_numpy(x)
    y = torch.from_numpy(y)
    if not y.is_floating_point():
        y = y.long()
    return (x if x.is_floating_point() else x.long()), y


def train(module: nn.Module, x: Tensor, y: Tensor, spec: dict) -> None:
    """One client's local epochs: the plain eager loop."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=spec["learning_rate"])
    size = spec["batch_size"]
    for _ in range(spec["epochs"]):
        order = torch.randperm(len(x))
        for start in range(0, len(x), size):
            rows = order[start : start + size]
            optimizer.zero_grad()
            module.loss(x[rows], y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def mean_loss(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Over all clients' data; clients are of one size."""
    return sum(float(module.loss(a, b)) for a, b in zip(x, y, strict=True)) / len(x)
