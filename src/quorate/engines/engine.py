"""Where the worker processes of a job run: the protocol between a supervisor and its engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quorate.core.failure import Failure
from quorate.core.task_source import TaskSource
from quorate.worker.assignment import Assignment
from quorate.worker.status import Status

SOURCE = "task source"
"""The name, among the facts that a run's bits depend on, of the digest of its task's code."""


@dataclass(frozen=True)
class Preparation:
    """What an engine imports and checks before its first worker, and for how long a process of its may be stopped."""

    task: str
    params: dict[str, Any]
    job_source: str
    search_path: list[str]
    seed: int
    threads: int
    deterministic: bool
    device: str = "cpu"
    failure_timeout: float = 5.0
    # The job, where it is to be found out what its identity would be.
    identify: dict[str, Any] | None = None


@dataclass(frozen=True)
class Prepared:
    """What it has found: facts about machine and task that the bits depend on, the task's source, unless that is too
    large, the callbacks that the task names, and what the identity of a run would be made of, if that was asked."""

    facts: dict[str, str]
    source: TaskSource | None
    callbacks: tuple[str, ...] = ()
    identity: dict[str, Any] | None = None


@dataclass(frozen=True)
class Capacity:
    """What an engine offers: cores for its workers.

    `spans_hosts`: its processes may run on several machines, so what they say to each other can be overheard.
    """

    cores: int
    spans_hosts: bool = False


@dataclass(frozen=True)
class Ready:
    """The task is imported, and workers can be started. Told once."""

    prepared: Prepared


@dataclass(frozen=True)
class Started:
    """A worker that was asked for has a process; `how` says what is special about it, for the log."""

    slot: int
    pid: int
    how: str


@dataclass(frozen=True)
class SettingUp:
    """A worker builds its replica and is in this phase of that; None: it is done, and known to its coordinator.

    Told from its start on, as long as there is room on the disk for what it has to say.
    """

    slot: int
    pid: int
    phase: str | None


@dataclass(frozen=True)
class Exited:
    """A worker's process is gone, and nothing of it can write any more. A negative code is a signal.

    `status` is where it was, as far as that is known on its machine; heartbeats have told the coordinator the rest.
    """

    slot: int
    pid: int
    code: int
    status: Status | None = None


@dataclass(frozen=True)
class Unprepared:
    """The task cannot be imported, or its parameters do not fit."""

    failure: Failure


@dataclass(frozen=True)
class Interrupted:
    """The engine itself has failed. The exits of its workers follow; those being started it starts again by itself.

    Before it was ready nothing follows.
    """

    reason: str


@dataclass(frozen=True)
class Remark:
    """Something that users should know and nobody has to act upon: who waits for room, say."""

    message: str


Notice = Ready | Started | SettingUp | Exited | Unprepared | Interrupted | Remark


class CoordinatorChild(Protocol):
    """One coordinator's process, as whoever replaces a dead one holds it."""

    @property
    def pid(self) -> int:
        """The number that its own host knows it by; 0 as long as it is not known to be there."""
        ...

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        """What it says once it listens, its address; empty if it does not within so many seconds. Raises if it cannot,
        or is gone."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it is there, as far as that is known."""
        ...

    @property
    def departure(self) -> str:
        """How it has ended, once it has, in words."""
        ...

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        ...

    def close(self, patience: float) -> None:
        """Let it end by itself, for so many seconds at most."""
        ...


class Engine(Protocol):
    """Runs the processes of one job. It prepares itself from the moment that it is made.

    Its supervisor calls every method from one thread.
    """

    def capacity(self) -> Capacity:
        """What there is to run workers on."""
        ...

    def start_coordinator(self, appointment: Mapping[str, Any]) -> CoordinatorChild:
        """Start a coordinator, in the network that the engine has for it; without waiting until it listens."""
        ...

    def start(self, assignment: Assignment) -> None:
        """Start a worker, in the network that the engine has for it. `poll` tells of its start and of its end."""
        ...

    def poll(self, seconds: float) -> Sequence[Notice]:
        """What has happened since the last call, in order; waits at most that long for something to happen."""
        ...

    def kill(self, slot: int, pid: int) -> None:
        """End a process at once. It counts as gone only when `poll` tells so; of one that has ended nothing comes."""
        ...

    def terminate(self, slot: int, pid: int) -> None:
        """Ask a process to leave in good order, as soon as its work lets it (SIGTERM)."""
        ...

    def close(self) -> None:
        """End whoever is left, and wait until they are gone. May be called again; nothing else is called after it."""
        ...
