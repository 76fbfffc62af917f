"""What comes out: a distribution over θ, prediction with it, and whether it can be trusted."""

from fedpa.posterior.agreement import Influence, influence
from fedpa.posterior.infer import from_fit, from_run, infer, stop_when_converged
from fedpa.posterior.posterior import Posterior

__all__ = [
    "Influence",
    "Posterior",
    "from_fit",
    "from_run",
    "infer",
    "influence",
    "stop_when_converged",
]
