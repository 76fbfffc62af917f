"""The paper's own results (its table 3 and appendix D), to stand beside measured ones.

Accuracy and the other metrics are shares here, percent there. Measured rows are never compared with
these by intervals: seeds, software and partitions differ.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    method: str
    final: float | None
    """Of the task's metric at the end (mean of the last 100 rounds' evaluations)."""
    rounds_to: Mapping[float, int | None] = {}
    note: str = ""


def _rows(
    targets: tuple[float, ...], *rows: tuple[str, float | None, tuple[int | None, ...], str]
) -> tuple[Published, ...]:
    return tuple(
        Published(method, final, dict(zip(targets, reached, strict=True)) if reached else {}, note)
        for method, final, reached, note in rows
    )


_SHORTER = "1,000 rounds only"

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "emnist": _rows(
        (0.84, 0.86),
        ("AFO", 0.868, (546, 1291), "Reddi et al."),
        ("MIME", 0.849, (464, None), _SHORTER),
        ("FedAvg[1]", 0.865, (451, 1360), ""),
        ("FedAvg[5]", 0.859, (86, None), ""),
        ("FedPA[5]", 0.873, (84, 92), ""),
    ),
    "cifar100": _rows(
        (0.3, 0.4),
        ("AFO", 0.411, (898, 1401), "Reddi et al."),
        ("MIME", 0.339, (680, None), _SHORTER),
        ("FedAvg[1]", 0.317, (1379, None), ""),
        ("FedAvg[10]", 0.421, (348, 896), ""),
        ("FedPA[10]", 0.463, (348, 543), ""),
    ),
    "stackoverflow-nwp": _rows(
        (),
        ("AFO", 0.234, (), "best in round 1049"),
        ("FedAvg[1]", 0.228, (), "best in round 1074"),
        ("FedAvg[5]", 0.230, (), "best in round 870"),
        ("FedPA[5]", 0.234, (), "best in round 805"),
    ),
    "stackoverflow-lr": _rows(
        (),
        ("AFO", 0.680, (), "recall@5"),
        ("FedAvg[1]", 0.691, (), "recall@5; precision 0.7458, macro-F1 0.149, micro-F1 0.438"),
        ("FedAvg[5]", 0.687, (), "recall@5; precision 0.7865, macro-F1 0.156, micro-F1 0.433"),
        ("FedPA[5]", 0.686, (), "recall@5; precision 0.728, macro-F1 0.173, micro-F1 0.440"),
    ),
}
"""By task; the order is the paper's."""
