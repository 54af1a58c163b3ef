"""Everything about one run, for people: its state first, what was asked of it last; its curves as a picture."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from quorate.api.recorded_run import short_path
from quorate.cli.layout import STATUS_STYLES, Page
from quorate.cli.output import print_document
from quorate.cli.runs_view import ask_ray
from quorate.core.errors import RunError
from quorate.core.generation import name_of
from quorate.core.runs_folder import as_typed
from quorate.history.documents import Staleness, detail_document
from quorate.history.run_detail import Advice, CheckpointRecord, RunDetail, advise, job_values, nearest_saved, said_of
from quorate.history.run_record import Status, short_task
from quorate.history.timeline import Curve, RunPace, Timeline, logged_curves, loss_curves, metric_curves
from quorate.observe.console import Console
from quorate.observe.events import (
    BlocksPlaced,
    MemoryRanOut,
    RunFailed,
    RunFinished,
    RunStopped,
)
from quorate.observe.jsonl import EventTail, events_in
from quorate.observe.progress import Progress
from quorate.observe.quantities import ago, blocks_for, count, duration, measure, plural, size, some_of, sparkline
from quorate.observe.screen import Screen, recovered
from quorate.observe.seldom_events import GradientsCompressed, StalenessObserved
from quorate.observe.waiting import waiting_in_words
from quorate.spec.job import JobSpec
from quorate.spec.keys import Mark
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob
from quorate.spec.yaml_document import write_value
from quorate.storage.run_folder import RunFolder

LOOK_EVERY = 0.2
STEP_LINE = '{"kind":"step",'
LONGEST_SPARKLINE = 40
# From here on, all but the greatest values would look alike.
STEEP = 30.0
CHECKPOINTS_SHOWN = 8
STORY_SHOWN = 12
FILES_SHOWN = 5
NOUNS = {
    "lost": "lost worker",
    "copied": "copied state",
    "placement": "placement",
    "coordinator": "replaced coordinator",
    "system": "load sample",
    "out_of_memory": "memory shortage",
    "links": "measured link",
    "compression": "measured compression",
    "spans": "worker trace",
    "staleness": "staleness report",
}
USUAL_KINDS = ("step", "evaluation", "checkpoint", "generation")
STORY = frozenset({"generation", "lost", "resize", "coordinator"})
SMALLEST_SHARE = 0.01
DIGEST_SHOWN = 12
_DIGEST = re.compile(r"(?:[a-z0-9-]+:)?([0-9a-f]{32,})")


def show_run(folder: RunFolder, samples: dict[str, Any], as_json: bool) -> None:
    """Print a run; `samples` belongs to its document."""
    ask_ray([folder])
    detail, now = RunDetail.read(folder), datetime.now(UTC)
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, as_typed(detail.record.path))
    if as_json:
        print_document(detail_document(detail, advice, now) | samples)
    else:
        print_run(Page(), detail, advice, now)


def follow_run(
    folder: RunFolder,
    screen: Screen | None = None,
    is_running: Callable[[], bool] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show what a run records from now on, as the command that started it does, until nobody is at work on it."""
    is_running = is_running or (lambda: folder.holder() is not None)
    if not is_running():
        return
    spec, tail = load_recorded(folder.job_file, {}, []).spec, EventTail(folder.events_file)
    workers = spec.workers if isinstance(spec.workers, int) else spec.lanes
    progress = Progress(folder.name, short_path(folder.path), workers, spec.lanes, spec.early_stop)
    lines = tail.read_lines()
    # Of the steps so far the newest only: there may be millions.
    steps = [number for number, line in enumerate(lines) if line.startswith(STEP_LINE)]
    for event in events_in(line for line in lines if not line.startswith(STEP_LINE) or line is lines[steps[-1]]):
        progress.handle(event)
    with closing(Console(screen or Screen(sys.stdout), progress)) as console:
        goes_on = True
        while goes_on:
            goes_on = is_running()  # before the look: what is recorded between the two must not be missed
            for event in tail:
                console.handle(event)
            if goes_on:
                wait(LOOK_EVERY)


def run_report(folder: RunFolder) -> bytes:
    """A run as a page of HTML."""
    # Only here: it draws with numpy, which takes long to import.
    from quorate.history.report.page import report_page

    ask_ray([folder])
    detail, now = RunDetail.read(folder, as_rows=True), datetime.now(UTC)
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, as_typed(detail.record.path))
    return report_page(detail, advice, now).encode()


