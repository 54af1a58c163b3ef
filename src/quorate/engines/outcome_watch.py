"""Waiting for the coordinator to say how the job ended."""

import logging
import threading
from queue import SimpleQueue
from typing import Protocol

from quorate.coordinator.client import News, Outcome
from quorate.core.errors import LinkError

log = logging.getLogger(__name__)

PATIENCE = 30.0
PAUSE = 0.05


class Teller(Protocol):
    """Who knows how the job ended."""

    def news(self, timeout: float) -> News:
        """What there is to know; nothing if nothing happens within `timeout` seconds."""
        ...


class OutcomeWatch:
    """Asks for the outcome in a thread of its own, beside the loop that looks after the processes.

    `is_unanswered` tells whether the last question has been given up.
    """

    def __init__(self, teller: Teller, patience: float = PATIENCE) -> None:
        self._teller = teller
        self._patience = patience
        self._closed = threading.Event()
        self.outcome: Outcome | None = None
        self.is_unanswered = False
        self.expelled: SimpleQueue[tuple[int, int]] = SimpleQueue()
        threading.Thread(target=self._watch, name="outcome", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while self.outcome is None and not self._closed.is_set():
            try:
                news = self._teller.news(self._patience)
                self.is_unanswered = False
                for process in news.expelled:
                    self.expelled.put(process)
                self.outcome = news.outcome
            except LinkError as error:
                # One call without an answer says nothing about the next: to give up here would lose the outcome of
                # a job that is over. Whoever holds the coordinator's process sees to it that there is one.
                self.is_unanswered = True
                log.info("how the job ended could not be asked: %s", error)
                self._closed.wait(PAUSE)
