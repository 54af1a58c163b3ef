"""What a run has told, read back from its `events.jsonl`: events in order, curves of its numbers, how fast it went."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from quorate.checkpoint.retention import is_number
from quorate.core.cached import cached_property
from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.history.step_rows import LOGGED, PHASES, SAMPLES, SPEED, StepRow, StepRows, plain_row
from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.events import read_event
from quorate.observe.recoveries import Recovered, Recovery, RecoveryLog
from quorate.observe.seldom_events import StepTraced, SystemSampled
from quorate.observe.waiting import NO_WAIT, DataWait, DataWaitLog

_STEP = b'{"kind":"step",'
_WHOLE_LINE = b"}\n"
_MEASURED = tuple(f'{{"kind":"{kind.KIND}",'.encode() for kind in (events.LinksMeasured, StepTraced, SystemSampled))
"""What a job that is tracked or traced tells very often, for others to read."""
# The last steps may be torn; one of so many is not.
_LOOKED_BACK = 8

PACE_AND_LOSSES = ("losses", "log", "samples", "samples_per_second", *(f"{phase}_s" for phase in PHASES))
"""The fields of a step that its curves and the pace of a run are made of."""

Kind = TypeVar("Kind", bound=Event)


@dataclass
class Timeline:
    """A run's events, put in order.

    `steps` holds each step and `evaluations` the metrics of each evaluation, in step order. A run that
    went on from a checkpoint tells some of them again: the last telling counts. `position` is the step that the run
    is at now. `others` are all events but the steps and what was measured (loads, links, spans), as they were told, and
    `counts` says how often each kind was.
    `began` and `ended` are the times of the first and the last event; `active_seconds` leaves out the time in which
    nobody worked on the run. `recoveries` are what it has recovered from, `recovered` is what they come to, and
    `waiting` how long its steps have waited for data; none of it is known at a glance.

    Of a long run, `rows` has the numbers of the steps, and `steps` is empty; `noted` are the steps that told more than
    numbers: warnings, samples that were bad or skipped.
    """

    steps: dict[int, events.StepCompleted] = field(default_factory=dict)
    others: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    position: int = 0
    began: float | None = None
    ended: float | None = None
    active_seconds: float = 0.0
    unreadable_lines: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    recovered: Recovered = field(default_factory=Recovered)
    waiting: DataWait = NO_WAIT
    rows: StepRows | None = None
    noted: list[events.StepCompleted] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, keep: tuple[str, ...] = PACE_AND_LOSSES) -> "Timeline":
        """All that a file tells: a file that is not there nothing, and a line that is no event is only counted.

        `keep` says which fields of a step are wanted: a million steps with all of theirs take a gigabyte.
        """
        return EventFold(keep).through(path)

    @classmethod
    def glance(cls, path: Path) -> "Timeline":
        """The same without `steps`, which are counted and not looked into: ten times as fast, for a list of runs."""
        return EventFold(None).through(path)

    def of_kind(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """All events of a kind other than steps, in the order in which they were told."""
        return tuple(event for event in self.others if isinstance(event, kind))

    @property
    def evaluations(self) -> dict[int, dict[str, Any]]:
        told = {event.step: event.metrics for event in self.of_kind(events.EvaluationDone)}
        found = {step: metrics for step, metrics in told.items() if step is not None and metrics is not None}
        return dict(sorted(found.items()))

    @property
    def metrics(self) -> dict[str, Any]:
        """Those of the last evaluation."""
        return next(reversed(self.evaluations.values()), {})

    @property
    def total_steps(self) -> int | None:
        """How many steps the run is to have, as it was said last."""
        said = (event.total_steps for event in reversed(self.of_kind(events.RunBegan)))
        return next((total for total in said if total is not None), None)

    @cached_property
    def columns(self) -> Any:
        """The `StepColumns` of a long run, in numpy, which takes long to import; None of one that has its steps."""
        if self.rows is None:
            return None
        from quorate.history.step_columns import StepColumns

        return StepColumns(self.rows)

    @property
    def redone(self) -> int:
        """How many tellings of steps are repetitions; 0 at a glance."""
        known = self.steps if self.columns is None else self.columns.steps
        return self.counts.get("step", 0) - len(known) if len(known) else 0


@dataclass(frozen=True)
class Curve:
    """A number by step, in order; at least one, and only finite ones."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        return tuple(zip(self.steps, self.values, strict=True))

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def least(self) -> tuple[int, float]:
        """The first step with the least number, and that number."""
        return self._at(min(self.values))

    @property
    def greatest(self) -> tuple[int, float]:
        return self._at(max(self.values))

    def _at(self, value: float) -> tuple[int, float]:
        place = self.values.index(value)
        return self.steps[place], self.values[place]