def print_run(page: Page, detail: RunDetail, advice: Advice | None, now: datetime) -> None:
    """Print all sections that there is something to say in."""
    _print_head(page, detail, advice, now)
    for heading, curves in {"training": loss_curves, "logged": logged_curves, "evaluation": metric_curves}.items():
        if group := curves(detail.timeline):
            page.section(heading)
        for curve in group:
            _print_curve(page, curve)
    _print_checkpoints(page, detail.checkpoints)
    _print_events(page, detail.timeline)
    for placed in detail.timeline.of_kind(BlocksPlaced)[-1:]:
        page.section("servers")
        page.items("placement", _placement(placed))
    if detail.job is not None:
        _print_job(page, detail.job)
    if (timing := detail.timing) is not None:
        derived = {"so heartbeat": timing.heartbeat_every, "lease": timing.lease, "connect": timing.connect}
        seconds = {"failure_timeout": timing.failure_timeout, **derived}
        page.items("timing", [f"{name} {duration(value)}" for name, value in seconds.items()])
    _print_bits(page, detail)
    if detail.record.failure is not None and detail.record.failure.traceback:
        page.section("traceback")
        for line in str(detail.record.failure.traceback).rstrip().splitlines():
            page.screen.print(Text(f"  {line}"), soft_wrap=True)


def _print_head(page: Page, detail: RunDetail, advice: Advice | None, now: datetime) -> None:
    record, failure = detail.record, detail.record.failure
    status = Text(record.status.value, style=STATUS_STYLES[record.status])
    page.title(Text.assemble((record.name, "bold"), "  ", status, f"  {record.progress} steps"))
    # Of a run that is lost, its failure says more than the reason for the status.
    if record.reason and not (record.status is Status.LOST and failure is not None):
        page.row("why", record.reason)
    for problem in detail.problems:
        page.row("problem", problem)
    if failure is not None:
        page.row("failure", Text(str(failure.message), style="red"))
    is_pressing = record.status is not Status.COMPLETE
    if advice is not None and is_pressing:
        _print_advice(page, advice)
    for label, text in _facts(detail, now):
        page.row(label, text)
    if record.weights_digest:
        page.whole("weights", record.weights_digest)
    page.whole("folder", str(record.path.absolute()))
    if advice is not None and not is_pressing:
        _print_advice(page, advice)


def _print_advice(page: Page, advice: Advice) -> None:
    if advice.command is None:
        page.row("next", advice.purpose)
        return
    page.whole("next", Text(advice.command, style="bold"))
    page.row("", Text(advice.purpose, style="dim"))


def _facts(detail: RunDetail, now: datetime) -> Iterator[tuple[str, str]]:
    record = detail.record
    if record.ending and record.ending != record.status:
        yield "ending", record.ending
    yield "created", f"{record.created.astimezone():%Y-%m-%d %H:%M:%S} ({ago(record.age(now))})"
    if took := _duration(detail, now):
        yield took
    yield from _speed(detail)
    if (best := record.best) is not None:
        saved = nearest_saved(best.step, detail.checkpoints)
        instead = "" if saved is None else f"; nearest saved: step {saved:,}"
        where = "" if saved == best.step else f" (not saved{instead})"
        yield "best", f"{best.watched.metric} {measure(best.value)} at step {best.step:,}{where}"
    if record.metrics:
        yield "metrics", "   ".join(f"{name} {measure(value)}" for name, value in record.metrics.items())
    if record.task:
        lanes = plural(record.lanes, "lane") if record.lanes else "its lanes"
        hosts = f" on {plural(record.workers, 'worker')}" if record.workers else ""
        yield "task", f"{short_task(record.task)}, {lanes}{hosts}"
    if detail.job is not None and (links := encryption_in_words(detail.job.spec)):
        yield "links", links
    if detail.source is not None:
        names = [detail.source.main, *sorted(detail.source.files.keys() - {detail.source.main})]
        yield "source", f"kept in source/: {some_of(names, FILES_SHOWN)}"
    if record.launcher is not None:
        listening = f"; its coordinator listens on {detail.address}" if detail.address else ""
        yield "launcher", f"{record.launcher}{listening}"


def encryption_in_words(spec: JobSpec) -> str:
    """What of a job's traffic is encrypted; nothing where none is."""
    if spec.encrypt is False or (spec.encrypt == "auto" and not spec.engine.is_cluster):
        return ""
    if spec.strategy.is_gang:
        return "encrypted with the coordinator; between workers as Gloo or NCCL do it, in the clear"
    return "encrypted" if spec.encrypt is True else "encrypted between hosts, in shared memory on each"


