"""What comes out: a distribution over θ, prediction with it, and whether it can be trusted."""

from fedpa.posterior.agreement import Influence, influence
from fedpa.posterior.density import Density, Ensemble, Normal, Swag
from fedpa.posterior.evaluation import (
    PredictionSettings,
    draw_models,
    draw_outputs,
    evaluate_posterior,
)
from fedpa.posterior.files import load_posterior, save_posterior
from fedpa.posterior.infer import from_fit, from_run, infer, stop_when_converged
from fedpa.posterior.laplace import (
    Curvature,
    choose_by_marginal_likelihood,
    choose_by_validation,
    laplace_posterior,
    measure_curvature,
)
from fedpa.posterior.noise import estimate_noise
from fedpa.posterior.pooled import ParameterComparison, PooledComparison, compare_with_pooled
from fedpa.posterior.posterior import Posterior
from fedpa.posterior.prediction import Interval, Prediction
from fedpa.posterior.training import client_ensemble, swag_posterior

__all__ = [
    "Curvature",
    "Density",
    "Ensemble",
    "Influence",
    "Interval",
    "Normal",
    "ParameterComparison",
    "PooledComparison",
    "Posterior",
    "Prediction",
    "PredictionSettings",
    "Swag",
    "choose_by_marginal_likelihood",
    "choose_by_validation",
    "client_ensemble",
    "compare_with_pooled",
    "draw_models",
    "draw_outputs",
    "estimate_noise",
    "evaluate_posterior",
    "from_fit",
    "from_run",
    "infer",
    "influence",
    "laplace_posterior",
    "load_posterior",
    "measure_curvature",
    "save_posterior",
    "stop_when_converged",
    "swag_posterior",
]
