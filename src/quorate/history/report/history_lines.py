"""Generations, lanes and what happened to a run, on one line of time for each worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quorate.core.generation import name_of
from quorate.history.report.charts import round_numbers
from quorate.history.report.markup import Content, Html, tag
from quorate.history.step_rows import TIME
from quorate.history.timeline import Timeline
from quorate.observe.events import CheckpointSaved, GenerationFormed, WorkerLost
from quorate.observe.quantities import duration, plural

MOST_WORKERS = 64
_MOST_MARKS = 120
_WIDE_ENOUGH = 9.0
"""Per cent of the line: what is narrower has no room for its lanes' numbers."""
_NARROWEST = 0.15
_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))


@dataclass(frozen=True)
class Hosting:
    """A worker hosts the same lanes from one time to another, in a share of the whole line."""

    worker: int
    lanes: tuple[int, ...]
    begin: float
    end: float


def hostings_of(timeline: Timeline) -> list[Hosting]:
    """Who hosted which lanes when. A part of a run ends with its last event, and the next begins with a generation."""
    formed = timeline.of_kind(GenerationFormed)
    ended = timeline.ended or 0.0
    times = np.sort(np.append(timeline.columns.column(TIME), [event.time for event in timeline.others]))
    hostings: list[Hosting] = []
    for number, event in enumerate(formed):
        following = formed[number + 1] if number + 1 < len(formed) else None
        end = ended if following is None else following.time
        if following is not None and following.incarnation != event.incarnation:
            # Another launcher: nobody was at work from the last event of the part until then.
            before = int(np.searchsorted(times, following.time)) - 1
            end = float(times[before]) if before >= 0 else event.time
        for member in event.computing:
            hostings.append(Hosting(member.worker, member.lanes, event.time, max(event.time, end)))
    return list(_merged(hostings))


def _merged(hostings: Sequence[Hosting]) -> Iterator[Hosting]:
    """One instead of several that follow each other with the same lanes."""
    for worker in sorted({hosting.worker for hosting in hostings}):
        last: Hosting | None = None
        for hosting in (each for each in hostings if each.worker == worker):
            if last is not None and last.lanes == hosting.lanes and last.end == hosting.begin:
                last = replace(last, end=hosting.end)
                continue
            if last is not None:
                yield last
            last = hosting
        if last is not None:
            yield last


def lane_lines(timeline: Timeline) -> Html | None:
    """A line of time for each worker, and one for checkpoints; None where no generation was formed."""
    hostings = hostings_of(timeline)
    if not hostings:
        return None
    begin = min(timeline.began or hostings[0].begin, min(hosting.begin for hosting in hostings))
    whole = max((timeline.ended or begin) - begin, max(hosting.end for hosting in hostings) - begin, 1e-3)
    workers = sorted({hosting.worker for hosting in hostings})
    lost = timeline.of_kind(WorkerLost)
    rows: list[Content] = []
    for worker in workers[:MOST_WORKERS]:
        bars = [_bar(hosting, begin, whole) for hosting in hostings if hosting.worker == worker]
        crosses = [
            tag("i", "✕", class_="lost", style=f"left:{100 * (event.time - begin) / whole:.2f}%", title=event.message)
            for event in lost
            if event.worker == worker
        ]
        rows.append(_row(f"{name_of(worker)}", [*bars, *crosses[-_MOST_MARKS:]]))
    if len(workers) > MOST_WORKERS:
        rows.append(tag("p", f"and {plural(len(workers) - MOST_WORKERS, 'more worker')}"))
    saved = timeline.of_kind(CheckpointSaved)
    if saved:
        shown = saved[:: 1 + len(saved) // _MOST_MARKS]
        ticks = [tag("i", class_="saved", style=f"left:{100 * (each.time - begin) / whole:.2f}%") for each in shown]
        rows.append(_row("saves", ticks))
    axis = [tag("span", said, class_="tick x", style=f"left:{100 * tick / whole:.1f}%") for tick, said in _times(whole)]
    rows.append(_row("", axis))
    return tag("div", rows, class_="lines")


def _row(name: str, content: Sequence[Content]) -> Html:
    return tag("div", tag("span", name, class_="who"), tag("div", content, class_="track"), class_="row")


def _bar(hosting: Hosting, begin: float, whole: float) -> Html:
    left, width = 100 * (hosting.begin - begin) / whole, max(_NARROWEST, 100 * (hosting.end - hosting.begin) / whole)
    said = lanes_in_words(hosting.lanes)
    return tag(
        "i",
        said if width >= _WIDE_ENOUGH else None,
        class_=f"bar lanes-{min(4, len(hosting.lanes))}",
        style=f"left:{left:.2f}%;width:{width:.2f}%",
        title=f"{said}, {duration(hosting.end - hosting.begin)}",
    )


def lanes_in_words(lanes: Sequence[int]) -> str:
    """A worker hosts lanes that follow each other."""
    if not lanes:
        return "no lane"
    return f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]}–{lanes[-1]}"


def _times(whole: float) -> list[tuple[float, str]]:
    """Round times up to the whole of it, all in one unit."""
    unit, name = next((each for each in _UNITS if whole >= 2 * each[0]), (1.0, "s"))
    return [(tick * unit, f"{tick:.4g} {name}") for tick in round_numbers(0, whole / unit, 6)]
