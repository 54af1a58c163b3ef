"""A running job, or all of them, as a terminal shows it at one moment: what its events have told, and what its
coordinator hears of the workers."""

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.api.control import status
from quorate.cli.layout import STATUS_STYLES, headed_table
from quorate.cli.output import NONE
from quorate.core.errors import RunError
from quorate.core.generation import cell_of
from quorate.history.event_index import IndexedReader
from quorate.history.run_record import RunRecord, Status
from quorate.history.step_columns import StepColumns
from quorate.history.step_rows import PHASES, SAMPLES, TIME, StepRows
from quorate.history.timeline import Timeline
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved, GenerationFormed, HostedLanes, RunBegan
from quorate.observe.notices import notice_of
from quorate.observe.progress import Progress
from quorate.observe.quantities import age, ago, blocks_for, count, duration, measure, plural, sparkline
from quorate.observe.recoveries import Recovered, Recovery
from quorate.observe.screen import lines_of
from quorate.storage.run_folder import RunFolder
from quorate.wire.proto import coordinator_pb2 as pb

SILENT = 1.0
"""Seconds after which it is told how long a worker was not heard."""
_SPARK = 40
_NARROW = 60
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
    word: pb.WorkerState | None = None

    def document(self) -> dict[str, Any]:
        """What `quorate top --json` says of it."""
        told = {name: getattr(self.word, name, None) for name in ("pid", "host", "step", "phase", "waits_for")}
        told["silent_s"] = None if self.word is None else round(self.word.silent_s, 3)
        told["is_leaving"] = None if self.word is None else self.word.leaving
        return {"worker": self.worker, "lanes": list(self.lanes)} | told


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
            "workers": [each.document() for each in self.workers],
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
            workers=_workers_now(formed[0].computing if formed else (), answer),
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


def _workers_now(members: Sequence[HostedLanes], answer: pb.StatusReply | None) -> tuple[WorkerNow, ...]:
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


def snapshot_view(seen: Snapshot, width: int, encoding: str = "utf-8") -> Group:
    """How a run stands: its place, its numbers, its workers, and what was said last."""
    record = seen.record
    status = Text(record.status.value, style=STATUS_STYLES[record.status])
    parts: list[RenderableType] = [Text.assemble((record.name, "bold"), "  ", status, f"  {record.progress} steps")]
    if record.total_steps:
        bar = Table.grid()
        bar.add_row(ProgressBar(record.total_steps, record.steps, min(width, 100), complete_style="cyan"))
        parts.append(bar)
    parts += [Text(line) for line in lines_of(_facts(seen), width)]
    if seen.recent:
        room = min(_SPARK, width - 10)
        name = next(iter(seen.losses), "loss")
        line = sparkline(seen.recent, room, blocks_for(encoding))
        parts.append(Text.assemble((f"{name} ", "dim"), (line, "cyan"), (f" {len(seen.recent)} steps", "dim")))
    if not is_over(seen):
        parts += [Text(), _workers(seen.workers, width)]
    if seen.notices:
        parts += [Text(), *(Text(each, style="dim", no_wrap=True, overflow="ellipsis") for each in seen.notices)]
    return Group(*parts)


def _facts(seen: Snapshot) -> list[str]:
    facts = [f"{name} {measure(value)}" for name, value in seen.losses.items()]
    if seen.samples_per_second is not None:
        facts.append(f"{count(seen.samples_per_second)} samples/s")
    if seen.step_seconds is not None:
        facts.append(f"{duration(seen.step_seconds)} a step")
    if seen.seconds_left is not None:
        facts.append(f"{duration(seen.seconds_left)} left")
    facts += [f"{phase} {share:.0%}" for phase, share in seen.shares.items() if share >= 0.005]
    if seen.data_wait is not None:
        facts.append(f"waiting for data {seen.data_wait:.0%}")
    if seen.generation:
        facts.append(f"generation {seen.generation}")
    facts.append(_recovered(seen))
    if seen.saved is not None and (passed := seen.checkpoint_age) is not None:
        facts.append(f"saved step {seen.saved[0]:,} {ago(passed)}")
    else:
        facts.append("nothing saved yet")
    return facts


def _recovered(seen: Snapshot) -> str:
    if not seen.recoveries:
        return "no recoveries"
    times = seen.recovered.times
    return f"{f'{times:,} recoveries' if times > 1 else '1 recovery'}, the last at step {seen.recoveries[-1].step:,}"


def _workers(workers: Sequence[WorkerNow], width: int) -> Table | Text:
    if not workers:
        return Text("no worker has joined yet", style="dim")
    headings = ["worker", "lanes", "phase", "step", "waits for", "heard", "process"]
    shown = headings[:4] if width < _NARROW else headings
    rows = [[Text(cells[heading]) for heading in shown] for cells in map(_cells, workers)]
    return headed_table(shown, whole=shown, rows=rows)


def _cells(each: WorkerNow) -> dict[str, str]:
    word = each.word
    lanes = f"{each.lanes[0]}-{each.lanes[-1]}" if len(each.lanes) > 1 else "".join(map(str, each.lanes)) or NONE
    if word is None:
        return {"worker": cell_of(each.worker), "lanes": lanes} | dict.fromkeys(
            ("phase", "step", "waits for", "heard", "process"), NONE
        )
    return {
        "worker": cell_of(each.worker),
        "lanes": lanes,
        "phase": f"{word.phase or NONE}{' (leaving)' if word.leaving else ''}",
        "step": f"{word.step:,}",
        "waits for": word.waits_for or NONE,
        "heard": f"{word.silent_s:.1f} s ago" if word.silent_s >= SILENT else "now",
        "process": f"{word.pid} on {word.host}",
    }


def list_view(running: Sequence[RunRecord], now: datetime) -> Group:
    """All running jobs."""
    if not running:
        return Group(Text("No job is running in this folder of runs."))
    rows = [
        (each.name, each.progress, str(each.workers or NONE), age(each.age(now)), each.task.rpartition("/")[2])
        for each in running
    ]
    table = headed_table(("name", "steps", "workers", "age", "task"), whole=("steps", "age"), rows=rows)
    return Group(Text(plural(len(running), "running job"), style="bold"), table)


def is_over(seen: Snapshot) -> bool:
    """Whether nothing will change any more."""
    return seen.record.status not in (Status.RUNNING, Status.SUBMITTED)