def _speed(detail: RunDetail) -> Iterator[tuple[str, str]]:
    """How fast it is, and what its steps wait for and send."""
    if (pace := RunPace.of(detail.timeline)) is not None:
        shares = [f"{phase} {share:.0%}" for phase, share in pace.shares.items() if share >= SMALLEST_SHARE]
        spent = f" ({', '.join(shares)})" if shares else ""
        yield "speed", f"{count(pace.samples_per_second)} samples/s; {duration(pace.step_seconds)} a step{spent}"
    if told := detail.timeline.of_kind(GradientsCompressed):
        yield "gradients", _compressed(told[-1])
    if audits := detail.record.audits:
        lanes, step = plural(audits.get("lanes", 0), "lane"), audits.get("clean_until")
        yield "audits", f"{lanes} computed twice; no worker was wrong until step {step}"
    last = next((e for e in reversed(detail.timeline.others) if isinstance(e, RunFailed | RunFinished)), None)
    if detail.record.status is Status.COMPLETE and isinstance(last, RunFailed):
        yield "later", f"a resume that was to train further has failed: {last.failure.message}"
    if detail.record.computed_by:
        yield "computed by", detail.record.computed_by
    if detail.record.device_memory:
        yield "memory", detail.record.device_memory
    for short in detail.timeline.of_kind(MemoryRanOut)[-1:]:
        yield "memory", short.sentence
    if advice := detail.advice_on_waiting:
        yield "waiting", waiting_in_words(detail.timeline.waiting.share, advice)


def _compressed(last: GradientsCompressed) -> str:
    """What a step's gradients take, and what the worker of lane 0 sends and receives of them."""
    whole = f"{last.lane_bytes_dense / max(1, last.lane_bytes):.0f} times as much"
    lane = f"{size(last.lane_bytes)} of each lane, {whole} ({size(last.lane_bytes_dense)}) without compression"
    if not last.received_bytes:
        return lane
    if last.received_bytes_dense is None:
        instead = f"{size(last.sent_bytes_dense)} each way without"
    else:
        instead = f"{size(last.sent_bytes_dense)} and {size(last.received_bytes_dense)} without"
    return f"{lane}; a worker sends {size(last.sent_bytes)} a step and receives {size(last.received_bytes)}, {instead}"


def _duration(detail: RunDetail, now: datetime) -> tuple[str, str] | None:
    record, timeline = detail.record, detail.timeline
    parts = timeline.counts.get("run", 0)
    if parts > 1:
        return "took", f"{duration(timeline.active_seconds)} of training, in {parts} parts"
    if record.wall_seconds is not None:
        trained = timeline.active_seconds
        training = f", {duration(trained)} of it training" if 0 < trained < record.wall_seconds else ""
        return "took", f"{duration(record.wall_seconds)}{training}"
    if record.launcher is not None:
        return "takes", f"{duration(record.age(now))} so far"
    if record.ended is None:
        return None
    known = ", as far as is known" if record.status is Status.LOST else ""
    return "took", f"{duration((record.ended - record.created).total_seconds())}{known}"


def _print_curve(page: Page, curve: Curve) -> None:
    if len(curve.steps) == 1:
        page.row(curve.name, measure(curve.first))
        return
    numbers = {"first": curve.first, "last": curve.last, "min": curve.least[1], "max": curve.greatest[1]}
    words = [f"{what} {measure(value)}" for what, value in numbers.items()]
    is_steep = curve.least[1] > 0 and curve.greatest[1] > STEEP * curve.least[1]
    values = [math.log(value) for value in curve.values] if is_steep else curve.values
    room = min(LONGEST_SPARKLINE, page.text_width)
    page.whole(curve.name, Text(sparkline(values, room, blocks_for(page.screen.encoding)), style="cyan"))
    page.items("", [*words, *(["drawn by its logarithm"] if is_steep else [])])


def _print_checkpoints(page: Page, checkpoints: Sequence[CheckpointRecord]) -> None:
    if not checkpoints:
        return
    page.section("checkpoints")
    left_out = len(checkpoints) - CHECKPOINTS_SHOWN
    if left_out > 0:
        page.screen.print(Text(f"  {left_out} older ones; --json has all", style="dim"))
    shown = checkpoints[-CHECKPOINTS_SHOWN:]
    rows = [
        (each.name, size(each.bytes) if each.step is not None else "", Text(each.problem, style="red"))
        for each in shown
    ]
    page.columns(rows if any(each.problem for each in shown) else [row[:2] for row in rows])


