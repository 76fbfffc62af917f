"""`loggers.json`: by what loggers find their run again when it is resumed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpa.errors import FedpaError
from fedpa.training.whole_files import write_atomically

MEMORY = "loggers.json"


def recall(out: Path, name: str) -> dict[str, Any]:
    """What this logger remembered, or nothing."""
    return _read(out).get(name, {})


def remember(out: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Keep these facts, in the place of earlier ones of this logger."""
    text = json.dumps({**_read(out), name: dict(facts)}, indent=2)
    write_atomically(out / MEMORY, (text + "\n").encode())


def _read(out: Path) -> dict[str, dict[str, Any]]:
    try:
        return json.loads((out / MEMORY).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FedpaError(
            f"{out / MEMORY} is cut or no JSON ({error}): remove it to begin new logs"
        ) from None
