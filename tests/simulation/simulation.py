"""A whole job inside one process, under virtual time: replayed exactly from its seed."""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import (
    Action,
    DeclareGeneration,
    Dismiss,
    EndJob,
    FailureReported,
    GrantLease,
    MembershipEvent,
    RecordEvents,
)
from quorate.coordinator.forming import take_over
from quorate.coordinator.membership import start
from quorate.coordinator.places import places, places_of
from quorate.coordinator.states import Decision, Ended, JobSettings, State
from quorate.core.digests import derive_seed
from quorate.core.errors import LanesDisputed
from quorate.core.generation import name_of
from quorate.observe.events import WorkerLost
from quorate.spec.job import CheckpointSpec
from simulation.clock import Clock, HostClock, VirtualClock
from simulation.invariants import InvariantBroken, Referee
from simulation.mutants import SOUND, Mutant
from simulation.network import Network, Weather
from simulation.schedules import ALL, DECISIONS, HOLDER, IT, NEWCOMER, REBUILD, RECENT, Pair, scenario
from simulation.simulated_coordinator import MemorySink, Office, SimulatedCoordinator
from simulation.simulated_disk import SimulatedDisk
from simulation.simulated_faults import (
    ANYBODY,
    CRASH,
    END,
    LINK,
    PAUSE,
    RESIZE,
    TERM,
    Scenario,
    SimulatedFault,
    with_mesh,
)
from simulation.simulated_memory import SimulatedMemory
from simulation.simulated_supervisor import SimulatedSupervisor
from simulation.simulated_worker import Ground, SimulatedWorker, Surroundings

PATIENCE = 150.0
"""Seconds of calm after which a job that has not ended never will."""
AFTERMATH = 3.0
"""Seconds for which those who have not heard of the end are watched."""


@dataclass(frozen=True)
class Verdict:
    """What came of a simulation. `broken` is the invariant that does not hold, if one does not.

    `pairs`: which faults have befallen the job while what happened in it (schedules.py).
    """

    seed: int
    without: tuple[int, ...]
    ending: str
    broken: str | None
    steps: int
    copies: int
    generations: int
    successions: int
    deaths: int
    seconds: float
    pairs: frozenset[Pair]
    trace: tuple[str, ...]


