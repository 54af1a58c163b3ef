"""A whole job inside one process, under virtual time: replayed exactly from its seed."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from quorate.coordinator.membership import start
from quorate.coordinator.records import (
    Decision,
    DeclareGeneration,
    Ended,
    EndJob,
    GrantLease,
    RecordLoss,
    StopRequested,
    Terms,
)
from quorate.core.seeds import derive_seed
from quorate.testing.clock import VirtualClock
from quorate.testing.invariants import InvariantBroken, Referee
from quorate.testing.mishaps import ANYBODY, Mishap, Scenario, scenario
from quorate.testing.mutants import SOUND, Mutant
from quorate.testing.network import Network, Weather
from quorate.testing.simulated_coordinator import SimulatedCoordinator, events_in
from quorate.testing.simulated_membership import SimulatedMember, Surroundings
from quorate.testing.simulated_supervisor import SimulatedSupervisor
from quorate.testing.simulated_worker import Ground, SimulatedWorker

PATIENCE = 150.0
"""Seconds of calm after which a job that has not ended never will."""
AFTERMATH = 3.0
"""Seconds for which those who have not heard of the end are watched."""


@dataclass(frozen=True)
class Verdict:
    """What came of a simulation. `broken` is the invariant that does not hold, if one does not."""

    seed: int
    without: tuple[int, ...]
    ending: str
    broken: str | None
    steps: int
    copies: int
    generations: int
    deaths: int
    seconds: float
    trace: tuple[str, ...]


class Simulation:
    """One seed's job. `without` names mishaps of its scenario, by number, that are left out."""

    def __init__(
        self, seed: int, mutant: Mutant = SOUND, without: Collection[int] = (), *, traces: bool = False
    ) -> None:
        self._seed = seed
        self._without = tuple(sorted(without))
        self._scenario = _leave_out(scenario(seed), without)
        self._traces = traces
        self._trace: list[str] = []
        self._ending = "unfinished"
        self._deaths = 0
        self._pids = 100
        self._entered: dict[int, int] = {}
        self._chance = self._random("moments")
        course, timing, workers = self._scenario.course, self._scenario.timing, self._scenario.workers
        self._clock = VirtualClock()
        self._network = Network(self._clock, self._random("network"))
        self._referee = Referee(course, self._clock)
        self._workers: dict[int, SimulatedWorker] = {}
        terms = Terms(1, course.lanes, workers, timing)
        self._coordinator = SimulatedCoordinator(
            self._clock, start(terms, 0.0), terms, mutant.decide, self._on_decision
        )
        self._around = Surroundings(
            clock=self._clock,
            network=self._network,
            coordinator=self._coordinator,
            timing=timing,
            on_exit=self._on_exit,
            on_phase=self._on_phase,
            trace=self._note,
            habits=mutant.habits,
        )
        self._ground = Ground(course, self._referee, self._workers)
        self._supervisor = SimulatedSupervisor(
            self._clock, self._network, self._coordinator, timing, self._begin_worker
        )

    def run(self) -> Verdict:
        """Run it to its end, or to the first invariant that does not hold."""
        broken = None
        try:
            self._run()
        except InvariantBroken as error:
            broken = str(error)
            self._note(broken)
        return Verdict(
            self._seed,
            self._without,
            self._ending,
            broken,
            self._referee.steps,
            self._referee.copies,
            self._referee.generations,
            self._deaths,
            self._clock.now,
            tuple(self._trace),
        )

    def _run(self) -> None:
        for slot in range(self._scenario.workers):
            self._supervisor.start(slot, restore=False)
        self._clock.after(1.0, self._look_at_places)
        for mishap in self._scenario.mishaps:
            self._note(f"planned: {mishap}")
            if not mishap.phase:
                self._clock.after(mishap.at, partial(self._befall, mishap))
        over = self._scenario.calm_from + PATIENCE
        while not self._coordinator.has_ended:
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
        is_calm = self._clock.now > self._scenario.calm_from and state.crew.stop is None
        self._referee.sees_empty(self._supervisor.empty_places() if is_calm else [])
        self._clock.after(1.0, self._look_at_places)

    # --- processes

    def _begin_worker(self, slot: int, restore: bool) -> SimulatedWorker:
        self._pids += 1
        holding = self._referee.newest_checkpoint() if restore else None
        chance = self._random("worker", self._pids)
        what = f" from step {holding.cursor.step}" if holding else ""
        self._note(f"worker {slot} is started as pid {self._pids}{what}")
        worker = SimulatedWorker(self._around, self._ground, slot, self._pids, holding, chance)
        self._workers[slot] = worker
        return worker

    def _on_exit(self, worker: SimulatedMember) -> None:
        self._deaths += 1
        self._supervisor.reap(worker)

    def _on_decision(self, decision: Decision) -> None:
        if self._traces and any(not isinstance(action, GrantLease) for action in decision.actions):
            told = ", ".join(type(action).__name__ for action in decision.actions)
            self._note(f"coordinator: {decision.reason} [{told}]")
        self._referee.recorded(events_in(decision))
        for action in decision.actions:
            if isinstance(action, RecordLoss):
                self._referee.lost(action.failure)
            if isinstance(action, DeclareGeneration):
                self._referee.declared(action.generation, self._workers)
            elif isinstance(action, EndJob):
                self._end(decision.state, action)

    def _end(self, state: object, action: EndJob) -> None:
        assert isinstance(state, Ended)
        self._ending = "failure" if action.failure else str(action.result.get("ending", ""))
        self._referee.ended(action.failure, action.digest, self._ending)

    # --- mishaps

    def _on_phase(self, worker: SimulatedMember, phase: str) -> None:
        for number, mishap in enumerate(self._scenario.mishaps):
            is_meant = mishap.worker in (worker.slot, ANYBODY) and mishap.phase == phase
            if is_meant and self._clock.now >= mishap.at:
                self._entered[number] = self._entered.get(number, 0) + 1
                if self._entered[number] == mishap.nth:
                    moment = self._chance.choice((0.0, 0.001, 0.01, 0.05)) * self._chance.random()
                    self._clock.after(moment, partial(self._befall, mishap, worker))

    def _befall(self, mishap: Mishap, worker: SimulatedMember | None = None) -> None:
        self._note(f"mishap: {mishap}")
        worker = worker or self._workers[mishap.worker]
        match mishap.kind:
            case "kill":
                worker.die()
            case "stop":
                if worker.is_alive:
                    worker.stop()
                    self._clock.after(mishap.seconds, worker.go_on)
            case "cut":
                mend = self._network.cut(frozenset({worker.place}), frozenset(mishap.others))
                self._clock.after(mishap.seconds, mend)
            case "storm":
                self._network.weather = mishap.weather
                self._clock.after(mishap.seconds, self._clear_up)
            case "pause":
                self._coordinator.stop()
                self._clock.after(mishap.seconds, self._coordinator.go_on)
            case _:
                self._coordinator.do(lambda: self._coordinator.hear(StopRequested("interrupted")))

    def _clear_up(self) -> None:
        self._network.weather = Weather()

    # --- chance and trace

    def _random(self, *labels: int | str) -> random.Random:
        return random.Random(derive_seed(self._seed, *labels))

    def _note(self, text: str) -> None:
        if self._traces:
            self._trace.append(f"{self._clock.now:9.4f}  {text}")


def _leave_out(whole: Scenario, without: Collection[int]) -> Scenario:
    kept = tuple(mishap for number, mishap in enumerate(whole.mishaps) if number not in without)
    return Scenario(whole.course, whole.workers, whole.timing, kept)


def shrink(seed: int, mutant: Mutant = SOUND) -> Verdict:
    """The same seed with as few mishaps as still break an invariant, and the trace of what happens then."""
    without: set[int] = set()
    is_less = True
    while is_less:  # until each that is left is needed
        is_less = False
        for number in sorted(set(range(len(scenario(seed).mishaps))) - without):
            if Simulation(seed, mutant, without | {number}).run().broken:
                without.add(number)
                is_less = True
    return Simulation(seed, mutant, without, traces=True).run()
