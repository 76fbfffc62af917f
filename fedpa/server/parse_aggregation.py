"""Aggregations as configurations write them: `trimmed-mean:0.2`."""

from fedpa.errors import FedpaError, ask_if_meant, refuse
from fedpa.server.aggregation import Aggregation, weighted_mean
from fedpa.server.bucketing import bucketing
from fedpa.server.centered_clipping import centered_clipping
from fedpa.server.clipped_mean import clipped_mean
from fedpa.server.geometric_median import geometric_median
from fedpa.server.median import median
from fedpa.server.multi_krum import multi_krum
from fedpa.server.trimmed_mean import trimmed_mean

KNOWN = (
    "weighted-mean, clipped-mean:BOUND, centered-clipping[:BOUND], trimmed-mean:SHARE, median, "
    "geometric-median, multi-krum:MALICIOUS or bucketing:SIZE:AGGREGATION"
)


def parse_aggregation(text: str, field: str = "aggregation") -> Aggregation:
    """Read an aggregation as a configuration has it.

    Args:
        text: `weighted-mean`, `clipped-mean:BOUND`, `centered-clipping[:BOUND]`,
            `trimmed-mean:SHARE`, `median`, `geometric-median`, `multi-krum:MALICIOUS` or
            `bucketing:SIZE:AGGREGATION`.
        field: The setting's name, for the error message.
    Returns:
        The aggregation.
    Raises:
        FedpaError: The text is none of these, or a number is out of range.
    Example:
        >>> import fedpa
        >>> aggregation = fedpa.server.parse_aggregation("bucketing:2:trimmed-mean:0.2")
    """
    try:
        match text.split(":"):
            case ["weighted-mean"]:
                return weighted_mean()
            case ["clipped-mean", bound]:
                return clipped_mean(float(bound))
            case ["centered-clipping"]:
                return centered_clipping()
            case ["centered-clipping", bound]:
                return centered_clipping(float(bound))
            case ["trimmed-mean", share]:
                return trimmed_mean(float(share))
            case ["median"]:
                return median()
            case ["geometric-median"]:
                return geometric_median()
            case ["multi-krum", malicious]:
                return multi_krum(int(malicious))
            case ["bucketing", size, *inner]:
                return bucketing(parse_aggregation(":".join(inner), field), int(size))
    except FedpaError:
        raise
    except ValueError:
        pass
    names = [word.split(":")[0].split("[")[0] for word in KNOWN.replace(" or ", ", ").split(", ")]
    raise refuse(field, text, f"must be {KNOWN}{ask_if_meant(text.split(':')[0], names)}")
