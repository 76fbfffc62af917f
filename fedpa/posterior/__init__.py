"""What comes out: a distribution over θ, prediction with it, and whether it can be trusted."""

from fedpa.posterior.agreement import Influence, influence
from fedpa.posterior.infer import from_fit, infer
from fedpa.posterior.posterior import Posterior

__all__ = ["Influence", "Posterior", "from_fit", "infer", "influence"]
