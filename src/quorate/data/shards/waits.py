"""Waiting for bytes, and hearing meanwhile that nobody wants them any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOOK = 0.1
"""Seconds between two looks at whether what is waited for is still wanted."""


class Unwanted(BaseException):
    """What is waited for is wanted no longer; `reason` is the error that says why.

    No `Exception`: a dataset of the task that catches those would take it for trouble with its data, and go on.
    """

    def __init__(self, reason: Exception) -> None:
        self.reason = reason
        super().__init__(str(reason))


_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def hearing(check: Callable[[], None]) -> Iterator[None]:
    """In this thread, whoever waits for bytes calls `check` now and then; what it raises ends the waiting."""
    before = _check.set(check)
    try:
        yield
    except Unwanted as unwanted:
        raise unwanted.reason from None
    finally:
        _check.reset(before)


def look() -> None:
    """Raise `Unwanted` if what this thread waits for is not wanted any more."""
    check = _check.get()
    if check is None:
        return
    try:
        check()
    except Exception as error:
        raise Unwanted(error) from None
