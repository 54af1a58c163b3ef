"""Workers in processes of their own."""

import multiprocessing
from collections.abc import Callable
from typing import Any

FORK = multiprocessing.get_context("fork")


class Forked:
    """A worker in a process of its own, and what it tells: the last that it is given is its end of a pipe."""

    def __init__(self, run: Callable[..., None], *given: Any) -> None:
        self.ours, theirs = FORK.Pipe()
        self.process = FORK.Process(target=run, args=(*given, theirs))
        self.process.start()
        theirs.close()

    def hear(self) -> str:
        assert self.ours.poll(100), "the process said nothing"
        return str(self.ours.recv())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.ours.close()