@dataclass(frozen=True)
class RunPace:
    """Means over all steps: seconds for a step, samples a second, and the share of each phase in a step's time."""

    step_seconds: float
    samples_per_second: float
    shares: dict[str, float]

    @classmethod
    def of(cls, timeline: Timeline) -> "RunPace | None":
        """From the steps of a run; none where no step tells its speed."""
        if timeline.columns is not None:
            return _pace(timeline.columns)
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


def _pace(columns: Any) -> RunPace | None:
    """The same sums, added in the same order."""
    speed, size = columns.column(SPEED), columns.column(SAMPLES)
    timed = (speed > 0) & (speed < math.inf) & (size > 0)
    steps = int(timed.sum())
    if not steps:
        return None
    seconds = float((size[timed] / speed[timed]).cumsum()[-1])
    spent = {phase: float(columns.column(f"{phase}_s")[timed].cumsum()[-1]) for phase in PHASES}
    shares = {phase: spent[phase] / seconds for phase in PHASES if spent[phase]}
    return RunPace(seconds / steps, int(size[timed].sum()) / seconds, shares)


def loss_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """Those of the training steps."""
    return step_curves(timeline, "loss")


def step_curves(timeline: Timeline, family: str) -> tuple[Curve, ...]:
    """Those of a family of the training steps' numbers: one, or one for each optimizer."""
    columns = timeline.columns
    if columns is None:
        return _curves({number: step.by_optimizer(family) for number, step in timeline.steps.items()})
    found = []
    for name in columns.family(family):
        steps, values = columns.series(name)
        if len(steps):
            found.append(Curve(name, steps.tolist(), values.tolist()))
    # By where they begin, as those are that are made step by step.
    return tuple(sorted(found, key=lambda curve: curve.steps[0]))


def logged_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """Those of what the task has logged, by its own names."""
    if timeline.columns is not None:
        family = step_curves(timeline, LOGGED.rstrip("."))
        return tuple(replace(curve, name=curve.name.removeprefix(LOGGED)) for curve in family)
    return _curves({number: step.log for number, step in timeline.steps.items() if step.log})


def metric_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """Those of the evaluations."""
    return _curves(timeline.evaluations)


