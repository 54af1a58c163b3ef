"""The whole page of a run: one file that needs nothing else."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import version

import numpy as np

from quorate.history.report import tables
from quorate.history.report.charts import Line, Marks, area_chart, bucket_starts, line_chart
from quorate.history.report.history_lines import lane_lines
from quorate.history.report.markup import Content, Html, document, section, tag
from quorate.history.run_detail import Advice, RunDetail
from quorate.history.run_record import Status
from quorate.history.step_rows import LOGGED, PHASES, SAMPLES, SPEED
from quorate.history.timeline import RunPace, Timeline, metric_curves
from quorate.observe.events import RunBegan, WorkerLost
from quorate.observe.quantities import count, duration, measure, plural

MOST_LOGGED = 12
_AREAS = 200
_FOLDED_FROM = 12


def report_page(detail: RunDetail, advice: Advice | None, now: datetime) -> str:
    """A run as HTML. Its timeline must have its steps as rows (`RunDetail.read(run, as_rows=True)`)."""
    record = detail.record
    sections: list[Content] = [_head(detail, advice, now), _failure(detail)]
    sections += [
        section(title, content)
        for title, content in (
            ("Warnings", _warnings(detail)),
            ("Curves", tag("div", list(_curves(detail)), class_="charts") if detail.timeline.counts else None),
            ("Where the time goes", _shares(detail.timeline)),
            ("Generations and lanes", lane_lines(detail.timeline)),
            ("Recoveries", tables.recoveries(detail.timeline.recoveries) if detail.timeline.recoveries else None),
            ("Checkpoints", _checkpoints(detail)),
            ("What happened", _story(detail.timeline)),
            ("Configuration", None if detail.job is None else tables.job(detail.job)),
            ("Environment", tables.environment(detail) if detail.environment or detail.source else None),
        )
        if content
    ]
    made = f"Made by quorate {version('quorate')} on {tables.at_minute(now)} from {record.path.absolute()}"
    return document(f"{record.name} – {record.status.value}", sections, made)


def _head(detail: RunDetail, advice: Advice | None, now: datetime) -> Html:
    record = detail.record
    task = record.task.rpartition("/")[2]
    lanes = plural(record.lanes, "lane") if record.lanes else ""
    hosts = f"{lanes} on {plural(record.workers, 'worker')}" if record.workers and lanes else lanes
    about = " · ".join(each for each in (task, hosts, f"created {tables.at_minute(record.created)}") if each)
    tiles = [
        tag("div", tag("span", name), tag("b", value), tag("em", more)) for name, value, more in _tiles(detail, now)
    ]
    following = None
    if advice is not None:
        command = [tag("code", advice.command), " "] if advice.command else []
        following = tag("p", "Next: ", command, advice.purpose, class_="next")
    weights = (
        tag("p", "weights ", tag("code", record.weights_digest), class_="digest") if record.weights_digest else None
    )
    return tag(
        "header",
        tag("h1", record.name, " ", tag("span", record.status.value, class_=f"status {record.status.value}")),
        tag("p", about, class_="about"),
        tag("p", record.reason, class_="bad") if record.reason and record.failure is None else None,
        _progress(detail),
        tag("div", tiles, class_="tiles"),
        weights,
        following,
    )


def _progress(detail: RunDetail) -> Html | None:
    record = detail.record
    if not record.total_steps:
        return None
    share = min(1.0, record.steps / record.total_steps)
    return tag(
        "div",
        tag("div", tag("i", style=f"width:{100 * share:.1f}%"), class_="bar"),
        tag("span", f"step {record.steps:,} of {record.total_steps:,}"),
        class_="progress",
    )


def _tiles(detail: RunDetail, now: datetime) -> Iterator[tuple[str, str, str]]:
    """What somebody wants to know first: name, value, and what more there is to it."""
    yield from _results(detail)
    record, timeline, pace = detail.record, detail.timeline, RunPace.of(detail.timeline)
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
    if record.best is not None:
        best = record.best
        yield f"best evaluation {best.watched.metric}", measure(best.value), f"at step {best.step:,}"
    for name, value in list(record.metrics.items())[:3]:
        if record.best is None or name != record.best.watched.metric:
            yield f"evaluation {name}", measure(value), "last one"


def _failure(detail: RunDetail) -> Html | None:
    failure = detail.record.failure
    if failure is None:
        return None
    trace = None
    if failure.traceback:
        trace = tag("details", tag("summary", "traceback"), tag("pre", str(failure.traceback).rstrip()), open=True)
    where = "" if failure.step is None else f" at step {failure.step:,}"
    return tag("div", tag("b", f"It failed{where}: "), str(failure.message), trace, class_="failure", role="alert")


def _warnings(detail: RunDetail) -> Html | None:
    found = tables.warnings(detail)
    return tables.table(("where", "what"), found) if found else None


def _curves(detail: RunDetail) -> Iterator[Html]:
    timeline = detail.timeline
    lost = [event.step for event in timeline.of_kind(WorkerLost) if event.step is not None]
    resumed = [event.from_step for event in timeline.of_kind(RunBegan)[1:] if event.from_step is not None]
    at = sorted({*lost, *resumed})
    told = "dotted: a worker was lost, or the run resumed" if at else ""
    gaps = _gaps(timeline)
    if losses := _lines(timeline, "loss"):
        note = f"{plural(len(gaps), 'step')} without a finite loss, marked at the top" if gaps else told
        yield line_chart("Training loss", losses, Marks(at, gaps), note, may_be_log=True)
    elif gaps:
        missing = f"None of {plural(len(gaps), 'step')} has a finite loss."
        yield tag("figure", tag("figcaption", tag("b", "Training loss")), tag("p", missing), class_="chart")
    yield from _metrics(detail, at)
    for title, family in (("Learning rate", "learning_rate"), ("Gradient norm", "gradient_norm")):
        if lines := _lines(timeline, family):
            yield line_chart(title, lines, Marks(at), may_be_log=family == "gradient_norm")
    steps, speeds = timeline.columns.series(SPEED)
    timed = speeds > 0
    if timed.any():
        line = Line.of("samples/s", steps[timed], speeds[timed])
        yield line_chart("Throughput, samples per second", [line], Marks(at), tell=count)
    logged = list(timeline.columns.family(LOGGED.rstrip(".")))
    for name in logged[:MOST_LOGGED]:
        steps, values = timeline.columns.series(name)
        if len(steps):
            own = name.removeprefix(LOGGED)
            yield line_chart(own, [Line.of(own, steps, values)], note="logged by the task")


def _metrics(detail: RunDetail, at: Sequence[int]) -> Iterator[Html]:
    best = detail.record.best
    for curve in metric_curves(detail.timeline):
        is_watched = best is not None and best.watched.metric == curve.name and best.step in curve.steps
        point = (best.step, best.value) if best is not None and is_watched else None
        note = f"circle: the best, {measure(best.value)} at step {best.step:,}" if best is not None and point else ""
        line = Line.of(curve.name, curve.steps, curve.values)
        yield line_chart(f"Evaluation: {curve.name}", [line], Marks(at), note, point, may_be_log="loss" in curve.name)


def _lines(timeline: Timeline, family: str) -> list[Line]:
    found = ((name, *timeline.columns.series(name)) for name in timeline.columns.family(family))
    return [Line.of(name.removeprefix(f"{family}."), steps, values) for name, steps, values in found if len(steps)]


def _gaps(timeline: Timeline) -> list[int]:
    """The steps that have no finite loss."""
    columns = timeline.columns
    missing = np.zeros(len(columns.steps), bool)
    names = list(columns.family("loss"))
    if names:
        missing = ~np.any([np.isfinite(columns.column(name)) for name in names], axis=0)
    return columns.steps[missing].tolist() if names or not len(columns.steps) else []


def _shares(timeline: Timeline) -> Html | None:
    """What the phases of a step take of its time, over the run."""
    columns, pace = timeline.columns, RunPace.of(timeline)
    if pace is None:
        return None
    speed, samples = columns.column(SPEED), columns.column(SAMPLES)
    timed = (speed > 0) & (speed < math.inf) & (samples > 0)
    steps = columns.steps[timed].astype(np.float64)
    whole = samples[timed] / speed[timed]
    spent = [np.nan_to_num(np.maximum(columns.column(f"{phase}_s")[timed], 0.0)) for phase in PHASES]
    starts = bucket_starts(steps, _AREAS) if len(steps) > _AREAS else np.arange(len(steps))
    sums = [np.add.reduceat(each, starts) for each in spent]
    total = np.maximum(np.add.reduceat(whole, starts), np.sum(sums, axis=0))
    total[total == 0] = 1.0
    shares = [each / total for each in sums]
    shares.append(np.maximum(0.0, 1.0 - np.sum(shares, axis=0)))
    at = steps[starts]
    if len(at) == 1:
        at, shares = np.array([at[0], at[0] + 1]), [np.repeat(each, 2) for each in shares]
    parts = {phase: pace.shares.get(phase, 0.0) for phase in PHASES}
    parts["other"] = max(0.0, 1.0 - sum(parts.values()))
    rows = [
        (name, duration(part * pace.step_seconds), f"{part:.1%}", said)
        for (name, part), said in zip(parts.items(), _MEANINGS, strict=True)
    ]
    note = f"{duration(pace.step_seconds)} a step on average"
    chart = area_chart("Shares of the time from one step to the next", parts, at, shares, note)
    return tag("div", chart, tables.table(("phase", "a step", "share", ""), rows, frozenset({1, 2})), class_="charts")


_MEANINGS = (
    "waiting for samples",
    "forward and backward",
    "summing gradients with the others, and waiting for them",
    "the optimizer's update",
    "evaluations, checkpoints, and the rest",
)


def _checkpoints(detail: RunDetail) -> Html | None:
    if not detail.checkpoints and "checkpoint" not in detail.timeline.counts:
        return None
    return tables.checkpoints(detail.checkpoints, detail.timeline)


def _story(timeline: Timeline) -> Html | None:
    rows = tables.story(timeline)
    if not rows:
        return None
    listed = tables.table(("when (UTC)", "step", "what"), rows, frozenset({1}))
    return (
        listed
        if len(rows) <= 12
        else tag("details", tag("summary", plural(len(rows), "entry").replace("entrys", "entries")), listed)
    )
