"""A running job, or all of them, as a terminal shows it at one moment."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.api.live import Snapshot, WorkerNow
from quorate.cli.layout import STATUS_STYLES, headed_table
from quorate.cli.output import NONE
from quorate.core.generation import cell_of
from quorate.history.run_record import RunRecord, Status
from quorate.observe.quantities import age, ago, blocks_for, count, duration, measure, plural, sparkline
from quorate.observe.screen import lines_of

SILENT = 1.0
"""Seconds after which it is told how long a worker was not heard."""
_SPARK = 40
_NARROW = 60


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
        "phase": f"{word.phase or NONE}{' (leaving)' if word.is_leaving else ''}",
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
