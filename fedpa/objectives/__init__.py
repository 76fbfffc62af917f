"""What a client's posterior is (section 3, eq. 1–3, Props. 1 and 2)."""

from fedpa.objectives import least_squares, quadratic
from fedpa.objectives.client_data import ClientData, client_data
from fedpa.objectives.layer_inputs import (
    convolution_input,
    layer_input,
    layer_output,
    observing,
    over_examples,
    per_example,
    table_input,
)
from fedpa.objectives.least_squares import Federation, make_regression
from fedpa.objectives.likelihood import Likelihood
from fedpa.objectives.objective import Objective, SparseTable, client_loss, log_posterior
from fedpa.objectives.prior import NormalPrior, Prior, normal_prior
from fedpa.objectives.quadratic import Quadratic, global_posterior, laplace

__all__ = [
    "ClientData",
    "Federation",
    "Likelihood",
    "NormalPrior",
    "Objective",
    "Prior",
    "Quadratic",
    "SparseTable",
    "client_data",
    "client_loss",
    "convolution_input",
    "global_posterior",
    "laplace",
    "layer_input",
    "layer_output",
    "least_squares",
    "log_posterior",
    "make_regression",
    "normal_prior",
    "observing",
    "over_examples",
    "per_example",
    "quadratic",
    "table_input",
]
