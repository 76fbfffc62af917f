"""A run's history: one record per round, plain numbers and texts, as `metrics.jsonl` holds them."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedpa.errors import FedpaError, refuse

if TYPE_CHECKING:
    import pandas

Record = dict[str, Any]


class History(list[Record]):
    """A list of records, and a table where pandas is installed."""

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per round, one column per metric; empty where a round has no such metric."""
        try:
            import pandas
        except ImportError:
            raise FedpaError(
                "pandas is not installed: pip install 'fedpa[tables]' brings it"
            ) from None
        frame = pandas.DataFrame(list(self))
        return frame.set_index("round") if len(self) else frame


def plain(metrics: Mapping[str, Any]) -> Record:
    """Metrics as numbers and texts that JSON can hold; arrays of one element are numbers."""
    return {_named(name): _plain(name, value) for name, value in metrics.items()}


def _named(name: Any) -> str:
    if not isinstance(name, str):
        raise refuse("a metric's name", name, 'must be a text, as in {"accuracy": 0.9}')
    return name


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        if value.size != 1:
            raise refuse(name, value, "is an array: a metric must be one number")
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan  # files know one way to say that there is no number
    if not isinstance(value, bool | int | float | str):
        raise refuse(name, value, "must be a number or a text")
    return value


def line(record: Mapping[str, Any]) -> str:
    """A record as a line of `metrics.jsonl`."""
    return json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n"


def from_line(text: str) -> Record:
    """A line's record; what was no number is NaN again."""
    return {key: math.nan if value is None else value for key, value in json.loads(text).items()}


def _json_value(value: Any) -> Any:
    """JSON has no NaN or infinity: null says that there is no number."""
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
