"""What a run has told, read back from its `events.jsonl`: events in order, curves of its numbers, how fast it went."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quorate.checkpoint.retention import is_number
from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.observe.event import Event
from quorate.observe.events import (
    CoordinatorReplaced,
    EvaluationDone,
    GenerationFormed,
    RunBegan,
    StepCompleted,
    read_event,
)
from quorate.observe.recoveries import Recovery, RecoveryLog
from quorate.observe.waiting import NO_WAIT, DataWait, DataWaitLog

_STEP = b'{"kind":"step",'
_WHOLE_LINE = b"}\n"
# The last steps may be torn; one of so many is not.
_LOOKED_BACK = 8

PHASES = ("data", "compute", "exchange", "apply")
PACE_AND_LOSSES = ("losses", "samples", "samples_per_second", *(f"{phase}_s" for phase in PHASES))
"""The fields of a step that its curves and the pace of a run are made of."""

Kind = TypeVar("Kind", bound=Event)


@dataclass
class Timeline:
    """A run's events, put in order.

    `steps` holds each step and `evaluations` the metrics of each evaluation, in step order. A run that
    went on from a checkpoint tells some of them again: the last telling counts. `position` is the step that the run
    is at now. `others` are all events but the steps, as they were told, and `counts` says how often each kind was.
    `began` and `ended` are the times of the first and the last event; `active_seconds` leaves out the time in which
    nobody worked on the run. `recoveries` are what it has recovered from, and `waiting` is how long its steps have
    waited for data; neither is known at a glance.
    """

    steps: dict[int, StepCompleted] = field(default_factory=dict)
    others: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    position: int = 0
    began: float | None = None
    ended: float | None = None
    active_seconds: float = 0.0
    unreadable_lines: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    waiting: DataWait = NO_WAIT

    @classmethod
    def read(cls, path: Path, keep: tuple[str, ...] = PACE_AND_LOSSES) -> "Timeline":
        """All that a file tells: a file that is not there nothing, and a line that is no event is only counted.

        `keep` says which fields of a step are wanted: a million steps with all of theirs take a gigabyte.
        """
        return _Reading(keep).through(path)

    @classmethod
    def glance(cls, path: Path) -> "Timeline":
        """The same without `steps`, which are counted and not looked into: ten times as fast, for a list of runs."""
        return _Reading(None).through(path)

    def of_kind(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """All events of a kind other than steps, in the order in which they were told."""
        return tuple(event for event in self.others if isinstance(event, kind))

    @property
    def evaluations(self) -> dict[int, dict[str, Any]]:
        told = {event.step: event.metrics for event in self.of_kind(EvaluationDone)}
        found = {step: metrics for step, metrics in told.items() if step is not None and metrics is not None}
        return dict(sorted(found.items()))

    @property
    def metrics(self) -> dict[str, Any]:
        """Those of the last evaluation."""
        return next(reversed(self.evaluations.values()), {})

    @property
    def total_steps(self) -> int | None:
        """How many steps the run is to have, as it was said last."""
        said = (event.total_steps for event in reversed(self.of_kind(RunBegan)))
        return next((total for total in said if total is not None), None)

    @property
    def redone(self) -> int:
        """How many tellings of steps are repetitions; 0 at a glance."""
        return self.counts.get("step", 0) - len(self.steps) if self.steps else 0


@dataclass(frozen=True)
class Curve:
    """A number by step, in order; at least one, and only finite ones."""

    name: str
    points: tuple[tuple[int, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(value for _, value in self.points)

    @property
    def first(self) -> float:
        return self.points[0][1]

    @property
    def last(self) -> float:
        return self.points[-1][1]

    @property
    def least(self) -> tuple[int, float]:
        """The first step with the least number, and that number."""
        return min(self.points, key=lambda point: point[1])

    @property
    def greatest(self) -> tuple[int, float]:
        return max(self.points, key=lambda point: point[1])


@dataclass(frozen=True)
class RunPace:
    """Means over all steps: seconds for a step, samples a second, and the share of each phase in a step's time."""

    step_seconds: float
    samples_per_second: float
    shares: dict[str, float]

    @classmethod
    def of(cls, timeline: Timeline) -> "RunPace | None":
        """From the steps of a run; none where no step tells its speed."""
        steps, seconds, samples = 0, 0.0, 0
        spent = dict.fromkeys(PHASES, 0.0)
        for step in timeline.steps.values():
            speed, size = step.samples_per_second or 0.0, step.samples or 0
            if 0 < speed < math.inf and size:
                steps, seconds, samples = steps + 1, seconds + size / speed, samples + size
                for phase in PHASES:
                    spent[phase] += getattr(step, f"{phase}_s") or 0.0
        if not seconds:
            return None
        shares = {phase: spent[phase] / seconds for phase in PHASES if spent[phase]}
        return cls(seconds / steps, samples / seconds, shares)


