"""What comes out: a distribution over θ, prediction with it, and whether it can be trusted."""

from fedpa.posterior.agreement import Influence, influence
from fedpa.posterior.infer import from_fit, from_run, infer, stop_when_converged
from fedpa.posterior.noise import estimate_noise
from fedpa.posterior.pooled import ParameterComparison, PooledComparison, compare_with_pooled
from fedpa.posterior.posterior import Posterior
from fedpa.posterior.prediction import Interval, Prediction

__all__ = [
    "Influence",
    "Interval",
    "ParameterComparison",
    "PooledComparison",
    "Posterior",
    "Prediction",
    "compare_with_pooled",
    "estimate_noise",
    "from_fit",
    "from_run",
    "infer",
    "influence",
    "stop_when_converged",
]
