"""Ways to sample a client's posterior, one file each, behind one interface (Algorithm 4)."""

from fedpa.samplers.exact import exact
from fedpa.samplers.iasg import Epochs, Steps, iasg
from fedpa.samplers.sampler import Sampler, draw

__all__ = ["Epochs", "Sampler", "Steps", "draw", "exact", "iasg"]
