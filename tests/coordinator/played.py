"""Histories of a job, played to the pure membership: no process, no socket, no clock but the numbers given."""

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quorate.coordinator.events import (
    Action,
    Completed,
    DeclareGeneration,
    EndJob,
    ExitReported,
    HeartbeatReceived,
    MembershipEvent,
    Registered,
    StateReported,
    Tick,
)
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Decision, Ended, Forming, JobSettings, State, Training
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, WorkerStatus
from quorate.core.timing import Timing
from quorate.observe.events import LogMessage

SETTINGS = JobSettings(incarnation=3, lanes=8, workers=3, timing=Timing(5.0))
FIRST = GenerationId(3, 1)
PEER_LOST = Failure("PeerLost", "worker 1 (10.0.0.2:4000) is gone: end of file", step=17, phase="exchange")

Timed = tuple[float, MembershipEvent]


def pid_of(worker: int, life: int = 0) -> int:
    """The process that is the n-th in its place."""
    return 4710 + worker + 100 * life


def registered(worker: int, life: int = 0, **changes: object) -> Registered:
    address = f"10.0.{life}.{worker}:4000"
    plain = Registered(worker, pid_of(worker, life), "a", address, {"canary": "c0ffee"}, {"w": "1"})
    return replace(plain, **changes)  # type: ignore[arg-type]


def heartbeat(
    worker: int, sequence: int = 1, step: int = 16, events: tuple[str, ...] = (), life: int = 0
) -> HeartbeatReceived:
    return HeartbeatReceived(worker, FIRST, sequence, WorkerStatus(step, "compute"), events, pid_of(worker, life))


def reported(
    worker: int, step: int = 16, generation: int = 1, symptom: Failure | None = None, life: int = 0
) -> StateReported:
    return StateReported(worker, pid_of(worker, life), GenerationId(3, generation), Cursor(step), symptom)


def completed(worker: int, digest: str = "d", life: int = 0) -> Completed:
    return Completed(worker, digest, {"by": worker}, pid_of(worker, life))


def killed(
    worker: int, number: int = signal.SIGKILL, status: WorkerStatus | None = None, life: int = 0
) -> ExitReported:
    return ExitReported(worker, pid_of(worker, life), "a", None, number, status or WorkerStatus(17, "exchange"))


def exited(worker: int, code: int, life: int = 0) -> ExitReported:
    return ExitReported(worker, pid_of(worker, life), "a", code, None, WorkerStatus(17, "exchange"))


def play(state: State, *events: Timed) -> list[Decision]:
    decisions: list[Decision] = []
    for now, event in events:
        decisions.append(decide(decisions[-1].state if decisions else state, event, now))
    return decisions


def last_of(state: State, *events: Timed) -> Decision:
    return play(state, *events)[-1]


def training(settings: JobSettings = SETTINGS) -> Training:
    """All workers are in the first generation, since the time 0."""
    state = last_of(start(settings, 0.0), *((0.0, registered(worker)) for worker in range(settings.workers))).state
    assert isinstance(state, Training)
    return state


def forming(*events: Timed, settings: JobSettings = SETTINGS) -> Forming:
    """A job in training to which this happens, so that it is no longer."""
    state = last_of(training(settings), *events).state
    assert isinstance(state, Forming)
    return state


def declared(decision: Decision) -> Generation:
    """The generation that a decision declares."""
    (found,) = [action.generation for action in decision.actions if isinstance(action, DeclareGeneration)]
    assert isinstance(decision.state, Training)
    assert decision.state.generation == found
    return found


def workers_of(generation: Generation) -> list[int]:
    return [member.worker for member in generation.members]


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


def messages_of(actions: Iterable[Action], level: str = "warning") -> list[str]:
    """What the user is told by these actions."""
    return [action.message or "" for action in actions if isinstance(action, LogMessage) and action.level == level]


def types_of(decision: Decision) -> list[type[Action]]:
    return [type(action) for action in decision.actions]


def of_kind(kind: Any, *decisions: Decision) -> list[Any]:
    """The actions of this type, or of these."""
    return [action for decision in decisions for action in decision.actions if isinstance(action, kind)]


def forms(decision: Decision) -> bool:
    return bool(of_kind(DeclareGeneration, decision))


def all_report(
    members: Iterable[int], step: int = 16, generation: int = 1, now: float = 1.1, symptom: Failure | None = None
) -> list[Timed]:
    return [(now, reported(member, step, generation, symptom)) for member in members]


def asked_to_leave(member: int, sequence: int = 1) -> HeartbeatReceived:
    return replace(heartbeat(member, sequence), is_leaving=True)


def ending(*events: Timed, state: State | None = None) -> Failure | None:
    """The failure that ends a job in training after these events."""
    last = last_of(state or training(), *events)
    assert isinstance(last.state, Ended)
    assert of_kind(EndJob, last)
    return last.state.failure


def message_of(*events: Timed, state: State | None = None) -> str:
    failure = ending(*events, state=state)
    assert failure is not None
    return failure.message


def beats_until(now: float, *workers: int, since: float = 0.0, step: float = 0.25) -> list[Timed]:
    """Ticks from one time to another, at which these workers and nobody else are heard."""
    events: list[Timed] = []
    for count in range(1, int((now - since) / step) + 1):
        time = since + count * step
        events += [(time, heartbeat(worker, round(time * 100))) for worker in workers]
        events.append((time, Tick()))
    return events
