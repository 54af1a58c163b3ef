"""The supervisor of a simulation: keeps a coordinator and its workers, as supervisor/ does.

It starts workers, reaps them, reports their end until it is answered, kills whom it is told to, and has another
coordinator take the place of one that is dead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from quorate.coordinator.actions import Action, Refill
from quorate.coordinator.events import ExitReported, MembershipEvent, ResizeRequested, StopRequested
from quorate.coordinator.states import Handover
from quorate.core.timing import Timing
from quorate.core.worker_status import WorkerStatus
from simulation.clock import Clock, Process
from simulation.network import Network
from simulation.simulated_coordinator import News, SimulatedCoordinator

REAPING = 0.003
"""Seconds from the end of a process to its being noticed."""


CONFIRMING = 0.05
"""Seconds after which the supervisor knows that a process has started, at the latest: before it can have registered."""


class Child(Protocol):
    """A worker, as its supervisor sees it."""

    pid: int
    slot: int
    is_alive: bool
    exit_code: int | None

    def die(self) -> None:
        """Be killed."""
        ...


class SimulatedSupervisor(Process):
    """Looks after the processes in their places. `coordinator` is the last that was started."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        coordinator: SimulatedCoordinator,
        timing: Timing,
        workers: int,
        begin: Callable[[int, bool], Child],
        *,
        kills_the_expelled: bool = True,
    ) -> None:
        super().__init__(clock, "supervisor")
        self.coordinator = coordinator
        # How many workers the job has, as far as it has been told.
        self.workers = workers
        self.is_outcome_known = False
        self._network = network
        self._timing = timing
        self._begin = begin
        self._kills_the_expelled = kills_the_expelled
        self._stop: str | None = None
        # Every process whose end has not been reported and answered; and places for which one is on its way.
        self._present: dict[tuple[int, int], Child] = {}
        self._expected: set[int] = set()
        self._unconfirmed: dict[int, float] = {}

    # --- workers

    def start(self, slot: int, *, restore: bool) -> None:
        """Start a process in a place."""
        self._expected.discard(slot)
        child = self._begin(slot, restore)
        self._present[slot, child.pid] = child
        # A fork server that is busy tells late that it has started somebody.
        self._unconfirmed[child.pid] = self.clock.now + (CONFIRMING if child.pid % 2 else 0.0)

    def _start_later(self, slot: int, seconds: float, *, restore: bool) -> None:
        self._expected.add(slot)
        self.after(seconds, partial(self.start, slot, restore=restore))

    def empty_places(self, places: Sequence[int]) -> list[int]:
        """Those of these places in which no process is, nor will be soon."""
        taken = {slot for (slot, _), child in self._present.items() if child.is_alive} | self._expected
        return [slot for slot in places if slot not in taken]

    def has_reported(self, child: Child) -> bool:
        """Whether the end of a process has been told, and answered."""
        return (child.slot, child.pid) not in self._present

    def reap(self, child: Child) -> None:
        """A process has ended."""
        self.after(REAPING, lambda: self._report(child))

    def _report(self, child: Child) -> None:
        signal = None if child.exit_code is not None else 9
        event = ExitReported(child.slot, child.pid, "a", child.exit_code, signal, WorkerStatus())

        def heed(actions: Sequence[Action]) -> None:
            self._present.pop((child.slot, child.pid), None)
            for action in actions:
                if isinstance(action, Refill):
                    self._start_later(action.worker, action.after, restore=action.restore)

        self._tell(event, heed)

    # --- the coordinator

    def handover(self) -> Handover:
        """Who is there, as the next coordinator is told."""
        starting = {process for process in self._present if self.clock.now < self._unconfirmed[process[1]]}
        awaited = self._expected | {slot for slot, _ in starting}
        return Handover(frozenset(self._present) - starting, frozenset(awaited))

    def appoint(self, coordinator: SimulatedCoordinator) -> None:
        """Another coordinator has taken over: it has not heard of a stop yet."""
        self.coordinator = coordinator
        if self._stop is not None:
            self._tell(StopRequested(self._stop), only=coordinator)

    def ask_to_stop(self, reason: str) -> None:
        """As a signal to the launcher does."""
        self._stop = reason
        self._tell(StopRequested(reason), only=self.coordinator)

    def ask_to_resize(self, workers: int) -> None:
        """As the command line does, which asks once."""
        coordinator = self.coordinator
        self._network.send(self, coordinator, lambda: coordinator.hear(ResizeRequested(workers)))

    def hear_of(self, coordinator: SimulatedCoordinator) -> None:
        """A coordinator has something to tell."""
        news = coordinator.news
        self._network.send(coordinator, self, lambda: self._heed(coordinator, news))

    def _heed(self, coordinator: SimulatedCoordinator, news: News) -> None:
        if news.has_ended:
            coordinator.is_outcome_known = self.is_outcome_known = True
            return
        for process in news.expelled:
            child = self._present.get(process)
            if child is not None and child.is_alive and self._kills_the_expelled:
                child.die()
        for slot in news.vacant:
            if slot not in self._expected and all(slot != taken for taken, _ in self._present):
                self._start_later(slot, 0.0, restore=news.restore)
        self.workers = news.workers

    def _tell(
        self,
        event: MembershipEvent,
        heed: Callable[[Sequence[Action]], None] = lambda _: None,
        only: SimulatedCoordinator | None = None,
    ) -> None:
        """Tell the coordinator, whoever it is at the time or only this one, again and again until it answers."""
        answered: list[bool] = []
        told: list[tuple[SimulatedCoordinator, float]] = []

        def note(coordinator: SimulatedCoordinator, actions: Sequence[Action]) -> None:
            # An answer may be duplicated; and one of a coordinator that has been replaced is not waited for any more.
            if not answered and coordinator is self.coordinator:
                answered.append(True)
                heed(actions)

        def tell() -> None:
            coordinator = self.coordinator
            if answered or self.is_outcome_known or only not in (None, coordinator):
                return
            is_overdue = not told or told[-1][0] is not coordinator or self.clock.now > told[-1][1]
            if coordinator.is_alive and is_overdue:
                told.append((coordinator, self.clock.now + self._timing.failure_timeout))
                back = partial(self._network.send, coordinator, self)
                self._network.send(
                    self,
                    coordinator,
                    lambda: coordinator.hear(event, lambda actions: back(lambda: note(coordinator, actions))),
                )
            self.after(self._timing.heartbeat_every, tell)

        tell()
