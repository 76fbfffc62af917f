"""A run's history: one record of numbers and strings per round, as in `metrics.jsonl`."""

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
    """A run's records, one per round: a list of dicts, or a table if pandas is installed.

    Example:
        >>> history = History([{"round": 1, "train/loss": 2.0}, {"round": 2, "train/loss": 1.5}])
        >>> [record["train/loss"] for record in history]
        [2.0, 1.5]
    """

    def to_pandas(self) -> "pandas.DataFrame":
        """Make a table: one row per round, one column per metric.

        Returns:
            Rows by round; a cell is empty if the round does not have the metric.
        Raises:
            FedpaError: pandas is not installed.
        Example:
            >>> History([{"round": 1, "train/loss": 2.0}]).to_pandas()["train/loss"].tolist()
            [2.0]
        """
        try:
            import pandas
        except ImportError:
            raise FedpaError(
                "pandas is not installed: pip install 'fedpa[tables]' installs it"
            ) from None
        frame = pandas.DataFrame(list(self))
        return frame.set_index("round") if len(self) else frame


NUMERIC = ("train", "comm", "eval", "valid", "test")
"""Prefixes of metrics that must be numbers, as in `eval/accuracy`."""
_ALWAYS = ("seconds",)
"""Numbers that every record has."""
_NOT_IN_SECRET = ("comm/bytes_up", "comm/bytes_down", "train/rejected")
"""Numbers that every record has but those of a private deployment: they are not noised."""
REJECTED = "train/rejected_clients"
SECRET = "privacy/deployed"
"""In the records of a private deployment."""


def plain(metrics: Mapping[str, Any]) -> Record:
    """Convert metrics to numbers and strings for JSON; arrays of one element become numbers."""
    found = {_check_name(name): _plain(name, value) for name, value in metrics.items()}
    _check_numbers(found)
    return found


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise refuse("a metric's name", name, 'must be a string, as in {"accuracy": 0.9}')
    return name


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        if value.size != 1:
            raise refuse(name, value, "is an array: a metric must be one number")
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan  # files have one value for a missing number
    if not isinstance(value, bool | int | float | str):
        raise refuse(name, value, "must be a number or a string")
    return value


def line(record: Mapping[str, Any]) -> str:
    """Format a record as a line of `metrics.jsonl`."""
    return json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n"


def from_line(text: str | bytes) -> Record:
    """Read a line's record; null becomes NaN. Other content is refused."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise refuse("the record", found, "must be an object with a round's metrics")
    if not is_unicode(found):
        raise refuse("the record", found, "has text with halves of characters, which is not UTF-8")
    record = {key: math.nan if value is None else value for key, value in found.items()}
    if not is_count(record.get("round")):
        raise refuse("round", record.get("round"), "must be the number of a round")
    if not isinstance(record.get("phase"), str):
        raise refuse("phase", record.get("phase"), "must be a string")
    always = _ALWAYS if SECRET in record else (*_ALWAYS, *_NOT_IN_SECRET)
    for name in always:
        if not is_number(record.get(name)):
            raise refuse(name, record.get(name), "must be a number")
    rejected = record.get(REJECTED, [])
    if not isinstance(rejected, list) or not all(isinstance(name, str) for name in rejected):
        raise refuse(REJECTED, rejected, "must be a list of clients' names")
    _check_numbers(record)
    return record


def _check_numbers(record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        if name.partition("/")[0] in NUMERIC and name != REJECTED and not is_number(value):
            raise refuse(name, value, "must be a number")
        if isinstance(value, dict):
            raise refuse(name, value, "must be a number, a string or a list of them")


def is_number(value: object) -> bool:
    """Whether it is a number that fits a float."""
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)


def is_unicode(value: object) -> bool:
    """Whether all text of a JSON value can be written: its escapes may be halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_count(value: object) -> bool:
    """Whether it can be a number of rounds."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _json_value(value: Any) -> Any:
    """Convert NaN and infinity, which JSON does not have, to null."""
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
