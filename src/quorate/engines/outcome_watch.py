"""Waiting for the coordinator to say how the job ended."""

import logging
import threading
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Protocol

from quorate.coordinator.client import News, Outcome
from quorate.core.errors import LinkError

log = logging.getLogger(__name__)

PATIENCE = 30.0
PAUSE = 0.05


class Teller(Protocol):
    """Who knows how the job ended."""

    def news(self, timeout: float, seen_to: Collection[int] = (), workers: int = 0) -> News:
        """What there is to know; nothing if nothing happens within `timeout` seconds."""
        ...


class OutcomeWatch:
    """Asks for the outcome in a thread of its own, beside the loop that looks after the processes.

    `answered` is when the last answer came, and `workers` how many the job has by that.
    """

    def __init__(
        self, teller: Teller, patience: float = PATIENCE, seen_to: Callable[[], Collection[int]] = tuple
    ) -> None:
        self._teller = teller
        self._patience = patience
        self._seen_to = seen_to
        self._closed = threading.Event()
        self.outcome: Outcome | None = None
        self.answered = time.monotonic()
        self.workers = 0
        self.news: SimpleQueue[News] = SimpleQueue()
        threading.Thread(target=self._watch, name="outcome", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while self.outcome is None and not self._closed.is_set():
            try:
                news = self._teller.news(self._patience, self._seen_to(), self.workers)
                self.answered = time.monotonic()
                self.workers = news.workers or self.workers
                self.news.put(news)
                self.outcome = news.outcome
                if news.expelled or news.vacant:
                    self._closed.wait(PAUSE)  # time to do it, before it is told again
            except LinkError as error:
                # One call without an answer says nothing about the next: to give up here would lose the outcome of
                # a job that is over. Whoever holds the coordinator's process sees to it that there is one.
                log.info("how the job ended could not be asked: %s", error)
                self._closed.wait(PAUSE)
