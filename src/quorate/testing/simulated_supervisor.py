"""The supervisor of a simulation: starts workers, reaps them, reports their end, and kills whom it is told to."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from quorate.coordinator.records import Action, ExitReported, Place, Refill
from quorate.core.timing import Timing
from quorate.testing.clock import Process, VirtualClock
from quorate.testing.network import Network
from quorate.testing.simulated_coordinator import SimulatedCoordinator

REAPING = 0.003
"""Seconds from the end of a process to its being noticed."""


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
    """Looks after the processes in their places."""

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        coordinator: SimulatedCoordinator,
        timing: Timing,
        begin: Callable[[int, bool], Child],
    ) -> None:
        super().__init__(clock, "supervisor")
        self._network = network
        self._coordinator = coordinator
        self._timing = timing
        self._begin = begin
        self.children: dict[int, Child] = {}
        self._expected: set[int] = set()
        coordinator.on_expel = self._hear_of_expelled

    def start(self, slot: int, *, restore: bool) -> None:
        """Start a process in a place."""
        self._expected.discard(slot)
        self.children[slot] = self._begin(slot, restore)

    def empty_places(self) -> list[int]:
        """Places in which no process is, nor will be soon."""
        return [slot for slot, child in self.children.items() if not child.is_alive and slot not in self._expected]

    def reap(self, child: Child) -> None:
        """A process has ended."""
        self.after(REAPING, lambda: self._report(child))

    def _report(self, child: Child) -> None:
        """Tell the coordinator, again and again until it answers."""
        answered: list[bool] = []
        signal = None if child.exit_code is not None else 9
        event = ExitReported(child.slot, child.pid, "a", child.exit_code, signal, Place())

        def heed(actions: Sequence[Action]) -> None:
            if answered:
                return  # an answer that was duplicated, or one to an earlier try
            answered.append(True)
            for action in actions:
                if isinstance(action, Refill):
                    self._expected.add(action.worker)
                    self.after(action.after, partial(self.start, action.worker, restore=action.restore))

        def tell() -> None:
            if answered or self._coordinator.has_ended:
                return
            self._network.send(
                self,
                self._coordinator,
                lambda: self._coordinator.hear(
                    event, lambda actions: self._network.send(self._coordinator, self, lambda: heed(actions))
                ),
            )
            self.after(self._timing.failure_timeout, tell)

        tell()

    def _hear_of_expelled(self) -> None:
        expelled = self._coordinator.expelled
        self._network.send(self._coordinator, self, lambda: self._kill(expelled))

    def _kill(self, expelled: list[tuple[int, int]]) -> None:
        for slot, pid in expelled:
            child = self.children.get(slot)
            if child is not None and child.pid == pid and child.is_alive:
                child.die()