def _print_events(page: Page, timeline: Timeline) -> None:
    if not timeline.counts:
        return
    page.section("events")
    rest = sorted(timeline.counts.keys() - {*USUAL_KINDS, "run", "finished"})
    counts = {kind: timeline.counts[kind] for kind in (*USUAL_KINDS, *rest) if kind in timeline.counts}
    page.items("recorded", [plural(number, NOUNS.get(kind, kind)) for kind, number in counts.items()])
    if timeline.redone:
        page.row("", f"{plural(timeline.redone, 'step')} repeated after resuming from a checkpoint")
    if timeline.unreadable_lines:
        page.row("unreadable", f"{plural(timeline.unreadable_lines, 'line')} of events.jsonl")
    story = [event for event in timeline.others if event.kind in STORY]
    if len(story) > STORY_SHOWN:
        page.row("", Text(f"{len(story) - STORY_SHOWN} earlier generations and losses; --json has all", style="dim"))
    for event in story[-STORY_SHOWN:]:
        passed = event.time - (timeline.began or event.time)
        when = f" (after {duration(passed)})" if passed > 0 else ""  # nothing for its first moments
        page.row(event.kind, said_of(event).removeprefix("generation ") + when)
    if (staleness := Staleness.of(timeline.of_kind(StalenessObserved))) is not None:
        page.row("staleness", staleness.in_words())
    if timeline.recoveries:
        page.row("recovered", recovered(timeline.recovered))
    for stop in timeline.of_kind(RunStopped)[-1:]:
        page.row("stop", stop.reason or "")


def _placement(placed: BlocksPlaced) -> list[str]:
    """What each server holds; and what a step sends where nothing is left out."""
    whole = f"{plural(placed.blocks or 0, 'parameter')} of {size(placed.bytes or 0)} in all"
    held = [
        f"{name_of(each.server)} holds {each.blocks} ({size(each.bytes)}), {each.primary} as the first"
        for each in placed.servers
    ]
    sent = f"{size(placed.pushed or 0)} pushed and {size(placed.pulled or 0)} pulled in a step, without compression"
    return [whole, *held, sent]


def _print_job(page: Page, job: ResolvedJob) -> None:
    values = job_values(job)
    for mark, heading in {Mark.MEANING: "job: affects results", Mark.MANNER: "job: runtime only"}.items():
        marked = [each for each in values if each.mark is mark]
        page.section(heading)
        given = [each for each in marked if not each.is_default]
        page.columns([(each.key, write_value(each.value), Text(each.origin, style="dim")) for each in given])
        defaults = [f"{each.key} {write_value(each.value)}" for each in marked if each.is_default]
        page.items("by default", defaults, style="dim")


def _print_bits(page: Page, detail: RunDetail) -> None:
    if not detail.environment:
        return
    page.section("what else the bits depend on")
    matches = {name: _DIGEST.fullmatch(value) for name, value in detail.environment.items()}
    digests = {name: match[1][:DIGEST_SHOWN] for name, match in matches.items() if match is not None}
    facts = {name: value for name, value in detail.environment.items() if name not in digests}
    page.items("machine", [f"{name} {value}" for name, value in facts.items()])
    page.items("digests", [f"{name} {value}" for name, value in digests.items()])
    if detail.identity is not None:
        page.items("identity", [detail.identity.digest[:DIGEST_SHOWN], f"data {detail.identity.data}"])


def draw_curves(run: RunFolder, file: Path, as_json: bool) -> dict[str, str]:
    """Draw the curves of a run's report into a file, and say where."""
    # Only here: it draws with numpy, which takes long to import.
    from quorate.history.report.charts import Plot, check_plot_file, write_plots
    from quorate.history.report.page import curves

    check_plot_file(file)
    drawn = [block for block in curves(RunDetail.read(run, as_rows=True)) if isinstance(block, Plot)]
    if not drawn:
        raise RunError(f"run {run.name} has no step yet, so there is nothing to draw.")
    write_plots([replace(plot, title=f"{run.name}: {plot.title}") for plot in drawn], file)
    if not as_json:
        Page().line(f"{file}: {', '.join(plot.title for plot in drawn)}")
    return {"plot": str(file.absolute())}
