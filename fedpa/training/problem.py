"""A problem: data, model, loss and metric, ready to be trained and evaluated."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedpa.data.federated import FederatedData
from fedpa.metrics.metric import Metric
from fedpa.objectives.objective import Reduction
from fedpa.objectives.sparse_table import SparseTable
from fedpa.types import Examples, Key, Loss, Losses, Regularizer


class Problem(NamedTuple):
    """What is trained and how well it does; a task of the laboratory is loaded as one."""

    clients: FederatedData
    """Who trains."""
    init: Callable[[Key], Any]
    """key → a fresh model, any pytree."""
    loss: Loss
    metric: Metric
    test: FederatedData
    validation: FederatedData | None = None
    """Who decides what is chosen."""
    regularizer: Regularizer | None = None
    reduction: Reduction = "mean"
    sparse: SparseTable | None = None
    weight: Callable[[Examples], Losses] | None = None
    eval_batch_size: int = 100
    dataset: str | None = None
    """Which of several data sets it is; None if there is only one."""
