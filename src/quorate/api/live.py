"""A job as it is now: what its events have told, and what its coordinator hears of the workers."""

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorate.api.control import status
from quorate.coordinator.client import JobStatus, WorkerWord
from quorate.core.errors import RunError
from quorate.history.event_index import IndexedReader
from quorate.history.run_record import RunRecord, Status
from quorate.history.step_columns import StepColumns
from quorate.history.step_rows import PHASES, SAMPLES, TIME, StepRows
from quorate.history.timeline import Timeline
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved, GenerationFormed, HostedLanes, RunBegan
from quorate.observe.notices import notice_of
from quorate.observe.progress import Progress
from quorate.observe.recoveries import Recovered, Recovery
from quorate.storage.run_folder import RunFolder

RECENT = 200
"""Steps that the pace of now is the mean of."""
NOTICES = 6
_PATIENCE = 1.0
"""Seconds: whoever looks on waits no longer for a coordinator that does not answer."""


@dataclass(frozen=True)
class WorkerNow:
    """A worker of the present generation with its lanes, or one that is on its way into the next.

    `word` is None where its coordinator does not know it, or does not answer."""

    worker: int
    lanes: tuple[int, ...]
    word: WorkerWord | None = None


@dataclass(frozen=True)
class Snapshot:
    """How a run stands at one moment.

    `losses` are those of the last step by name, `recent` the first of them over the last steps. `seconds_left` and
    `samples_per_second` go by those, too. `data_wait` is the share of a step that is spent waiting for samples.
    `saved` is the last checkpoint that was told: its step and its time.
    """

    record: RunRecord
    now: datetime
    generation: str
    wanted: int | None
    workers: tuple[WorkerNow, ...]
    losses: dict[str, float]
    recent: tuple[float, ...]
    samples_per_second: float | None
    step_seconds: float | None
    shares: dict[str, float]
    data_wait: float | None
    saved: tuple[int, float] | None
    recoveries: tuple[Recovery, ...]
    recovered: Recovered
    notices: tuple[str, ...]

    @property
    def seconds_left(self) -> float | None:
        if self.step_seconds is None or not self.record.total_steps or self.record.status is not Status.RUNNING:
            return None
        return max(0, self.record.total_steps - self.record.steps) * self.step_seconds

    @property
    def checkpoint_age(self) -> float | None:
        return None if self.saved is None else max(0.0, self.now.timestamp() - self.saved[1])

    def document(self) -> dict[str, Any]:
        """As `quorate top --json` prints it (schema in docs/json)."""
        record = self.record
        saved = None
        if self.saved is not None:
            saved = {"step": self.saved[0], "age_seconds": round(self.checkpoint_age or 0.0, 3)}
        return {
            "run": record.name,
            "folder": str(record.path.absolute()),
            "status": record.status.value,
            "steps": record.steps,
            "total_steps": record.total_steps,
            "generation": self.generation or None,
            "workers_wanted": self.wanted,
            "workers": [_worker(each) for each in self.workers],
            "losses": self.losses,
            "samples_per_second": self.samples_per_second,
            "step_seconds": self.step_seconds,
            "seconds_left": self.seconds_left,
            "shares": self.shares,
            "data_wait": self.data_wait,
            "checkpoint": saved,
            "recoveries": [each.to_dict() for each in self.recoveries],
            "notices": list(self.notices),
        }


def _worker(each: WorkerNow) -> dict[str, Any]:
    word = None if each.word is None else asdict(each.word) | {"silent_s": round(each.word.silent_s, 3)}
    known: dict[str, Any] = {} if word is None else {name: value for name, value in word.items() if name != "worker"}
    names = ("pid", "host", "step", "phase", "waits_for", "silent_s", "is_leaving")
    return {"worker": each.worker, "lanes": list(each.lanes)} | {name: known.get(name) for name in names}


