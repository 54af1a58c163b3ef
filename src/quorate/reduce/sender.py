"""The thread that carries out a ring's sends in program order, while the calling thread receives and adds."""

import threading
from collections import deque
from collections.abc import Callable

from quorate.core.digests import Buffer
from quorate.wire.link import Deadline, Link, Tag


class Sender:
    """Sends frames over one link, one after the other.

    When a send fails, `on_failure` is told from this thread, at once, and nothing more is sent.
    """

    def __init__(self, link: Link, deadline: Deadline, on_failure: Callable[[BaseException], None]) -> None:
        self._link = link
        self._deadline = deadline
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._queue: deque[tuple[Tag, Buffer]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="quorate-ring-sender", daemon=True)
        self._thread.start()

    def send(self, tag: Tag, payload: Buffer) -> None:
        """Queue a frame and return; the payload must not change until `flush` has returned."""
        with self._changed:
            self._queue.append((tag, payload))
            self._changed.notify_all()

    def flush(self) -> bool:
        """Wait until everything queued is sent; false if it never will be: a send failed or the sender stopped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._stopped)
            return not self._stopped

    def stop(self) -> None:
        """End the thread, dropping what is not sent. The link must be closed already, so that no send keeps waiting."""
        self._mark_stopped()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._link.send(*frame, self._deadline)
            except BaseException as error:
                # Told before the flush is released, so that whoever flushed finds the reason.
                self._on_failure(error)
                self._mark_stopped()
                return
            self._mark_sent()

    def _next(self) -> tuple[Tag, Buffer] | None:
        """The oldest frame; it stays in the queue until it is sent, so that `flush` waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            return None if self._stopped else self._queue[0]

    def _mark_sent(self) -> None:
        with self._changed:
            if self._queue:
                self._queue.popleft()
            self._changed.notify_all()

    def _mark_stopped(self) -> None:
        with self._changed:
            self._stopped = True
            # A payload is a view into a gradient buffer: holding it would keep that memory alive.
            self._queue.clear()
            self._changed.notify_all()
