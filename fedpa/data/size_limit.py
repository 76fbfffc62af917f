"""How much data a file may claim to hold: a small one must not fill the memory or the disk."""

import os

from fedpa.errors import DataError, refuse

MAX_RATIO = 1032
"""Bytes that one stored byte may become: deflate (in npz and HDF5) makes no more of it."""
MAX_BYTES = 2**32
"""Bytes that are read into memory at once, of an array or a table that is stored in fewer."""
VARIABLE = "FEDPA_MAX_BYTES"
"""The environment's variable that replaces both limits by a number of bytes."""


def find_limit(
    stored: int, *, ratio: int = MAX_RATIO, most: int = MAX_BYTES, least: int = 0
) -> int:
    """The bytes that `stored` bytes may become. What is stored as it is, is never too much.

    Args:
        stored: Bytes of the file, or of the part of it that holds the data.
        ratio: Bytes that one of them may become.
        most: The limit for what is compressed, whatever its ratio.
        least: Bytes that are harmless, whatever their ratio.
    """
    own = os.environ.get(VARIABLE)
    if own:
        if not own.isdecimal():
            raise refuse(VARIABLE, own, "must be a whole number of bytes")
        return int(own)
    return max(stored, min(max(ratio * stored, least), most))


def check_size(
    what: str,
    claimed: int,
    stored: int,
    *,
    ratio: int = MAX_RATIO,
    most: int = MAX_BYTES,
    least: int = 0,
) -> None:
    """Refuse data that claims more bytes than `stored` bytes may become (see `find_limit`)."""
    limit = find_limit(stored, ratio=ratio, most=most, least=least)
    if claimed > limit:
        raise over_limit(what, f"claims {claimed} bytes", stored, limit)


def over_limit(what: str, claims: str, stored: int, limit: int) -> DataError:
    """The error for data of more bytes than the limit."""
    return DataError(
        f"{what} {claims}, stored in {stored}: at most {limit} are read. It may be damaged; if it "
        f"is right, set {VARIABLE} to the bytes it needs"
    )
