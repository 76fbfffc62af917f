"""LEAF's JSON: users, their numbers of samples, and `user_data` with x and y of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpa import places
from fedpa.data.cache import Index, Tell, fill_directory, progress, refuse_duplicates, stamp
from fedpa.data.federated import FederatedData
from fedpa.data.readers.hdf5 import open_hdf5, write_hdf5
from fedpa.data.readers.reader import Arrays, make_federation, read_json
from fedpa.errors import DataError, FedpaError, refuse

CONVERTED = "users.h5"


def open_leaf(path: str | Path) -> FederatedData:
    """Open a JSON file of LEAF's layout, or all of them in a directory.

    JSON can only be read whole, so every file is read once and kept, client by client, in the
    cache. Numbers with a point become float32, whole ones int64, text object arrays of `str`.

    Args:
        path: The file or the directory.
    Returns:
        The federation, a client for every user.
    Raises:
        DataError: A file is damaged or of another layout.
    Example:
        >>> import json
        >>> leaf = {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [5, 6]}}}
        >>> _ = Path("train.json").write_text(json.dumps(leaf))
        >>> open_leaf("train.json").examples("a")
        {'x': array([5, 6])}
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} is not there")
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no .json files")
    opened = [open_hdf5(_convert(file)) for file in files]
    home = {_user(name): data for data in opened for name in data.ids}
    ids = sorted(_user(name) for data in opened for name in data.ids)
    refuse_duplicates(path, ids)
    counts = [home[user].num_examples(_client(user)) for user in ids]
    index = Index(ids, np.array(counts, np.int64))
    return make_federation(path, index, lambda user: home[user].examples(_client(user)))


def _convert(file: Path) -> Path:
    """Convert it to HDF5, once, in the cache."""

    def make(inside: Path) -> None:
        with progress(f"converting {file.name}") as tell:
            try:
                write_hdf5(inside / CONVERTED, _users(file, tell))
            except DataError:
                raise
            except FedpaError as error:  # of a name or a text that HDF5 does not take
                raise DataError(f"{file}: {error}") from None

    target = places.cache() / "leaf" / f"{file.stem}-{stamp(file)}"
    return fill_directory(target, make) / CONVERTED


def _users(file: Path, tell: Tell) -> Iterator[tuple[str, Arrays]]:
    content = _parse(file)
    users, numbers, data = (content[key] for key in ("users", "num_samples", "user_data"))
    if not users:
        raise DataError(f"{file} has no users")
    for user in users:
        if not isinstance(user, str) or not user or "\0" in user:
            raise DataError(f"{file}: user {user!r}: must be text")
    refuse_duplicates(file, sorted(users))
    if len(users) != len(numbers):
        raise DataError(f"{file} has {len(users)} users and {len(numbers)} num_samples")
    if strangers := sorted(set(data) - set(users)):
        raise DataError(f"{file}: user {strangers[0]!r} has data but is not among the users")
    for i, (user, number) in enumerate(zip(users, numbers, strict=True)):
        if user not in data:
            raise DataError(f"{file}: user {user!r} has no data")
        yield _client(user), _arrays(f"{file}: user {user!r}", data.pop(user), number)
        tell(i + 1, len(users))


def _parse(file: Path) -> dict[str, Any]:
    content = read_json(file)
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise DataError(f"{file} has no {key!r}: it is not in the layout of LEAF")
    return dict(content)


def _arrays(user: str, features: Any, number: Any) -> Arrays:
    if not isinstance(features, dict) or not features:
        raise DataError(f"{user} has no data")
    if isinstance(number, bool) or not isinstance(number, int):
        raise refuse(f"{user}: num_samples", number, "must be a whole number")
    arrays = {}
    for feature, values in features.items():
        if not isinstance(values, list) or len(values) != number:
            length = len(values) if isinstance(values, list) else type(values).__name__
            raise DataError(f"{user} has {length} of {feature!r}: num_samples says {number}")
        arrays[feature] = _array(f"{user}, {feature!r}", values)
    # An empty list tells neither shape nor type: those of the others are taken when it is read.
    return arrays if number else {}


def _array(what: str, values: list[Any]) -> np.ndarray:
    try:
        kinds = _kinds(values)
        # Text as objects: an array of NumPy's text has room for the longest one in every place.
        array = np.array(values, object if str in kinds else None)
    except (ValueError, OverflowError, RecursionError):
        raise DataError(f"{what} is ragged: samples must be of one shape") from None
    if kinds == {str}:
        if set(map(type, array.flat)) != {str}:
            raise DataError(f"{what} is ragged: samples must be of one shape")
        return array
    if array.dtype.kind == "f":
        largest = np.finfo(np.float32).max
        if (np.abs(array[np.isfinite(array)]) > largest).any():
            raise DataError(f"{what} has a number above {largest:.3g}, the largest float32")
        return array.astype(np.float32)
    if array.dtype.kind in "bi":
        return array
    raise DataError(f"{what} is neither numbers nor text")


def _kinds(values: list[Any]) -> set[type]:
    """The types of all that is in the lists."""
    kinds = set(map(type, values))
    if list in kinds:
        kinds.remove(list)
        kinds.update(*(_kinds(value) for value in values if isinstance(value, list)))
    return kinds


def _client(user: str) -> str:
    """A user's name as HDF5 takes it: there, `/` parts groups and `.` is the group itself."""
    name = user.replace("%", "%25").replace("/", "%2F")
    return "%2E" if name == "." else name


def _user(client: str) -> str:
    return client.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")
