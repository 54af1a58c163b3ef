"""The supervisor of a simulation: the real `WorkerProcesses` and `OutcomeWatch`, on a simulated engine.

What is simulated is the loop around them, processes, and calls of the coordinator. Whoever replaces a coordinator that
is dead is the simulation itself.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, Protocol

from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.events import (
    ExitReported,
    MembershipEvent,
    Reading,
    ResizeRequested,
    SaveRequested,
    StopRequested,
)
from quorate.coordinator.places import News
from quorate.coordinator.states import Handover
from quorate.core.errors import LinkError
from quorate.core.generation import WorkerStatus
from quorate.core.timing import Timing
from quorate.engines.engine import Capacity, CoordinatorChild, Exited, Notice, SettingUp, Started
from quorate.supervisor.coordinator_process import OutcomeWatch
from quorate.supervisor.worker_processes import WorkerProcesses
from quorate.worker.assignment import Assignment
from quorate.worker.status import Status
from simulation.clock import Clock, Process
from simulation.network import Network
from simulation.simulated_coordinator import SimulatedCoordinator
from simulation.threads import SimulatedRuntime

REAPING = 0.003
"""Seconds from the end of a process to its being noticed."""
CONFIRMING = 0.05
"""Seconds after which the supervisor knows that a process has started, at the latest: before it can have registered."""


class Child(Protocol):
    """A worker, as its engine sees it."""

    pid: int
    slot: int
    is_alive: bool
    exit_code: int | None

    @property
    def last_status(self) -> Status | None:
        """What stands on its status page."""
        ...

    def die(self) -> None:
        """Be killed."""
        ...


class SimulatedEngine:
    """Starts simulated workers. A busy fork server tells late that it has started somebody."""

    def __init__(
        self, supervisor: Process, runtime: SimulatedRuntime, begin: Callable[[int, Path | None], Child], *, kills: bool
    ) -> None:
        self._supervisor = supervisor
        self._begin = begin
        self._kills = kills
        self._told = runtime.condition()
        self._notices: list[Notice] = []
        # What is told of a process once its start has been.
        self._unconfirmed: dict[int, list[Notice]] = {}
        self.children: dict[tuple[int, int], Child] = {}

    def capacity(self) -> Capacity:
        return Capacity(1)

    def start_coordinator(self, appointment: Mapping[str, Any]) -> CoordinatorChild:
        raise NotImplementedError("coordinators are simulated without an engine")

    def start(self, assignment: Assignment) -> None:
        child = self._begin(assignment.slot, None if assignment.checkpoint is None else Path(assignment.checkpoint))
        self.children[child.slot, child.pid] = child
        self._unconfirmed[child.pid] = []
        self._supervisor.after(CONFIRMING if child.pid % 2 else 0.0, lambda: self._confirm(child))

    def _confirm(self, child: Child) -> None:
        self._tell(Started(child.slot, child.pid, "simulated"), *self._unconfirmed.pop(child.pid))

    def note_set_up(self, child: Child) -> None:
        """It is known to its coordinator."""
        self._tell_of(child, SettingUp(child.slot, child.pid, None))

    def note_end(self, child: Child) -> None:
        """It has ended, and is reaped."""
        code = -9 if child.exit_code is None else child.exit_code
        exited = Exited(child.slot, child.pid, code, child.last_status)
        self._supervisor.after(REAPING, lambda: self._tell_of(child, exited))

    def poll(self, seconds: float) -> list[Notice]:
        with self._told:
            self._told.wait_for(lambda: bool(self._notices), seconds)
        notices, self._notices = self._notices, []
        return notices

    def terminate(self, slot: int, pid: int) -> None:
        raise NotImplementedError("who leaves in the simulation is asked to by its schedule")

    def kill(self, slot: int, pid: int) -> None:
        child = self.children[slot, pid]
        if child.is_alive and self._kills:
            child.die()

    def close(self) -> None:
        for child in self.children.values():
            if child.is_alive:
                child.die()

    def _tell_of(self, child: Child, notice: Notice) -> None:
        if child.pid in self._unconfirmed:
            self._unconfirmed[child.pid].append(notice)
        else:
            self._tell(notice)

    def _tell(self, *notices: Notice) -> None:
        self._notices.extend(notices)
        self._told.notify_all()


Ask = Callable[[SimulatedCoordinator, Callable[[Any], None]], None]


class SimulatedClient(SupervisorClient):
    """The supervisor's calls, over the simulated network, to whoever is the coordinator at the time."""

    def __init__(
        self,
        process: Process,
        network: Network,
        coordinator: Callable[[], SimulatedCoordinator],
        runtime: SimulatedRuntime,
        timing: Timing,
    ) -> None:
        self._process = process
        self._network = network
        self._coordinator = coordinator
        self._runtime = runtime
        self._timeout = timing.failure_timeout
        self._calls: list[tuple[SimulatedCoordinator, Callable[[Any], None]]] = []

    def report_exit(
        self,
        slot: int,
        pid: int,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        step: int | None = None,
        phase: str = "",
        host: str = "",
        reading: Reading | None = None,
    ) -> None:
        event = ExitReported(slot, pid, host or "a", exit_code, signal, WorkerStatus(step, phase), reading)
        self._ask(partial(_hear, event), self._timeout / 10)

    def stop(self, reason: str) -> None:
        self._ask(partial(_hear, StopRequested(reason)), self._timeout / 10)

    def news(self, timeout: float, processes: Collection[tuple[int, int]] = (), workers: int = 0) -> News:
        known = frozenset(processes)

        def ask(coordinator: SimulatedCoordinator, answer: Callable[[News], None]) -> None:
            coordinator.tell_news(known, workers, timeout, answer)

        news: News = self._ask(ask, timeout + self._timeout / 2)
        return news

    def lose_calls(self, coordinator: SimulatedCoordinator) -> None:
        """The connection to a coordinator is broken."""
        for finish in [finish for called, finish in self._calls if called is coordinator]:
            finish(None)

    def _ask(self, ask: Ask, timeout: float) -> Any:
        coordinator = self._coordinator()
        answered, replies = self._runtime.condition(), list[Any]()

        def finish(reply: Any) -> None:
            self._calls = [call for call in self._calls if call[1] is not finish]
            if not replies:
                replies.append(reply)
                answered.notify_all()

        def answer(reply: Any) -> None:
            self._network.send(coordinator, self._process, lambda: finish(reply))

        self._calls.append((coordinator, finish))
        if coordinator.is_alive:
            self._network.send(self._process, coordinator, lambda: ask(coordinator, answer))
        with answered:
            answered.wait_for(lambda: bool(replies), timeout)
        finish(None)
        if replies[0] is None:
            raise LinkError("the coordinator does not answer")
        return replies[0]