class LiveRun:
    """Looks at one run again and again; what it has read of the events it does not read again."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._reader = IndexedReader(run.events_file)
        self._reader.read_on()
        if self._reader.is_worth_writing:
            self._reader.write()
        self._told = 0
        self._progress = Progress(run.name, str(run.path), 0, 0)
        self._notices: deque[str] = deque(maxlen=NOTICES)

    def look(self) -> Snapshot:
        self._reader.read_on()
        timeline, now = self._reader.timeline(), datetime.now(UTC)
        record = RunRecord.read(self.run, timeline)
        answer = status(self.run, _PATIENCE) if record.status is Status.RUNNING else None
        formed = timeline.of_kind(GenerationFormed)[-1:]
        told = [event for event in timeline.of_kind(CheckpointSaved) if event.step is not None][-1:]
        return Snapshot(
            record=record,
            now=now,
            generation=formed[0].generation or "" if formed else "",
            wanted=None if answer is None else answer.wanted or None,
            workers=_workers(formed[0].computing if formed else (), answer),
            **_recent(timeline),
            data_wait=timeline.waiting.share if timeline.waiting.step_s else None,
            saved=(told[0].step or 0, told[0].time) if told else None,
            recoveries=tuple(timeline.recoveries),
            recovered=timeline.recovered,
            notices=self._new_notices(timeline.others),
        )

    def _new_notices(self, events: Sequence[Event]) -> tuple[str, ...]:
        """The last sentences that a person would have been told."""
        if self._told > len(events):  # another file
            self._told = 0
        # What long ago happened would be told at length, and forgotten again.
        for event in events[max(self._told, len(events) - 20 * NOTICES) :]:
            notice = notice_of(event, self._progress)
            self._progress.handle(event)
            if notice is not None:
                self._notices.extend(notice.text.splitlines()[:1])
        self._told = len(events)
        return tuple(self._notices)


def _workers(members: Sequence[HostedLanes], answer: JobStatus | None) -> tuple[WorkerNow, ...]:
    """Those of the generation, and those who are not in it yet."""
    words = {} if answer is None else {word.worker: word for word in answer.workers}
    hosting = {member.worker: member.lanes for member in members}
    return tuple(WorkerNow(worker, hosting.get(worker, ()), words.get(worker)) for worker in sorted({*hosting, *words}))


def _recent(timeline: Timeline) -> dict[str, Any]:
    """What the last steps say, by the names that a `Snapshot` has for it."""
    assert timeline.rows is not None
    columns = StepColumns(StepRows(timeline.rows.packed[-1:], timeline.rows.rows))
    # A run that went on from a checkpoint has steps behind its position that it will tell again.
    known = columns.steps <= timeline.position
    if not known.any():
        return {"losses": {}, "recent": (), "samples_per_second": None, "step_seconds": None, "shares": {}}

    def recent(name: str) -> NDArray[np.float64]:
        return columns.column(name)[known][-RECENT:]

    losses = {name: values[np.isfinite(values)] for name in columns.family("loss") for values in [recent(name)]}
    losses = {name: values for name, values in losses.items() if len(values)}
    times, samples = recent(TIME), recent(SAMPLES)
    # Before this part of the run nobody may have worked for days.
    began = max((event.time for event in timeline.of_kind(RunBegan)), default=0.0)
    here = times >= began
    seconds, steps = float(np.ptp(times[here])) if here.any() else 0.0, int(here.sum()) - 1
    per_step = seconds / steps if steps > 0 and seconds > 0 else None
    sizes = samples[here & (samples > 0)]
    spent = {phase: float(recent(f"{phase}_s").mean()) for phase in PHASES}
    whole = sum(spent.values())
    return {
        "losses": {name: float(values[-1]) for name, values in losses.items()},
        "recent": tuple(next(iter(losses.values())).tolist()) if losses else (),
        "samples_per_second": float(sizes.mean()) / per_step if per_step and len(sizes) else None,
        "step_seconds": per_step,
        "shares": {phase: share / whole for phase, share in spent.items()} if whole else {},
    }


def running_jobs(runs: Path) -> tuple[RunRecord, ...]:
    """Those in a folder of runs that somebody is at work on, the newest first. Of all others, which may be many,
    nothing is read."""
    records = []
    for run in reversed(RunFolder.all_in(runs)):
        with contextlib.suppress(RunError):  # it was removed meanwhile
            if run.holder() is not None and (record := RunRecord.read(run)).status is Status.RUNNING:
                records.append(record)
    return tuple(records)
