"""Tables and lists of a report: recoveries, checkpoints, the job, the environment, warnings."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from quorate.core.generation import name_of
from quorate.history.checkpoint_list import CheckpointRecord
from quorate.history.report.history_lines import lanes_in_words
from quorate.history.report.markup import Content, Html, tag
from quorate.history.run_detail import RunDetail, job_values
from quorate.history.run_record import moment
from quorate.history.timeline import Timeline
from quorate.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    CoordinatorReplaced,
    CopyFailed,
    GenerationFormed,
    LogMessage,
    MemoryRanOut,
    Resized,
    RolledBack,
    RunBegan,
    RunFailed,
    RunStopped,
    WorkerLost,
)
from quorate.observe.quantities import duration, measure, plural, size
from quorate.observe.recoveries import Recovery, brief
from quorate.spec.keys import Mark
from quorate.spec.resolved import ResolvedJob
from quorate.spec.yaml_document import write_value

MOST_ROWS = 200
_MEMBERS_SHOWN = 16
_TO_THE_SECOND = len("2026-01-01T00:00:00")
_PARTS = (("detect_s", "detect"), ("reform_s", "re-form"), ("first_step_s", "first step"))


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    numbers: frozenset[int] = frozenset(),
    is_flowing: bool = False,
) -> Html:
    """With as many rows as can be looked at; columns of `numbers` end at the right. Where it `is_flowing`, cells that
    find no room on a phone stand below the others."""
    head = tag("tr", [tag("th", each, class_="number" if at in numbers else None) for at, each in enumerate(headings)])
    shown = rows[:MOST_ROWS]
    body = [
        tag("tr", [tag("td", cell, class_="number" if at in numbers else None) for at, cell in enumerate(row)])
        for row in shown
    ]
    left = len(rows) - len(shown)
    more = tag("p", f"and {left:,} more; quorate show --json has all", class_="more") if left > 0 else None
    whole = tag("table", tag("thead", head), tag("tbody", body), class_="flowing" if is_flowing else None)
    return tag("div", whole, more, class_="table")


def recoveries(told: Sequence[Recovery]) -> Html:
    """Each with its parts; the bar shows how long training stood still."""
    longest = max((_still(each) for each in told), default=0.0) or 1.0
    rows = [
        (
            f"{each.step:,}",
            name_of(each.worker).replace(" ", "\u00a0"),
            each.cause,
            tag("div", _bar(each, longest), class_="parts"),
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
    return table((*headings, "first step", "refill", "steps lost"), rows, frozenset({0, 4, 5, 6, 7, 8, 9}))


def _still(recovery: Recovery) -> float:
    return recovery.detect_s + recovery.reform_s + (recovery.first_step_s or 0.0)


def _bar(recovery: Recovery, longest: float) -> list[Content]:
    parts: list[Content] = []
    for number, (name, said) in enumerate(_PARTS):
        seconds = getattr(recovery, name) or 0.0
        if seconds:
            width = f"width:{60 * seconds / longest:.1f}%"
            parts.append(tag("i", class_=f"part-{number}", style=width, title=f"{said} {duration(seconds)}"))
    return [*parts, tag("span", duration(_still(recovery)))]


def checkpoints(kept: Sequence[CheckpointRecord], timeline: Timeline) -> Html:
    """Those that are there now, and what all saves took."""
    saved = timeline.of_kind(CheckpointSaved)
    took = [each.seconds for each in saved if each.seconds is not None]
    added = sum(each.added_s or 0.0 for each in saved)
    told = f"{plural(len(saved), 'checkpoint')} saved"
    told += f", each in {duration(sum(took) / len(took))} on average" if took else ""
    told += f"; training waited {duration(added)} for them in all" if added else ""
    rows = [
        (
            each.name,
            size(each.bytes) if each.step is not None else "",
            each.created[:_TO_THE_SECOND].replace("T", " "),
            ", ".join(f"{name} {measure(value)}" for name, value in each.metrics.items()),
            tag("span", each.problem, class_="bad") if each.problem else "",
        )
        for each in reversed(kept)
    ]
    has_problem = any(each.problem for each in kept)
    headings = ("kept now", "size", "saved", "metrics", "problem")
    columns = len(headings) if has_problem else len(headings) - 1
    listed = table(headings[:columns], [row[:columns] for row in rows], frozenset({1})) if rows else None
    return tag("div", tag("p", f"{told}.") if saved else None, listed)


def job(resolved: ResolvedJob) -> Html:
    """Every value with where it was said; what is as usual is folded away."""
    values = job_values(resolved)

    def rows(chosen_default: bool) -> list[Sequence[Content]]:
        return [
            (
                tag("code", each.key),
                tag("code", write_value(each.value)),
                each.origin,
                "changes the bits" if each.mark is Mark.MEANING else "",
            )
            for each in values
            if each.is_default is chosen_default
        ]

    headings = ("key", "value", "said in", "")
    return tag(
        "div",
        table(headings, rows(False), is_flowing=True),
        tag(
            "details",
            tag("summary", f"{len(rows(True))} keys have their default"),
            table(headings, rows(True), is_flowing=True),
        ),
    )


def environment(detail: RunDetail) -> Html:
    """What else the bits depend on."""
    rows = [(name, tag("code", value)) for name, value in detail.environment.items()]
    if detail.source is not None:
        names = [detail.source.main, *sorted(detail.source.files.keys() - {detail.source.main})]
        rows.append(("source", tag("code", ", ".join(names))))
    return table(("what", "value"), rows, is_flowing=True)


def warnings(detail: RunDetail) -> list[tuple[str, str]]:
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
        where = "" if event.step is None else f"step {event.step:,}"
        match event:
            case LogMessage(message=str(message)) if event.level != "info":
                yield event.time, where, message
            case CheckpointFailed() | CheckpointSkipped():
                yield event.time, where, f"no checkpoint: {event.reason or 'no reason was given'}"
            case CopyFailed():
                yield (
                    event.time,
                    where,
                    f"checkpoint {event.checkpoint} was not copied to {event.place}: {event.reason}",
                )
            case MemoryRanOut():
                yield event.time, where, event.sentence
            case RolledBack():
                yield event.time, where, "back to this step: what follows it is trained again"


def story(timeline: Timeline) -> list[Sequence[Content]]:
    """What happened, beside steps, evaluations and checkpoints: when, and in words."""
    return [
        (_when(event.time), "" if event.step is None else f"{event.step:,}", said)
        for event in timeline.others
        if (said := _said(event))
    ]


def _said(event: object) -> str:
    said = ""
    match event:
        case RunBegan():
            total = f" of {event.total_steps:,}" if event.total_steps else ""
            said = f"training begins after step {event.from_step or 0:,}{total}"
        case GenerationFormed():
            members = event.computing
            hosts = "; ".join(f"worker {each.worker} {lanes_in_words(each.lanes)}" for each in members[:_MEMBERS_SHOWN])
            beside = f", {plural(len(event.servers), 'server')}" if event.servers else ""
            beside = f" ({event.mesh})" if event.mesh else beside
            said = f"generation {event.generation}, {plural(len(members), 'worker')}{beside}: {hosts}"
        case WorkerLost():
            said = brief(event.message or "a worker is lost")
        case Resized():
            said = f"asked to continue with {event.said}"
        case CoordinatorReplaced():
            said = f"another coordinator took over; {event.present} workers came back to it"
        case RunStopped():
            said = f"stopped: {event.reason or ''}"
        case RunFailed():
            said = f"failed: {event.failure.message}"
    return said


def _when(time: float) -> str:
    at = moment(time)
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def at_minute(time: datetime) -> str:
    """A moment for people, in the zone in which it is read nearly everywhere alike."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