def _hear(event: MembershipEvent, coordinator: SimulatedCoordinator, answer: Callable[[Any], None]) -> None:
    coordinator.hear(event, answer)


class SimulatedSupervisor(Process):
    """Looks after the processes in their places. `coordinator` is the last that was started."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        coordinator: SimulatedCoordinator,
        timing: Timing,
        begin: Callable[[int, Path | None], Child],
        newest: Callable[[], Path | None],
        has_formed: Callable[[], bool],
        *,
        kills_the_expelled: bool = True,
    ) -> None:
        super().__init__(clock, "supervisor")
        self.coordinator = coordinator
        self.is_outcome_known = False
        self._network = network
        self._newest = newest
        self._has_formed = has_formed
        self._stop: str | None = None
        self.runtime = SimulatedRuntime(self)
        self.engine = SimulatedEngine(self, self.runtime, begin, kills=kills_the_expelled)
        self._client = SimulatedClient(self, network, lambda: self.coordinator, self.runtime, timing)
        self._processes = WorkerProcesses(self.engine, _assignment, clock=clock.time)
        self._watch = OutcomeWatch(self._client, timing.failure_timeout / 4, self._processes.processes, self.runtime)

    @property
    def workers(self) -> int:
        """How many workers the job has, as far as it has been told; 0 for as many as it began with."""
        return self._watch.workers

    def begin(self, places: Sequence[int]) -> None:
        """Start a process in each place, and look after them."""
        for slot in places:
            self._processes.start(slot, None)
        self.runtime.spawn("main", self._supervise)

    def _supervise(self) -> None:
        """As supervisor/supervisor.py has it, in each round."""
        asked: SimulatedCoordinator | None = None
        while self._watch.outcome is None:
            self._processes.look()
            self._processes.report(self._client)
            try:
                while True:
                    self._processes.handle(self._watch.news.get_nowait())
            except Empty:
                pass
            self._processes.refill(self._newest)
            if self._stop is not None and asked is not self.coordinator:
                asked = self._ask_to_stop(self._stop) or asked
            if asked is not None and not self._has_formed():
                # Nothing is trained yet that would have to be saved.
                self.coordinator.die()
                self.engine.close()
                break
        self.coordinator.is_outcome_known = self.is_outcome_known = True

    def end(self) -> None:
        """The simulation is over: nothing of it stays behind."""
        self.die()
        self.runtime.end()

    def _ask_to_stop(self, reason: str) -> SimulatedCoordinator | None:
        coordinator = self.coordinator
        try:
            self._client.stop(reason)
        except LinkError:
            return None
        return coordinator

    def empty_places(self, places: Sequence[int]) -> list[int]:
        """Those of these places in which no process is, nor will be soon."""
        alive = {slot for (slot, _), child in self.engine.children.items() if child.is_alive}
        coming = {slot for slot, pid in self._processes.processes() if not pid}
        return [slot for slot in places if slot not in alive | coming]

    def has_reported(self, child: Child) -> bool:
        """Whether the end of a process has been told, and answered."""
        return (child.slot, child.pid) not in self._processes.processes()

    # --- the coordinator

    def handover(self) -> Handover:
        """Who is there, as the next coordinator is told."""
        roster = self._processes.roster()
        return Handover(frozenset(map(tuple, roster["present"])), frozenset(roster["awaited"]), has_begun=False)

    def appoint(self, coordinator: SimulatedCoordinator) -> None:
        """Another coordinator has taken over: it has not heard of a stop yet."""
        self.coordinator = coordinator

    def lose_calls(self, coordinator: SimulatedCoordinator) -> None:
        """The connection to a coordinator is broken."""
        self._client.lose_calls(coordinator)

    def ask_to_stop(self, reason: str) -> None:
        """As a signal to the launcher does."""
        self._stop = reason

    def ask_to_resize(self, workers: int | None, servers: int | None = None) -> None:
        """As the command line does, which asks once."""
        coordinator = self.coordinator
        self._network.send(self, coordinator, lambda: coordinator.hear(ResizeRequested(workers, servers)))

    def ask_to_save(self, request: str) -> None:
        """As the command line does."""
        coordinator = self.coordinator
        self._network.send(self, coordinator, lambda: coordinator.hear(SaveRequested(request)))


def _assignment(slot: int, checkpoint: Path | None, is_replacement: bool) -> Assignment:
    path = None if checkpoint is None else str(checkpoint)
    return Assignment("run", slot, 0, "task", {}, "job", "coordinator", "token", path, is_replacement)
