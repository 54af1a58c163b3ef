"""The coordinator's process, and what it has to say to the supervisor.

Whoever dies, or answers no more, is followed by another, at the same address if its host is still there. How the job
ended, what there is to do, and the job's events are asked for in threads of their own, beside the loop that looks after
the processes.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from queue import SimpleQueue
from typing import Any

from quorate.coordinator.client import EventStream, SupervisorClient
from quorate.coordinator.places import News, Outcome
from quorate.core.addresses import split_address
from quorate.core.errors import JobError, LinkError, QuorateError, RequestError
from quorate.core.timing import MOST_STARTS, SYSTEM, Latch, Runtime, Timing, WatchedTime
from quorate.engines.engine import Engine
from quorate.observe.event import Event
from quorate.wire.handshake import Identity

log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""So many coordinators in a row may die without a step in between. Those that the launcher has ended, because they were
too slow for it, count apart: on a busy machine the next is given more time."""
GLANCE = 0.05
"""Seconds for which the launcher waits at a time until one listens: it looks after everything else in between."""


class CoordinatorProcess:
    """Starts the first at once, beside everything else; `open` waits until it listens.

    Those who follow are told who is there (the roster), and learn the rest from the workers, which go on meanwhile for
    as long as their leases last, and then wait.
    """

    def __init__(
        self,
        engine: Engine,
        appointment: Mapping[str, Any],
        token: str,
        timing: Timing,
        identity: Identity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._appointment = dict(appointment)
        self._token = token
        self._timing = timing
        # The supervisor's, by which it calls.
        self._identity = identity
        self._clock = clock
        self._process = engine.start_coordinator(self._appointment)
        self._client: SupervisorClient | None = None
        self._deaths = 0
        # How many in a row the launcher has ended, why the last of them, and how long the last start took.
        self._ended = 0
        self._why_ended = ""
        self._took = 0.0
        self._error: QuorateError | None = None
        # Since it was started, or listens, or has answered.
        self._waited = WatchedTime(clock())
        self._answered = 0.0
        self.listens = False
        self.address = ""
        # How the last one that died has ended.
        self.departure = ""

    def open(self, give_up: Callable[[], bool] = lambda: False) -> SupervisorClient | None:
        """The calls to it, whoever it is at the time; None when given up."""
        while not self.listens:
            if give_up():
                return None
            # Nobody waits for the first with a lease.
            self._await_answer(self._timing.coordinator_start(MOST_STARTS))
            if not self._process.is_alive and not self.replace({}):
                raise self._error or JobError(f"{self.departure}, as those before it.")
        timeout = self._timing.failure_timeout
        self._client = SupervisorClient(self.address, self._token, timeout, self._identity)
        return self._client

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def note_step(self) -> None:
        """The job advances: those who died before have not kept it from that."""
        self._deaths = self._ended = 0

    def kill(self) -> None:
        """End it at once; the next round sees that."""
        self._process.kill()

    def look(self, answered: float) -> bool:
        """End one that hangs: it does not come to listen, or has not answered since then, or since it began to. Whether
        it is alive."""
        if self.listens:
            limit = self._timing.failure_timeout * 2.0**self._ended
            if answered > self._answered:
                self._answered, self._waited = answered, WatchedTime(self._clock())
            silence = self._waited.look(self._clock(), limit)
            if silence > limit and self._process.is_alive:
                self._end(f"has not answered for {silence:.1f} s")
        elif self._process.is_alive:
            self._await_answer(self._timing.coordinator_start(self._ended, self._took))
        return self._process.is_alive

    def replace(self, changes: Mapping[str, Any]) -> bool:
        """Have another take the place of one that is dead; False if too many have died for nothing.

        `changes` is what its appointment says beside that of the first: who is there.
        """
        self.departure = self._process.departure
        if self._why_ended:
            self.departure = f"the coordinator (pid {self._process.pid}) {self._why_ended}, and the launcher ended it"
            self._ended += 1
        else:
            self._deaths += 1
        if self._deaths > MOST_DEATHS or self._ended >= MOST_STARTS:
            return False
        log.warning("%s; another takes its place", self.departure)
        self._process.close(patience=0)
        port = {"port": split_address(self.address)[1]} if self.address else {}
        self._why_ended, self._error, self.listens = "", None, False
        self._waited = WatchedTime(self._clock())
        self._process = self._engine.start_coordinator(self._appointment | port | dict(changes))
        return True

    def close(self) -> None:
        """Let it go: it ends by itself when its standard input does. One that nobody has called has nothing to end."""
        if self._client is not None:
            self._client.close()
        self._process.close(patience=0.0 if self._client is None else self._timing.failure_timeout)

    def _await_answer(self, limit: float) -> None:
        """Wait a moment until it listens; end it if it has not within so many seconds."""
        try:
            answer = self._process.await_answer(GLANCE)
        except QuorateError as error:
            if isinstance(error, RequestError) and not self.address:
                raise  # the first one says what is wrong with what was asked for
            # The port may not be free yet, say. It is dead, which the next round sees and counts.
            log.warning("the coordinator could not begin: %s", error)
            self._error = error
            self._process.kill()
        else:
            if not self._process.pid:  # it waits for a host: nothing of it runs that could be too slow
                self._waited = WatchedTime(self._clock())
            seconds = self._waited.look(self._clock(), limit)
            if answer:
                address = str(answer["address"])
                if self._client is not None:
                    log.info("the next coordinator listens after %.2f s", seconds)
                    if address != self.address:  # on another host
                        self._client.redirect(address)
                self.address, self.listens, self._took = address, True, seconds
                self._waited = WatchedTime(self._clock())
            elif seconds > limit:
                self._end(f"did not listen within {seconds:.1f} s of its start")

    def _end(self, why: str) -> None:
        self._why_ended = why
        log.warning("the coordinator (pid %d) %s, and is killed", self._process.pid, why)
        self._process.kill()


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
        return [self._events.get_nowait() for _ in range(self._events.qsize())]  # nobody else takes any

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
