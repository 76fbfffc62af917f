"""Errors of loggers: refused while opening, one warning later."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpa.errors import FedpaError
from fedpa.training.loggers.logger import Open, Write


def forgiving(name: str, opened: Open) -> Open:
    """The same logger, which never ends a run that has begun: after an error it is left alone."""

    @contextlib.contextmanager
    def open_forgiving(
        out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
    ) -> Iterator[Write]:
        try:
            manager = opened(out, config, past)
            write = manager.__enter__()
        except FedpaError:
            raise
        except Exception as error:
            raise FedpaError(f"logger {name!r} can't be opened: {_reason(error)}") from error
        failed = False

        def give_up(error: Exception) -> None:
            nonlocal failed
            if not failed:
                failed = True
                warnings.warn(
                    f"logger {name!r} failed and is left alone from here on; metrics.jsonl has "
                    f"every round: {_reason(error)}",
                    stacklevel=3,
                )

        def attempt(record: Mapping[str, Any]) -> None:
            if not failed:
                try:
                    write(record)
                except Exception as error:
                    give_up(error)

        passing: BaseException | None = None
        try:
            yield attempt
        except BaseException as error:
            passing = error  # decides how the logger says that the run ended
            raise
        finally:
            kind, trace = (type(passing), passing.__traceback__) if passing else (None, None)
            try:
                manager.__exit__(kind, passing, trace)
            except Exception as error:
                give_up(error)

    return open_forgiving


def _reason(error: Exception) -> str:
    """One line, whatever the library makes of it."""
    return " ".join(str(error).split()) or type(error).__name__
