"""Batches of columns, put together ahead by a thread: for these no code of the task runs, and nothing is drawn."""

import queue
import threading
from collections.abc import Callable

from quorate.core.errors import JobError
from quorate.data.reading import Request
from quorate.data.samples import Fetched, FetchTrouble, Samples
from quorate.data.shards.threads import start_helper
from quorate.data.shards.waits import LOOK

_GRACE = 0.05


class Assembly:
    """A batch that is being put together."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._done = threading.Event()
        self._answer: Fetched | FetchTrouble | None = None
        self._error: BaseException | None = None

    def make(self, samples: Samples) -> None:
        """Put it together."""
        try:
            self._answer = samples[self.request]
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, thread: threading.Thread, check: Callable[[], None]) -> Fetched | FetchTrouble:
        """The answer, from a thread that must be alive until it has given it; `check` is called now and then."""
        while not self._done.wait(LOOK):
            check()
            if not thread.is_alive() and not self._done.is_set():
                raise JobError("The thread that puts batches together is gone.")
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer


class Assembler:
    """Puts batches together in the order in which they are asked for."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._asked: queue.SimpleQueue[Assembly | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, request: Request) -> Assembly:
        """Have a batch put together."""
        assembly = Assembly(request)
        if self._thread is None:
            self._thread = start_helper(self._work, "batch-assembler")
        self._asked.put(assembly)
        return assembly

    def take(self, assembly: Assembly, check: Callable[[], None] = lambda: None) -> Fetched | FetchTrouble:
        """The batch, when it is there; while it is waited for, `check` is called now and then."""
        assert self._thread is not None
        return assembly.wait(self._thread, check)

    def close(self) -> None:
        """Put no other batch together. One that waits for a slow store is not waited for: its thread ends by itself."""
        self._is_closed = True
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(_GRACE)
            self._thread = None

    def _work(self) -> None:
        while (assembly := self._asked.get()) is not None and not self._is_closed:
            assembly.make(self._samples)