class Simulation:
    """One seed's job. `without` names faults of its scenario, by number, that are left out.

    Where a scenario is `given`, it is that one, and the seed decides the rest.
    """

    def __init__(
        self,
        seed: int,
        mutant: Mutant = SOUND,
        without: Collection[int] = (),
        *,
        servers: int = 0,
        is_meshed: bool = False,
        given: Scenario | None = None,
        traces: bool = False,
    ) -> None:
        self._seed = seed
        self._without = tuple(sorted(without))
        self._scenario = given or scenario(seed, servers)
        if is_meshed:
            self._scenario = with_mesh(self._scenario, seed)
        # What has befallen the job, and what waits for something to happen.
        self._befallen = set(without)
        self._waiting: dict[str, list[tuple[int, SimulatedFault]]] = {}
        for number, fault in self._planned():
            self._waiting.setdefault(fault.phase, []).append((number, fault))
        self._decided: dict[str, float] = {}
        self._pairs: set[Pair] = set()
        self._traces = traces
        self._trace: list[str] = []
        self._ending = "interrupted"
        self._deaths = 0
        self._pids = 100
        self._entered: dict[int, int] = {}
        self._chance = self._random("moments")
        self._mutant = mutant
        course, timing = self._scenario.course, self._scenario.timing
        self._clock = VirtualClock()
        self._network = Network(self._clock, self._random("network"))
        self._referee = Referee(
            course, self._clock, has_poison=self._scenario.poison is not None, mesh=self._scenario.mesh
        )
        kinds = {fault.kind for fault in self._scenario.faults}
        # Where nobody else is to come, a broken link leaves one out, or the coordinator forgets that somebody must
        # come, a dispute stays open: all go back then, and no worker is named.
        self._referee.expects_third = not kinds & {CRASH, PAUSE, TERM, RESIZE, END, LINK}
        self._workers: dict[int, SimulatedWorker] = {}
        self._started: list[SimulatedWorker] = []
        self._sink = MemorySink()
        office = self._office(self._scenario.workers, 1)
        coordinator = SimulatedCoordinator(office, start(office.settings, office.clock.now))
        self._around = Surroundings(
            network=self._network,
            coordinator=coordinator,
            timing=timing,
            on_exit=self._on_exit,
            on_phase=self._on_phase,
            trace=self._note,
            habits=mutant.habits,
        )
        memory = SimulatedMemory(is_fresh=mutant.habits.takes_fresh_memory)
        self._disk = SimulatedDisk(self._referee)
        rules = CheckpointSpec(every=course.save_every, keep=self._scenario.keep, when_busy=self._scenario.when_busy)
        shared = memory if self._scenario.shares_memory else None
        self._ground = Ground(course, self._referee, self._workers, self._disk, rules, self._scenario, shared)
        self._supervisor = SimulatedSupervisor(
            self._host_clock("launcher"),
            self._network,
            coordinator,
            timing,
            self._begin_worker,
            self._newest,
            lambda: self._sink.has_begun,
            kills_the_expelled=mutant.habits.kills_the_expelled,
        )

    @property
    def _coordinator(self) -> SimulatedCoordinator:
        return self._around.coordinator

    def run(self) -> Verdict:
        """Run it to its end, or to the first invariant that does not hold."""
        broken = None
        try:
            self._run()
        except InvariantBroken as error:
            broken = str(error)
            self._note(broken)
        finally:
            for worker in self._started:
                worker.end()
            self._supervisor.end()
        return Verdict(
            self._seed,
            self._without,
            self._ending,
            broken,
            self._referee.steps,
            self._referee.copies,
            self._referee.generations,
            self._referee.successions,
            self._deaths,
            self._clock.now,
            frozenset(self._pairs),
            tuple(self._trace),
        )

    def _run(self) -> None:
        self._supervisor.begin(places_of(self._scenario.workers + self._scenario.spares, self._scenario.servers))
        self._clock.after(1.0, self._look_at_places)
        for number, fault in self._planned():
            self._note(f"planned: {fault}")
            if not fault.phase:
                self._clock.after(fault.at, partial(self._befall, number, fault))
        over = self._scenario.calm_from + PATIENCE
        while not self._supervisor.is_outcome_known:
            if self._clock.now > over or not self._clock.advance():
                self._referee.gives_up(f"the job has not ended after {PATIENCE:.0f} s of calm")
        over = self._clock.now + AFTERMATH
        while self._clock.now < over and self._clock.advance():
            pass

    def _look_at_places(self) -> None:
        """From time to time: whether somebody is, or is about to be, in every place."""
        state = self._coordinator.state
        if isinstance(state, Ended):
            return
        is_calm = self._clock.now > self._scenario.calm_from and state.members.stop is None
        self._referee.sees_empty(self._supervisor.empty_places(places(state.members)) if is_calm else [])
        self._clock.after(1.0, self._look_at_places)

    # --- processes

    def _begin_worker(self, slot: int, checkpoint: Path | None) -> SimulatedWorker:
        self._pids += 1
        chance = self._random("worker", self._pids)
        what = f" from {checkpoint.name}" if checkpoint else ""
        self._note(f"{name_of(slot)} is started as pid {self._pids}{what}")
        worker = SimulatedWorker(
            self._around, self._ground, self._host_clock(name_of(slot)), slot, self._pids, checkpoint, chance
        )
        self._workers[slot] = worker
        self._started.append(worker)
        self._referee.started(worker)
        return worker

    def _newest(self) -> Path | None:
        newest = self._disk.newest_whole()
        return None if newest is None else newest.path

    def _on_exit(self, worker: SimulatedWorker) -> None:
        self._deaths += 1
        self._supervisor.engine.note_end(worker)

    # --- coordinators

    def _office(self, workers: int, incarnation: int) -> Office:
        course, timing = self._scenario.course, self._scenario.timing
        return Office(
            self._host_clock("launcher"),
            JobSettings(
                incarnation,
                course.lanes,
                workers,
                timing,
                self._scenario.min_workers,
                self._scenario.step_timeout,
                self._scenario.spares,
                self._scenario.balance,
                self._scenario.servers,
                self._scenario.mesh,
            ),
            self._decide,
            EventLog(self._sink),
            self,
            self._random("coordinator", self._referee.successions),
        )

    def _decide(self, state: State, event: MembershipEvent, now: float) -> Decision:
        if (
            isinstance(event, FailureReported)
            and event.failure.kind == LanesDisputed.__name__
            and not isinstance(state, Ended)
            and not state.members.is_gone(event.worker, event.pid)
        ):
            self._referee.hears_dispute()
        return self._mutant.decide(state, event, now)

    def sees_decision(self, decision: Decision) -> bool:
        """Note what was decided; whether the coordinator dies over it."""
        if self._traces and any(not isinstance(action, GrantLease) for action in decision.actions):
            told = ", ".join(type(action).__name__ for action in decision.actions)
            self._note(f"coordinator: {decision.reason} [{told}]")
        crash: SimulatedFault | None = None
        for kind in dict.fromkeys(type(action).__name__ for action in decision.actions):
            self._decided[kind] = self._clock.now
            for number, fault in self._due_at(kind):
                if fault.kind != CRASH:
                    self._befall_soon(number, fault)
                elif crash is None:
                    crash = fault
                    self._note_befallen(number, fault)
        if crash is not None:
            self._bury(self._coordinator, crash.seconds)
        return crash is not None

    def sees_written(self, state: State, action: Action) -> None:
        """Judge what the coordinator has decided, once it is more than a thought."""
        match action:
            case RecordEvents(lines):
                self._referee.recorded(lines)
            case WorkerLost():
                self._referee.lost(f"{action.worker}: {action.message}")
            case DeclareGeneration():
                self._referee.declared(action.generation, self._workers)
            case Dismiss():
                worker = self._workers[action.worker]
                if worker.pid == action.pid and worker.is_alive:
                    others = (one for one in self._workers.values() if not self._supervisor.has_reported(one))
                    self._referee.dismissed(worker, others)
            case EndJob():
                assert isinstance(state, Ended)
                self._ending = "failure" if action.failure else str(action.result.get("ending", ""))
                self._referee.ended(action.failure, action.digest, self._ending)

    def _bury(self, coordinator: SimulatedCoordinator, seconds: float) -> None:
        """A coordinator dies: its connections break, and after a while another takes its place."""
        lags = [self._chance.choice((0.0, 0.001, 0.3, 0.6)) * self._chance.random() for _ in self._workers]
        if self._chance.random() < 0.5:
            lags = [max(lags)] * len(lags)  # as where its host is slow to close what it has said it over
        for worker, lag in zip(self._workers.values(), lags, strict=True):
            self._clock.after(
                0.001 * self._chance.random(), partial(worker.do, partial(worker.lose_calls, coordinator))
            )
            # What it has said last may still lie unread in a worker that calls the next one already.
            worker.lag_behind(coordinator)
            self._clock.after(lag, partial(worker.do, partial(worker.lose_stream, coordinator)))
        self._clock.after(0.001 * self._chance.random(), partial(self._supervisor.lose_calls, coordinator))
        self._clock.after(seconds, partial(self._succeed, coordinator))

    def _succeed(self, before: SimulatedCoordinator) -> None:
        if before is not self._coordinator or self._supervisor.is_outcome_known:
            return
        self._referee.succeeded()
        incarnation = before.incarnation + (1 if self._mutant.counts_incarnations else 0)
        office = self._office(self._supervisor.workers or self._scenario.workers, incarnation)
        handover = self._supervisor.handover()
        self._note(f"a coordinator takes over as incarnation {incarnation}: {handover}")
        recalled = office.event_log.take_up(self._sink.lines)
        state = take_over(office.settings, handover, recalled, office.clock.now)
        self._around.coordinator = SimulatedCoordinator(office, state)
        self._supervisor.appoint(self._coordinator)

    # --- faults

    def _planned(self) -> list[tuple[int, SimulatedFault]]:
        """Every fault with its number."""
        return [one for one in enumerate(self._scenario.faults) if one[0] not in self._without]

    def _due_at(self, event: str, worker: SimulatedWorker | None = None) -> list[tuple[int, SimulatedFault]]:
        """The faults that have waited for this to happen, and whose turn it is."""
        due = []
        for number, fault in self._waiting.get(event, ()):
            is_meant = worker is None or fault.worker in (worker.slot, ANYBODY)
            is_its_turn = fault.after is None or fault.after in self._befallen
            if is_meant and is_its_turn and self._clock.now >= fault.at:
                self._entered[number] = self._entered.get(number, 0) + 1
                if self._entered[number] == fault.nth:
                    due.append((number, fault))
        return due

    def _on_phase(self, worker: SimulatedWorker, phase: str) -> None:
        events = (phase, REBUILD) if phase == "build" and self._sink.has_begun else (phase,)
        if phase == "wait":
            self._supervisor.engine.note_set_up(worker)
        for event in events:
            for number, fault in self._due_at(event, worker):
                self._befall_soon(number, fault, worker)

    def _befall_soon(self, number: int, fault: SimulatedFault, worker: SimulatedWorker | None = None) -> None:
        moment = self._chance.choice((0.0, 0.001, 0.01, 0.05)) * self._chance.random()
        self._clock.after(moment, partial(self._befall, number, fault, worker))

    def _note_befallen(self, number: int, fault: SimulatedFault) -> None:
        self._note(f"fault: {fault}")
        self._befallen.add(number)
        now, has_begun = self._clock.now, self._sink.has_begun
        phases = {worker.phase for worker in self._workers.values() if worker.is_alive}
        if has_begun and "build" in phases:
            phases = phases - {"build"} | {REBUILD}
        decided = {kind for kind in DECISIONS if now - self._decided.get(kind, -RECENT) < RECENT}
        self._pairs |= {(event, fault.kind) for event in phases | decided}

    def _whom(self, fault: SimulatedFault, met: SimulatedWorker | None) -> Sequence[SimulatedWorker]:
        """Whom a fault befalls; `met`: who has come to what it waited for."""
        if not fault.whom:
            return [met or self._workers[fault.worker]]
        alive = [worker for _, worker in sorted(self._workers.items()) if worker.is_alive]
        others = [worker for worker in alive if worker is not met] or alive
        if not alive or fault.whom == ALL:
            return alive
        if fault.whom == IT and met is not None and met.is_alive:
            return [met]
        if fault.whom == HOLDER:
            return [max(others, key=lambda worker: worker.holding.cursor)]
        if fault.whom == NEWCOMER:
            return [max(alive, key=lambda worker: worker.pid)]
        return [self._chance.choice(others)]

    def _befall(self, number: int, fault: SimulatedFault, met: SimulatedWorker | None = None) -> None:
        self._note_befallen(number, fault)
        match fault.kind:
            case "kill" | "stop" | "term" | "cut" | "link" | "flip" | "hang" | "corrupt":
                for worker in self._whom(fault, met):
                    self._befall_worker(fault, worker)
            case "storm":
                self._network.weather = fault.weather
                self._clock.after(fault.seconds, self._clear_up)
            case "pause" | "crash":
                befall = self._hold_up if fault.kind == "pause" else self._crash
                befall(self._coordinator, fault.seconds)
            case "spoil":
                self._referee.spoilt(self._disk.spoil_newest())
            case "resize":
                self._supervisor.ask_to_resize(fault.workers or None, fault.servers or None)
            case "save":
                self._supervisor.ask_to_save(f"request {number}")
            case "power":
                self._cut_power()
            case _:
                self._supervisor.ask_to_stop("interrupted")

    def _befall_worker(self, fault: SimulatedFault, worker: SimulatedWorker) -> None:
        match fault.kind:
            case "kill":
                worker.die()
            case "flip":
                if not worker.is_server:  # a server has nobody who holds the same as it does
                    worker.flip()
            case "corrupt":
                worker.corrupt()
            case "hang":
                worker.hang()
            case "stop":
                if worker.is_alive:
                    worker.stop()
                    self._clock.after(fault.seconds, worker.go_on)
            case "cut" | "link":
                neighbour = name_of((worker.slot + 1) % self._scenario.workers)
                others = frozenset(fault.others) - {worker.place} or {neighbour}
                mend = self._network.cut(frozenset({worker.place}), frozenset(others))
                if math.isfinite(fault.seconds):
                    self._clock.after(fault.seconds, mend)
            case _:
                worker.ask_to_leave()

    def _hold_up(self, coordinator: SimulatedCoordinator, seconds: float) -> None:
        """Stop it for a while; whoever supervises it may take it for dead before that is over, and kill it."""
        coordinator.stop()
        self._clock.after(seconds, coordinator.go_on)
        patience = self._scenario.timing.failure_timeout * self._chance.uniform(0.75, 1.5)
        if patience < seconds:
            self._clock.after(patience, partial(self._crash, coordinator, 0.1 * self._chance.random()))

    def _crash(self, coordinator: SimulatedCoordinator, seconds: float) -> None:
        if coordinator.is_alive:
            coordinator.die()
            self._bury(coordinator, seconds)

    def _cut_power(self) -> None:
        """All workers die at once, and with them what was not on the disk for sure."""
        for worker in list(self._workers.values()):
            worker.die()
        self._disk.lose_unsynced()

    def _clear_up(self) -> None:
        self._network.weather = Weather()

    # --- chance and trace

    def _host_clock(self, place: str) -> Clock:
        """The clock of the host that a place is on: workers that share memory share it as well."""
        drift = self._scenario.drift
        if not drift:
            return self._clock
        host = "workers" if self._scenario.shares_memory and place != "launcher" else place
        chance = self._random("clock", host)
        return HostClock(self._clock, chance.uniform(1 - drift, 1 + drift), chance.uniform(0.0, 1000.0))

    def _random(self, *labels: int | str) -> random.Random:
        return random.Random(derive_seed(self._seed, *labels))

    def _note(self, text: str) -> None:
        if self._traces:
            self._trace.append(f"{self._clock.now:9.4f}  {text}")


def shrink(seed: int, mutant: Mutant = SOUND, servers: int = 0) -> Verdict:
    """The same seed with as few faults as still break an invariant, and the trace of what happens then."""
    without: set[int] = set()
    is_less = True
    while is_less:  # until each that is left is needed
        is_less = False
        for number in sorted(set(range(len(scenario(seed, servers).faults))) - without):
            if Simulation(seed, mutant, without | {number}, servers=servers).run().broken:
                without.add(number)
                is_less = True
    return Simulation(seed, mutant, without, servers=servers, traces=True).run()
