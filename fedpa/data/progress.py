"""Long work on files tells how far it is; who shows it decides how."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeAlias

Told: TypeAlias = Callable[[int, int | None], None]
"""(done so far, of how many if that is known) → None."""

Listener: TypeAlias = Callable[[str], contextlib.AbstractContextManager[Told]]
"""What is being done → where to tell how far it is."""


@contextlib.contextmanager
def _nobody(what: str) -> Iterator[Told]:
    del what
    yield lambda done, total: None


_listener: contextvars.ContextVar[Listener] = contextvars.ContextVar("listener", default=_nobody)


def progress(what: str) -> contextlib.AbstractContextManager[Told]:
    """`with progress("indexing a.h5") as tell: … tell(done, total)`."""
    return _listener.get()(what)


@contextlib.contextmanager
def shown_by(listener: Listener) -> Iterator[None]:
    """Show the progress of what is done inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
