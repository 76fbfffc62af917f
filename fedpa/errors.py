"""Errors a person can act on: each names the field, the value it had and what would be right."""


class FedpaError(ValueError):
    """Bad input, found before any work starts. The message is one line."""


def refuse(field: str, value: object, expected: str) -> FedpaError:
    """The error for `field` having `value` where `expected` describes what would be right."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return FedpaError(f"{field} = {shown}: {expected}")
