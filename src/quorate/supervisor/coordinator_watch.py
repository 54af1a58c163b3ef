"""What the coordinator has to say to the supervisor: how the job ended, what there is to do, and the job's events.

Asked for in threads of their own, beside the loop that looks after the processes.
"""

import logging
import threading
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue

from quorate.coordinator.client import EventStream, SupervisorClient
from quorate.coordinator.news import News, Outcome
from quorate.core.errors import LinkError
from quorate.core.runtime import SYSTEM, Latch, Runtime
from quorate.observe.event import Event

log = logging.getLogger(__name__)

PAUSE = 0.05
CLOSE_PATIENCE = 2.0

Process = tuple[int, int]
"""A worker's slot and its pid; 0 for one that is still to be started."""


class OutcomeWatch:
    """Asks how the job ended, until it has.

    `answered` is when the last answer came, and `workers` how many the job has by that.
    """

    def __init__(
        self,
        client: SupervisorClient,
        patience: float,
        processes: Callable[[], Collection[Process]] = tuple,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self._client = client
        self._patience = patience
        self._processes = processes
        self._runtime = runtime
        self._closed = Latch(runtime)
        self.outcome: Outcome | None = None
        self.answered = runtime.now()
        self.workers = 0
        self.news: SimpleQueue[News] = SimpleQueue()
        runtime.spawn("outcome", self._watch)

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while self.outcome is None and not self._closed.is_set:
            try:
                news = self._client.news(self._patience, self._processes(), self.workers)
            except LinkError as error:
                # One call without an answer says nothing about the next: to give up here would lose the outcome of
                # a job that is over. Whoever holds the coordinator's process sees to it that there is one.
                log.info("how the job ended could not be asked: %s", error)
                self._closed.wait(PAUSE)
            except Exception:
                # Nobody else asks: the job would never be seen to end, and its coordinator be killed as silent.
                log.exception("how the job ended could not be asked")
                self._closed.wait(PAUSE)
            else:
                self.answered = self._runtime.now()
                self.workers = news.workers or self.workers
                self.news.put(news)
                self.outcome = news.outcome
                if news.expelled or news.vacant:
                    self._closed.wait(PAUSE)  # time to do it, before it is told again


class EventFollower:
    """Follows the job's events from a place of its log on.

    The place is a number of bytes, the same for every coordinator: whoever takes another's place goes on from it, and
    no event is lost or told twice. `offset` is how far it has come.
    """

    def __init__(self, client: SupervisorClient, offset: int) -> None:
        self._client = client
        self.offset = offset
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._closed = threading.Event()
        self._stream: EventStream | None = None
        self._thread = threading.Thread(target=self._follow, name="events", daemon=True)
        self._thread.start()

    def new(self) -> list[Event]:
        """What has come since the last call."""
        found = []
        try:
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found

    def close(self, *, read_rest: bool) -> bool:
        """Follow no longer; `read_rest`: have first what is written by now, from a coordinator that is alive. Whether
        that has come; otherwise there may be more after `offset`."""
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()
        self._thread.join(CLOSE_PATIENCE)
        if read_rest and not self._thread.is_alive():
            try:
                self._take(self._client.events(self.offset, follow=False))
                return True
            except LinkError as error:
                log.warning("the last events could not be asked for: %s", error)
        return False

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._stream = self._client.events(self.offset, follow=True)
                if self._closed.is_set():  # `close` came before there was a stream that it could cancel
                    self._stream.cancel()
                self._take(self._stream)
            except LinkError as error:
                if not self._closed.is_set():  # `close` cancels it, which is no trouble
                    log.info("the events of the job broke off: %s", error)
            self._closed.wait(PAUSE)

    def _take(self, stream: EventStream) -> None:
        for events, offset in stream:
            for event in events:
                self._events.put(event)
            self.offset = offset
