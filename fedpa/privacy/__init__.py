"""Differential privacy: clipping, noise, cohorts, accounting; `fedpa.private` uses them all."""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.privacy.accounting import (
        Budget,
        Mechanism,
        compute_epsilon,
        find_noise_multiplier,
    )
    from fedpa.privacy.clipping import AdaptiveClip, clip_factor, split_noise
    from fedpa.privacy.cohorts import draw_cohort, take_turns
    from fedpa.privacy.ledger import Ledger
    from fedpa.privacy.noise import draw_normals, draw_system_normals, make_bands
    from fedpa.privacy.release import Release

make_lazy(
    __name__,
    {
        "fedpa.privacy.accounting": (
            "Budget",
            "Mechanism",
            "compute_epsilon",
            "find_noise_multiplier",
        ),
        "fedpa.privacy.clipping": (
            "AdaptiveClip",
            "clip_factor",
            "split_noise",
        ),
        "fedpa.privacy.cohorts": (
            "draw_cohort",
            "take_turns",
        ),
        "fedpa.privacy.ledger": ("Ledger",),
        "fedpa.privacy.noise": (
            "draw_normals",
            "draw_system_normals",
            "make_bands",
        ),
        "fedpa.privacy.release": ("Release",),
    },
)

__all__ = [
    "AdaptiveClip",
    "Budget",
    "Ledger",
    "Mechanism",
    "Release",
    "clip_factor",
    "compute_epsilon",
    "draw_cohort",
    "draw_normals",
    "draw_system_normals",
    "find_noise_multiplier",
    "make_bands",
    "split_noise",
    "take_turns",
]
