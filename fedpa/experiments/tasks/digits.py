"""Handwritten digits: scikit-learn's bundled data set, 100 clients with label skew.

1,797 real 8×8 images (the test set of UCI's optical digits). A fifth is held out; the rest is
divided among 100 clients of 14 or 15 images whose label proportions are Dirichlet(0.1) draws, so
that most clients have one to three digits. The federation is the same for every seed. The model is
a small perceptron.
"""

import contextlib
import functools
import zipfile
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import numpy as np

from fedpa.data.cache import settle, stage
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.task import Preset, Task, TaskOptions, make_grid
from fedpa.places import cache

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

CLIENTS = 100
CONCENTRATION = 0.1
FEDERATION_SEED = 0


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import hold_out

    problem = _load_all()
    clients, validation = hold_out(problem.clients, options.validation_share or 0.0)
    return problem._replace(clients=clients, validation=validation)


@functools.cache
def _load_all() -> "Problem":
    from fedpa.data import dirichlet_label_skew, from_mapping
    from fedpa.experiments.models import perceptron
    from fedpa.metrics.classification import classifier
    from fedpa.objectives.likelihood import Likelihood
    from fedpa.training.problem import Problem

    x_train, x_test, y_train, y_test = _split()
    dealt = dirichlet_label_skew(y_train, CLIENTS, CONCENTRATION, FEDERATION_SEED)
    clients = {
        f"client-{index:03d}": {"x": x_train[rows], "y": y_train[rows]}
        for index, rows in enumerate(dealt)
    }
    test = from_mapping({"test": {"x": x_test, "y": y_test}})
    return Problem(
        from_mapping(clients),
        perceptron.init,
        perceptron.loss,
        classifier(perceptron.logits),
        test,
        eval_batch_size=len(x_test),
        likelihood=Likelihood(lambda params, batch: perceptron.logits(params, batch["x"])),
    )


def _split() -> tuple[np.ndarray, ...]:
    """Images and labels to train with and to test on.

    Kept in the cache: importing scikit-learn takes a second, and a node starts a process for every
    message.
    """
    names = ("x_train", "x_test", "y_train", "y_test")
    try:
        release = version("scikit-learn")
    except PackageNotFoundError:
        raise ModuleNotFoundError("scikit-learn is not installed", name="sklearn") from None
    target = cache() / "digits" / f"scikit-learn-{release}.npz"
    try:
        with target.open("rb") as file, np.load(file) as stored:
            return tuple(stored[name] for name in names)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass  # not there yet, or damaged
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    split = tuple(train_test_split(x, y, test_size=0.2, random_state=FEDERATION_SEED, stratify=y))
    with contextlib.suppress(OSError), stage(target) as beside:
        made = beside / target.name
        np.savez(made, **dict(zip(names, split, strict=True)))
        settle(made, target)
    return split


PLATEAU = 250
"""FedAvg's plateau: from this round on, 100 more rounds raise its accuracy by less than 0.005.

0.005 is the standard deviation of its evaluations from round to round. Measured over 600 rounds
with the settings below: averages of 20 rounds, mean of the seeds 0 to 4; 0.926 at round 100, 0.947
at 200, 0.953 at 250, 0.958 at 350, 0.964 at 600.
"""
LAPTOP = Preset(
    PLATEAU + 100,
    20,
    Hyperparameters(
        epochs=5,
        batch_size=5,
        burn_in_rounds=PLATEAU,
        rho=1.0,
        client_learning_rate=0.05,
        server_learning_rate=1.0,
        server_momentum=0.0,
    ),
    summary="350 rounds in seconds",
    targets=(0.8, 0.9),
    seeds=3,
    grid=make_grid((0.5, 1.0), (0.02, 0.05, 0.1), (2, 5), (10, 50, PLATEAU), (0.01, 0.1, 1.0)),
)

TASK = Task(
    summary="scikit-learn's 8×8 digits, 100 clients with Dirichlet(0.1) label skew (bundled)",
    load=load,
    presets={"laptop": LAPTOP},
    compared=("fedavg", "fedpa", "mean-scaled", "global-precision"),
    takes=("validation_share",),
    models={"perceptron": 2_410},
)
