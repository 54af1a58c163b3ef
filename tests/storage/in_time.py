"""A limit for what may wait for ever."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def in_time(seconds: int = 60) -> Iterator[None]:
    """A read that waits for ever ends by SIGALRM."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
