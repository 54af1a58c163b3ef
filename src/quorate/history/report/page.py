"""The report of a run."""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np

from quorate.core.generation import name_of
from quorate.history.report.charts import Line, Plot
from quorate.history.report.layout import Block, Command, Report, Table, Words, as_html, at_minute
from quorate.history.run_detail import Advice, RunDetail, job_values, said_of
from quorate.history.run_record import Status, moment
from quorate.history.step_rows import LOGGED, PHASES, SAMPLES, SPEED
from quorate.history.timeline import RunPace, Timeline, metric_curves
from quorate.observe import events
from quorate.observe.quantities import count, duration, measure, plural, size
from quorate.observe.recoveries import Recovery
from quorate.spec.keys import Mark
from quorate.spec.resolved import ResolvedJob
from quorate.spec.yaml_document import write_value

MOST_LOGGED = 12
_TO_THE_SECOND = len("2026-01-01T00:00:00")
_MEANINGS = {
    "data": "waiting for samples",
    "compute": "forward and backward",
    "exchange": "summing gradients with the others, and waiting for them",
    "apply": "the optimizer's update",
    "other": "evaluations, checkpoints, and the rest",
}


def report_page(detail: RunDetail, advice: Advice | None, now: datetime) -> str:
    """A run as HTML. Its timeline must have its steps as rows (`RunDetail.read(run, as_rows=True)`)."""
    record, timeline = detail.record, detail.timeline
    lanes = plural(record.lanes, "lane") if record.lanes else ""
    hosts = f"{lanes} on {plural(record.workers, 'worker')}" if record.workers and lanes else lanes
    about = (record.task.rpartition("/")[2], hosts, f"created {at_minute(record.created)}")
    sections: tuple[tuple[str, Sequence[Block]], ...] = (
        ("Warnings", _table(("where", "what"), _warnings(detail))),
        ("Curves", list(curves(detail))),
        ("Where the time goes", _shares(timeline)),
        ("Recoveries", _recoveries(timeline.recoveries)),
        ("Checkpoints", list(_checkpoints(detail))),
        ("What happened", _table(("when (UTC)", "step", "what"), _story(timeline), (1,))),
        ("Configuration", [] if detail.job is None else job_tables(detail.job)),
        ("Environment", _table(("what", "value"), _environment(detail))),
    )
    report = Report(
        record.name,
        record.status.value,
        " · ".join(filter(None, about)),
        list(_facts(detail, now)),
        list(_head(detail, advice)),
        [(title, blocks) for title, blocks in sections if blocks],
    )
    return as_html(report, record.path, now)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: tuple[int, ...] = ()) -> list[Block]:
    return [Table(headings, rows, numbers)] if rows else []


def job_tables(resolved: ResolvedJob) -> list[Block]:
    """Every value of a job with where it was said; what is as usual is folded away."""
    values = job_values(resolved)

    def rows(is_default: bool) -> list[Sequence[str]]:
        return [
            (each.key, write_value(each.value), each.origin, "changes the bits" if each.mark is Mark.MEANING else "")
            for each in values
            if each.is_default is is_default
        ]

    headings = ("key", "value", "said in", "")
    return [Table(headings, rows(False)), Table(headings, rows(True), folded=f"{len(rows(True))} defaults")]


def _head(detail: RunDetail, advice: Advice | None) -> Iterator[Block]:
    record, failure = detail.record, detail.record.failure
    if failure is not None:
        where = "" if failure.step is None else f" at step {failure.step:,}"
        yield Words(f"It failed{where}: {failure.message}", "bad")
        if failure.traceback:
            yield Words(str(failure.traceback), "code")
    elif record.reason:
        yield Words(record.reason, "bad")
    if record.weights_digest:
        yield Words(f"weights {record.weights_digest}")
    if advice is not None:
        yield Command(advice.command, advice.purpose) if advice.command else Words(f"Next: {advice.purpose}")


def _facts(detail: RunDetail, now: datetime) -> Iterator[tuple[str, str, str]]:
    record, timeline, pace = detail.record, detail.timeline, RunPace.of(detail.timeline)
    if record.total_steps:
        share = min(1.0, record.steps / record.total_steps)
        yield "progress", f"{share:.0%}", f"step {record.steps:,} of {record.total_steps:,}"
    yield from _results(detail)
    if pace is not None:
        yield "speed", f"{count(pace.samples_per_second)}/s", f"samples; {duration(pace.step_seconds)} a step"
    if timeline.active_seconds:
        parts = timeline.counts.get("run", 0)
        whole = f"{duration(record.wall_seconds)} with start-up" if record.wall_seconds is not None else ""
        yield "training time", duration(timeline.active_seconds), f"in {parts} parts" if parts > 1 else whole
    if timeline.recoveries:
        total = timeline.recovered
        yield "recoveries", f"{total.times:,}", f"stood still for {duration(total.seconds)}"
    if record.status is Status.RUNNING:
        if pace is not None and record.total_steps:
            yield "left", duration((record.total_steps - record.steps) * pace.step_seconds), "at this speed"
        yield "age", duration(record.age(now)), "and still running"


