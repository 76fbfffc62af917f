"""What tests ask of an error: its type, and the field, value, file or client that it names."""

import re

import pytest

from fedpa import FedpaError


def refused(*anchors: str, kind: type[Exception] = FedpaError):
    """The block raises an error of this type, in one line that holds these anchors in this order.

    An anchor is `field = value`, or a file's, a client's or an array's name: not the sentence
    around them, which may be improved. It begins and ends at the edge of a word.

    Args:
        anchors: As the message has them, not regular expressions.
        kind: The error type.
    Example:
        with refused("rho = -0.1"):
            fedpa.deltas.fixed(-0.1)
    """
    places = ".*".join(rf"(?<!\w){re.escape(anchor)}(?!\w)" for anchor in anchors)
    return pytest.raises(kind, match=rf"\A.*{places}", check=lambda error: "\n" not in str(error))
