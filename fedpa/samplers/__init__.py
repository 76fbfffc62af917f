"""Ways to sample a client's posterior, one file each, behind one interface (Algorithm 4)."""

from fedpa.samplers.diagnostics import Diagnostics, diagnose, judge, kish_ess, measure_mixing, worst
from fedpa.samplers.exact import exact
from fedpa.samplers.hmc import hmc
from fedpa.samplers.iasg import iasg
from fedpa.samplers.nuts import nuts
from fedpa.samplers.sampler import Epochs, Sampler, Steps, draw, draw_chains
from fedpa.samplers.sghmc import sghmc
from fedpa.samplers.sgld import sgld

__all__ = [
    "Diagnostics",
    "Epochs",
    "Sampler",
    "Steps",
    "diagnose",
    "draw",
    "draw_chains",
    "exact",
    "hmc",
    "iasg",
    "judge",
    "kish_ess",
    "measure_mixing",
    "nuts",
    "sghmc",
    "sgld",
    "worst",
]