def _results(detail: RunDetail) -> Iterator[tuple[str, str, str]]:
    record, columns = detail.record, detail.timeline.columns
    for name in list(columns.family("loss"))[:2]:
        _, values = columns.series(name)
        if len(values):
            yield f"training {name}", measure(float(values[-1])), f"last step; min {measure(float(values.min()))}"
    if (best := record.best) is not None:
        yield f"best evaluation {best.watched.metric}", measure(best.value), f"at step {best.step:,}"
    for name, value in list(record.metrics.items())[:3]:
        if best is None or name != best.watched.metric:
            yield f"evaluation {name}", measure(value), "last one"


def curves(detail: RunDetail) -> Iterator[Block]:
    """What there is to draw of a run whose timeline has its steps as rows."""
    timeline, columns = detail.timeline, detail.timeline.columns
    if not timeline.counts:
        return
    lost = [event.step for event in timeline.of_kind(events.WorkerLost) if event.step is not None]
    resumed = [event.from_step for event in timeline.of_kind(events.RunBegan)[1:] if event.from_step is not None]
    at = sorted({*lost, *resumed})
    gaps = _steps_without_loss(timeline)
    note = "dotted: a worker was lost, or the run resumed" if at else ""
    if losses := _lines(timeline, "loss"):
        note = f"{plural(gaps, 'step')} without a finite loss" if gaps else note
        yield Plot("Training loss", "step", losses, y_may_be_log=True, marks=at, note=note)
    elif gaps:
        yield Words(f"Training loss: none of {plural(gaps, 'step')} has a finite loss.", "bad")
    best = detail.record.best
    for curve in metric_curves(timeline):
        line, is_loss = Line.of(curve.name, curve.steps, curve.values), "loss" in curve.name
        is_watched = best is not None and best.watched.metric == curve.name and best.step in curve.steps
        points = [(f"best: {measure(best.value)}", best.step, best.value)] if best is not None and is_watched else []
        yield Plot(f"Evaluation: {curve.name}", "step", [line], points, y_may_be_log=is_loss, marks=at)
    for title, family in (("Learning rate", "learning_rate"), ("Gradient norm", "gradient_norm")):
        if lines := _lines(timeline, family):
            yield Plot(title, "step", lines, y_may_be_log=family == "gradient_norm", marks=at)
    steps, speeds = columns.series(SPEED)
    timed = speeds > 0
    if timed.any():
        line = Line.of("samples/s", steps[timed], speeds[timed])
        yield Plot("Throughput, samples per second", "step", [line], marks=at)
    for name in list(columns.family(LOGGED.rstrip(".")))[:MOST_LOGGED]:
        steps, values = columns.series(name)
        if len(steps):
            own = name.removeprefix(LOGGED)
            yield Plot(own, "step", [Line.of(own, steps, values)], note="logged by the task")


def _lines(timeline: Timeline, family: str) -> list[Line]:
    found = ((name, *timeline.columns.series(name)) for name in timeline.columns.family(family))
    return [Line.of(name.removeprefix(f"{family}."), steps, values) for name, steps, values in found if len(steps)]


def _steps_without_loss(timeline: Timeline) -> int:
    columns = timeline.columns
    names = list(columns.family("loss"))
    return int((~np.any([np.isfinite(columns.column(name)) for name in names], axis=0)).sum()) if names else 0


def _shares(timeline: Timeline) -> list[Block]:
    """What the phases of a step take of its time, over the run."""
    if (pace := RunPace.of(timeline)) is None:
        return []
    parts = {phase: pace.shares.get(phase, 0.0) for phase in PHASES}
    parts["other"] = max(0.0, 1.0 - math.fsum(parts.values()))
    rows = [(name, duration(part * pace.step_seconds), f"{part:.1%}", _MEANINGS[name]) for name, part in parts.items()]
    columns = timeline.columns
    speed, samples = columns.column(SPEED), columns.column(SAMPLES)
    timed = (speed > 0) & (speed < math.inf) & (samples > 0)
    steps, whole = columns.steps[timed], samples[timed] / speed[timed]
    spent = {phase: np.clip(np.nan_to_num(columns.column(f"{phase}_s")[timed] / whole), 0, 1) for phase in PHASES}
    lines = [Line.of(phase, steps, shares) for phase, shares in spent.items() if shares.any()]
    chart = [Plot("Shares of a step's time", "step", lines)] if lines else []
    return [*chart, Table(("phase", "a step", "share", ""), rows, (1, 2))]


