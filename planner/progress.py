"""Who wants to know how far long work has come: the command line's bars listen here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Called with (what is being done, done so far, of how many); 0 of 0 where nobody knows."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Sends the progress of what runs inside to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(what: str, done: int = 0, total: int = 0) -> None:
    """Tells the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)