class EventFold:
    """Takes in a file line by line: it may be larger than all that is kept of it.

    What it is told to `keep` of a step is kept in `Timeline.steps`, nothing of any where that is None. Where it is
    given `rows`, the numbers of the steps are put there instead.
    """

    def __init__(self, keep: tuple[str, ...] | None = None, rows: StepRows | None = None) -> None:
        self._keep = keep
        self._rows = rows
        self._is_glance = keep is None and rows is None
        self._told = Timeline(rows=rows)
        self._part_began: float | None = None
        self._incarnation: str | None = None
        self._recoveries = RecoveryLog()
        self._waiting = DataWaitLog()
        self._passed: deque[bytes] = deque(maxlen=_LOOKED_BACK)

    def through(self, path: Path, offset: int = 0) -> Timeline:
        """Take in all lines of a file, from an offset on; what they tell. A file that is not there tells nothing."""
        try:
            with opened_regular(path) as file:
                file.seek(offset)
                for line in file:
                    self.take(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror or error}") from error
        return self.timeline()

    def take(self, line: bytes) -> bool:
        """Take in a line; whether it tells more than the numbers of a step."""
        if line == b"\n" or (line.startswith(_MEASURED) and self._take_measured(line)):
            return False
        if self._told.began is not None and line.startswith(_STEP) and line.endswith(_WHOLE_LINE):
            # The first of all is looked into, since it says when the run began.
            if self._is_glance:
                self._told.counts["step"] += 1
                self._passed.append(line)
                return False
            if self._rows is not None and (row := plain_row(line)) is not None:
                self._told.counts["step"] += 1
                self._take_time(row.time, begins_part=False)
                self._take_row(row)
                return False
        return self._take(line)

    def timeline(self) -> Timeline:
        """What was told so far; more may follow."""
        self._look_back()
        told = self._told
        return replace(
            told,
            steps=dict(sorted(told.steps.items())),
            active_seconds=told.active_seconds + self._part_seconds,
            recoveries=self._recoveries.recoveries,
            recovered=self._recoveries.total,
            waiting=self._waiting.wait,
        )

    # --- what an index keeps of it

    def state(self) -> dict[str, Any]:
        """All of it but events and rows, as JSON has it."""
        told = self._told
        return {
            "counts": dict(told.counts),
            "position": told.position,
            "began": told.began,
            "ended": told.ended,
            "active_seconds": told.active_seconds,
            "unreadable_lines": told.unreadable_lines,
            "part_began": self._part_began,
            "incarnation": self._incarnation,
            "recoveries": self._recoveries.state(),
            "waiting": self._waiting.state(),
        }

    def restore(self, state: dict[str, Any], noted: Iterable[bytes]) -> None:
        """Be as another was that had this state and had taken in these lines beside those that are in the rows. Raises
        ValueError, KeyError or TypeError where it is none."""
        told = self._told
        told.counts = Counter(state["counts"])
        told.position, told.unreadable_lines = state["position"], state["unreadable_lines"]
        told.began, told.ended, told.active_seconds = state["began"], state["ended"], state["active_seconds"]
        self._part_began, self._incarnation = state["part_began"], state["incarnation"]
        self._recoveries, self._waiting = RecoveryLog.of(state["recoveries"]), DataWaitLog.of(state["waiting"])
        for line in noted:
            self._note(read_event(line))
        if self._is_glance:
            self._recoveries, self._waiting = RecoveryLog(), DataWaitLog()

    def forget(self) -> None:
        """Keep the state only."""
        self._told.others.clear()
        self._told.noted.clear()

    # --- line by line

    def _look_back(self) -> None:
        """Look into the last of the steps that were passed by: it says how far this part of the run has come."""
        while self._passed:
            self._told.counts["step"] -= 1
            if self._take(self._passed.pop()):
                self._passed.clear()

    def _take_measured(self, line: bytes) -> bool:
        """Count a line, and keep nothing of it; False where it has to be looked into."""
        try:
            record = orjson.loads(line)
            kind, time = record["kind"], record["time"]
        except (ValueError, KeyError):
            return False
        if type(time) not in (int, float):
            return False
        self._told.counts[kind] += 1
        self._take_time(time, begins_part=False)
        return True

    def _take(self, line: bytes) -> bool:
        try:
            event = read_event(line)
        except ValueError:  # a crash or an editor has left something else
            event = None
        if event is None or (isinstance(event, events.StepCompleted) and event.step is None):
            self._told.unreadable_lines += 1
            return False
        begins_part = self._begins_part(event)
        if begins_part:
            self._look_back()
        self._told.counts[event.kind] += 1
        self._take_time(event.time, begins_part)
        is_noted = self._note(event)
        if isinstance(event, events.StepCompleted):
            self._take_step(event)
        else:
            if not self._is_glance:
                self._recoveries.handle(event)
                self._waiting.handle(event)
            if isinstance(event, events.RunBegan) and event.from_step is not None:
                self._told.position = event.from_step
        return is_noted or self._is_glance

    def _note(self, event: Event) -> bool:
        """Keep an event, if it is to be kept whole."""
        if not isinstance(event, events.StepCompleted):
            self._told.others.append(event)
        elif self._rows is not None and (event.warnings or event.bad_samples or event.skipped is not None):
            self._told.noted.append(event)
        else:
            return False
        return True

    def _take_step(self, event: events.StepCompleted) -> None:
        assert event.step is not None
        if self._rows is not None:
            self._take_row(StepRow.of(event))
            return
        self._told.position = event.step
        if self._keep is not None:
            self._recoveries.handle(event)
            self._waiting.handle(event)
            kept = {name: getattr(event, name) for name in self._keep}
            self._told.steps[event.step] = events.StepCompleted(step=event.step, time=event.time, **kept)

    def _take_row(self, row: StepRow) -> None:
        assert self._rows is not None
        self._told.position = row.step
        self._recoveries.take_step(row.step, row.time)
        get = row.numbers.get
        seconds = (get("data_s", 0.0), get("compute_s", 0.0), get("exchange_s", 0.0), get("apply_s", 0.0))
        self._waiting.take_step(seconds, get("longest_data_s", 0.0), row.draws)
        self._rows.add(row)

    def _begins_part(self, event: Event) -> bool:
        """Whether a launcher takes the run up. It brings a coordinator of its own, whose generations are higher;
        those that follow when workers are lost or come back are of the same part."""
        if isinstance(event, events.CoordinatorReplaced):  # one that takes the place of another in the same part
            self._incarnation = str(event.incarnation)
        if not isinstance(event, events.GenerationFormed):
            return isinstance(event, events.RunBegan)
        before, self._incarnation = self._incarnation, event.incarnation
        return self._incarnation != before

    def _take_time(self, time: float, begins_part: bool) -> None:
        told = self._told
        if begins_part:
            told.active_seconds += self._part_seconds
            self._part_began = time
        if told.began is None:
            told.began = time
        if self._part_began is None:
            self._part_began = time
        # A step that was passed by is looked into later than what followed it.
        told.ended = time if begins_part or told.ended is None else max(time, told.ended)

    @property
    def _part_seconds(self) -> float:
        """How long the present part of the run has taken."""
        if self._part_began is None or self._told.ended is None:
            return 0.0
        return max(0.0, self._told.ended - self._part_began)


def _curves(told: dict[int, dict[str, Any]]) -> tuple[Curve, ...]:
    points: dict[str, list[tuple[int, float]]] = {}
    for step, values in told.items():
        for name, value in values.items():
            if is_number(value) and math.isfinite(value):
                points.setdefault(name, []).append((step, value))
    return tuple(Curve(name, *map(tuple, zip(*pairs, strict=True))) for name, pairs in points.items())