def _recoveries(told: Sequence[Recovery]) -> list[Block]:
    rows = [
        (
            f"{each.step:,}",
            name_of(each.worker),
            each.cause,
            duration(each.detect_s + each.reform_s + (each.first_step_s or 0.0)),
            duration(each.detect_s),
            duration(each.reform_s),
            duration(each.copy_s) if each.copy_s else "–",
            "–" if each.first_step_s is None else duration(each.first_step_s),
            "–" if each.refill_s is None else duration(each.refill_s),
            f"{each.steps_lost:,}",
        )
        for each in told
    ]
    headings = ("step", "who", "what happened", "training stood still", "detect", "re-form", "copy")
    return _table((*headings, "first step", "refill", "steps lost"), rows, (0, 3, 4, 5, 6, 7, 8, 9))


def _checkpoints(detail: RunDetail) -> Iterator[Block]:
    """Those that are there now, and what all saves took."""
    if saved := detail.timeline.of_kind(events.CheckpointSaved):
        took = [each.seconds for each in saved if each.seconds is not None]
        added = sum(each.added_s or 0.0 for each in saved)
        told = f"{plural(len(saved), 'checkpoint')} saved"
        told += f", each in {duration(sum(took) / len(took))} on average" if took else ""
        told += f"; training waited {duration(added)} for them in all" if added else ""
        yield Words(f"{told}.")
    rows = [
        (
            each.name,
            size(each.bytes) if each.step is not None else "",
            each.created[:_TO_THE_SECOND].replace("T", " "),
            ", ".join(f"{name} {measure(value)}" for name, value in each.metrics.items()),
            each.problem,
        )
        for each in reversed(detail.checkpoints)
    ]
    yield from _table(("kept now", "size", "saved", "metrics", "problem"), rows, (1,))


def _environment(detail: RunDetail) -> list[tuple[str, str]]:
    """What else the bits depend on."""
    rows = list(detail.environment.items())
    if detail.source is not None:
        names = [detail.source.main, *sorted(detail.source.files.keys() - {detail.source.main})]
        rows.append(("source", ", ".join(names)))
    return rows


def _warnings(detail: RunDetail) -> list[tuple[str, str]]:
    """Everything that somebody should know, with where it was: of the files first, then in the order of the run."""
    found = [("", problem) for problem in detail.problems]
    if lines := detail.timeline.unreadable_lines:
        found.append(("events.jsonl", f"{plural(lines, 'line')} cannot be read"))
    if advice := detail.advice_on_waiting:
        found.append(("data", f"{detail.timeline.waiting.share:.0%} of the time of a step is spent waiting: {advice}"))
    told = sorted(_told(detail.timeline), key=lambda each: each[0])
    return [*found, *((where, what) for _, where, what in told)]


def _told(timeline: Timeline) -> Iterator[tuple[float, str, str]]:
    for step in timeline.noted:
        where = f"step {step.step:,}"
        for warning in step.warnings:
            yield step.time, where, warning
        if step.skipped is not None:
            lanes = ", ".join(str(lane) for lane in step.skipped.lanes)
            yield step.time, where, f"skipped: the loss was not finite (lanes {lanes})"
    for event in timeline.others:
        if said := _trouble(event):
            yield event.time, "" if event.step is None else f"step {event.step:,}", said


def _trouble(event: object) -> str:
    match event:
        case events.LogMessage(message=str(message)) if event.level != "info":
            return message
        case events.CheckpointFailed() | events.CheckpointSkipped():
            return f"no checkpoint: {event.reason or 'no reason was given'}"
        case events.CopyFailed():
            return f"checkpoint {event.checkpoint} was not copied to {event.place}: {event.reason}"
        case events.MemoryRanOut():
            return event.sentence
        case events.RolledBack():
            return "back to this step: what follows it is trained again"
    return ""


def _story(timeline: Timeline) -> list[tuple[str, str, str]]:
    """What happened, beside steps, evaluations and checkpoints: when, and in words."""
    rows = []
    for event in timeline.others:
        if said := said_of(event):
            at = moment(event.time)
            when = "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
            rows.append((when, "" if event.step is None else f"{event.step:,}", said))
    return rows
