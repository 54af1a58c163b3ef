"""One thread that does things one after the other, so that what it knows needs no lock."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from quorate.core.errors import QuorateError
from quorate.core.failure import Failure

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CALLS_AT_ONCE = 4


class EventLoop:
    """Its thread never waits: calls that may are made apart, and come back as something to do.

    `tick` is done every so many seconds. What fails, and is not said to be heard by anybody else, is told to `failed`.
    """

    def __init__(self, tick: Callable[[float], None], every: float, failed: Callable[[Failure], None]) -> None:
        self._tick = tick
        self._every = every
        self._failed = failed
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._apart = ThreadPoolExecutor(CALLS_AT_ONCE, "cluster")
        self._calls: set[Future[None]] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cluster-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, todo: Callable[[], None]) -> None:
        """Have something done, after what was put before. From any thread."""
        self._todo.put(todo)

    def call(
        self,
        call: Callable[[], Result],
        then: Callable[[Result], None] = lambda _: None,
        failed: Callable[[Failure], None] | None = None,
    ) -> None:
        """Make a call that may wait, and go on with what it returns. From this thread alone."""
        if not self._is_closed:
            self._calls = {one for one in self._calls if not one.done()}
            self._calls.add(self._apart.submit(self.run, call, then, failed))

    def run(
        self,
        call: Callable[[], Result],
        then: Callable[[Result], None],
        failed: Callable[[Failure], None] | None = None,
    ) -> None:
        """The same in the thread that this is called from, which waits."""
        try:
            result = call()
        except QuorateError as error:
            failure = Failure.of(error)
        except Exception as error:
            log.exception("a call to the cluster has failed")
            failure = Failure("JobError", f"the cluster does not do what it is asked for: {error}")
        else:
            self.put(lambda: then(result))
            return
        self.put(lambda: (failed or self._failed)(failure))

    def close(self, patience: float) -> bool:
        """Do nothing more, and wait for calls that are being made; whether all have ended in so many seconds."""
        over = time.monotonic() + patience
        self._is_closed = True
        self._todo.put(lambda: None)
        self._thread.join(patience)
        self._apart.shutdown(wait=False, cancel_futures=True)
        left = wait(self._calls, max(0.0, over - time.monotonic())).not_done
        return not left and not self._thread.is_alive()

    def _run(self) -> None:
        ticked = 0.0
        while not self._is_closed:
            with contextlib.suppress(Empty):
                todo = self._todo.get(timeout=self._every)
                while not self._is_closed:
                    self._do(todo)
                    todo = self._todo.get_nowait()
            now = time.monotonic()
            if now - ticked >= self._every:
                ticked = now
                self._do(lambda now=now: self._tick(now))  # type: ignore[misc]

    def _do(self, todo: Callable[[], Any]) -> None:
        """One failure must not end the thread: nobody would hear of anything any more."""
        try:
            todo()
        except Exception as error:
            log.exception("the engine itself has failed")
            self._failed(Failure("InternalError", f"Quorate failed: {error!r}"))
