"""A client's inference: the Gaussian site that stands for its likelihood, one file per way.

Each is a function (likelihood, cavity, guess, key) → (site, info).
"""

from fedpa.sites.laplace import laplace
from fedpa.sites.sampled import sampled
from fedpa.sites.site import FindSite, Local, SiteInfo, fit_score, linearize, localize
from fedpa.sites.variational import variational

__all__ = [
    "FindSite",
    "Local",
    "SiteInfo",
    "fit_score",
    "laplace",
    "linearize",
    "localize",
    "sampled",
    "variational",
]