def loss_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """Those of the training steps."""
    return _curves({number: step.by_optimizer("loss") for number, step in timeline.steps.items()})


def metric_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """Those of the evaluations."""
    return _curves(timeline.evaluations)


class _Reading:
    """Takes in a file line by line: it may be larger than all that is kept of it."""

    def __init__(self, keep: tuple[str, ...] | None) -> None:
        self._keep = keep
        self._told = Timeline()
        self._part_began: float | None = None
        self._incarnation: str | None = None
        self._recoveries = RecoveryLog()
        self._waiting = DataWaitLog()
        self._passed: deque[bytes] = deque(maxlen=_LOOKED_BACK)

    def through(self, path: Path) -> Timeline:
        try:
            with opened_regular(path) as file:
                for line in file:
                    # The first of all is looked into, since it says when the run began.
                    is_step = line.startswith(_STEP) and line.endswith(_WHOLE_LINE)
                    if self._keep is None and is_step and self._told.began is not None:
                        self._told.counts["step"] += 1
                        self._passed.append(line)
                    elif line != b"\n":
                        self._take(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror or error}") from error
        self._look_back()
        self._end_part()
        self._told.steps = dict(sorted(self._told.steps.items()))
        self._told.recoveries = self._recoveries.recoveries
        self._told.waiting = self._waiting.wait
        return self._told

    def _look_back(self) -> None:
        """Look into the last of the steps that were passed by: it says how far this part of the run has come."""
        while self._passed:
            self._told.counts["step"] -= 1
            if self._take(self._passed.pop()):
                self._passed.clear()

    def _take(self, line: bytes) -> bool:
        try:
            event = read_event(line)
        except ValueError:  # a crash or an editor has left something else
            event = None
        if event is None or (isinstance(event, StepCompleted) and event.step is None):
            self._told.unreadable_lines += 1
            return False
        begins_part = self._begins_part(event)
        if begins_part:
            self._look_back()
        self._told.counts[event.kind] += 1
        self._take_time(event.time, begins_part)
        if self._keep is not None:
            self._recoveries.handle(event)
            self._waiting.handle(event)
        if not isinstance(event, StepCompleted):
            self._told.others.append(event)
            if isinstance(event, RunBegan) and event.from_step is not None:
                self._told.position = event.from_step
        elif event.step is not None:
            self._told.position = event.step
            if self._keep is not None:
                kept = {name: getattr(event, name) for name in self._keep}
                self._told.steps[event.step] = StepCompleted(step=event.step, time=event.time, **kept)
        return True

    def _begins_part(self, event: Event) -> bool:
        """Whether a launcher takes the run up. It brings a coordinator of its own, whose generations are higher;
        those that follow when workers are lost or come back are of the same part."""
        if isinstance(event, CoordinatorReplaced):  # one that takes the place of another in the same part
            self._incarnation = str(event.incarnation)
        if not isinstance(event, GenerationFormed):
            return isinstance(event, RunBegan)
        before, self._incarnation = self._incarnation, event.incarnation
        return self._incarnation != before

    def _take_time(self, time: float, begins_part: bool) -> None:
        told = self._told
        if begins_part:
            self._end_part()
            self._part_began = time
        if told.began is None:
            told.began = time
        if self._part_began is None:
            self._part_began = time
        # A step that was passed by is looked into later than what followed it.
        told.ended = time if begins_part or told.ended is None else max(time, told.ended)

    def _end_part(self) -> None:
        if self._part_began is not None and self._told.ended is not None:
            self._told.active_seconds += max(0.0, self._told.ended - self._part_began)


def _curves(told: dict[int, dict[str, Any]]) -> tuple[Curve, ...]:
    points: dict[str, list[tuple[int, float]]] = {}
    for step, values in told.items():
        for name, value in values.items():
            if is_number(value) and math.isfinite(value):
                points.setdefault(name, []).append((step, value))
    return tuple(Curve(name, tuple(pairs)) for name, pairs in points.items())
