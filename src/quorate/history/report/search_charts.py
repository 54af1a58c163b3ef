"""Charts of a search as inline SVG: learning curves, parallel coordinates, a Pareto front, who went on from whom."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quorate.checkpoint.retention import is_number
from quorate.history.report.charts import (
    SIDE,
    STEEP,
    Axis,
    Line,
    path_of,
    placed,
    round_numbers,
    short,
    spread,
    x_on,
    y_on,
)
from quorate.history.report.markup import Content, Html, tag
from quorate.history.search_log import TrialStatus
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.observe.quantities import measure
from quorate.spec.space import RANGES, DimensionSpec

LABELLED = 3
MOST_LINES = 300
"""Of one chart: more cannot be told apart, and the best are among them."""
_ROW = 26
"""Pixels of a trial's row."""
_CLOSE = 0.4
"""Of a chart's height: what is closer together is drawn again, enlarged."""
_MOST = 0.7
"""Of the evaluations that are drawn again: without those from when the trials had just begun."""
_NEAR = 0.08
"""Of an axis: what is nearer to its end has no room for its number."""


def short_key(key: str) -> str:
    """A key of the job as a person calls it: params are named by themselves."""
    return key.removeprefix("params.")


def curve_charts(record: SearchRecord) -> Html | None:
    """The first metric of every trial over its steps; those that were stopped are grey, and the best stands out. Beside
    it where it was close: what the better half came to."""
    shown = [trial for trial in _drawn_last_best(record) if trial.curve]
    if not shown:
        return None
    metric, may_be_log = record.objectives[0].metric, record.objectives[0].mode == "min"
    lines = {t.number: Line.of(f"trial {t.number}", *zip(*t.curve, strict=True)) for t in shown}  # type: ignore[arg-type]
    ys = Axis.around(list(lines.values()), may_be_log)
    note = "bold and circled: the best; grey and dashed: stopped early" + ("; logarithmic scale" if ys.is_log else "")
    charts = [_curves(f"{metric} by step", note, record, shown, lines, ys)]
    if near := _enlarged(record, ys):
        charts.append(_curves(f"{metric}, the better half", "the same, enlarged", record, shown, lines, near))
    return tag("div", charts, class_="charts")


def _enlarged(record: SearchRecord, whole: Axis) -> Axis | None:
    """Where the better half of the trials spend most of their steps, if that is a small part of the chart."""
    better = record.ranked[: (len(record.ranked) + 1) // 2]
    values = np.array([value for trial in better for _, value in trial.curve])
    if len(better) < 2 or not len(values):
        return None
    is_min = record.objectives[0].mode == "min"
    least, greatest = np.quantile(values, (0.0, _MOST) if is_min else (1 - _MOST, 1.0)).tolist()
    if not 0 < _place(whole, greatest) - _place(whole, least) < _CLOSE:
        return None
    margin = 0.08 * (greatest - least)
    return Axis(least - margin, greatest + margin)


def _curves(
    title: str, note: str, record: SearchRecord, shown: Sequence[TrialRecord], lines: Mapping[int, Line], ys: Axis
) -> Html:
    best = record.best
    last = max(float(line.xs.max()) for line in lines.values())
    xs = Axis(min(0.0, *(float(line.xs.min()) for line in lines.values())), max(last, 1.0))
    drawn: list[Content] = [tag("path", class_="grid", d=f"M0 {y_on(ys, tick):.1f}H{SIDE}") for tick in ys.ticks()]
    plot: list[Content] = []
    for trial in shown:
        line, style = lines[trial.number], _style(trial, best)
        said = f"trial {trial.number}, {trial.status.value}: {measure(line.last)} at step {int(line.xs[-1]):,}"
        drawn.append(tag("path", tag("title", said), class_=f"trial {style}", d=path_of(xs, ys, line)))
        if (len(line.xs) == 1 or style == "stopped") and ys.least <= line.last <= ys.greatest:
            end = placed(xs, ys, float(line.xs[-1]), line.last)
            plot.append(tag("i", class_=f"end {style}", style=end, title=said))
    if best is not None and best.best is not None:
        plot.append(tag("i", class_="best", style=placed(xs, ys, best.best.step, best.best.value)))
    plot += _ticks(xs, ys)
    labelled = [t for t in record.ranked if t.number in lines and ys.least <= lines[t.number].last <= ys.greatest]
    labelled = labelled[:LABELLED]
    places = spread([y_on(ys, lines[trial.number].last) / 10 for trial in labelled], 14)
    plot += [
        tag(
            "span",
            [tag("span", f"trial {trial.number}"), Html("<br>"), tag("b", measure(lines[trial.number].last))],
            class_=f"label {_style(trial, best)}",
            style=f"top:{place:.1f}%",
        )
        for trial, place in zip(labelled, places, strict=True)
    ]
    return _figure(title, note, drawn, plot, f"{title}, {len(shown)} trials")


def _drawn_last_best(record: SearchRecord) -> list[TrialRecord]:
    """As many as can be drawn, the best on top of all others, and those without a value below."""
    ranked = list(record.ranked[:MOST_LINES])
    numbers = {trial.number for trial in ranked}
    others = [trial for trial in record.trials if trial.number not in numbers][: MOST_LINES - len(ranked)]
    worst_first = ranked[:0:-1]
    stopped = [trial for trial in worst_first if trial.status is TrialStatus.STOPPED]
    trained = [trial for trial in worst_first if trial.status is not TrialStatus.STOPPED]
    return [*others, *stopped, *trained, *ranked[:1]]


def _style(trial: TrialRecord, best: TrialRecord | None) -> str:
    if best is not None and trial.number == best.number:
        return "winner"
    return "stopped" if trial.status is TrialStatus.STOPPED else "other"


@dataclass(frozen=True)
class Scale:
    """An axis of parallel coordinates: where values stand, from 0 at the bottom to 1, and what is written there."""

    title: str
    ticks: Sequence[tuple[float, str]]
    axis: Axis | None = None
    categories: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of_key(cls, key: str, dimension: DimensionSpec | None, values: Sequence[Any]) -> "Scale":
        """By the space: logarithmic, linear, or a place for each of the values that there are."""
        numeric = [value for value in values if is_number(value) and math.isfinite(value)]
        is_range = dimension is not None and dimension.kind in RANGES
        if not is_range and (dimension is not None or len(numeric) < len(values) or not numeric):
            return cls._by_category(key, (dimension.values if dimension is not None else None) or [], values)
        # Population-based training may have moved a value out of its range.
        ends = [*numeric, *([dimension.low, dimension.high] if dimension is not None and is_range else [])]
        is_log = dimension is not None and dimension.is_log and min(ends) > 0
        axis = Axis(float(min(ends)), float(max(ends)), is_log and max(ends) > min(ends))
        return cls(short_key(key), _with_ends(axis), axis, note="log" if axis.is_log else "")

    @classmethod
    def _by_category(cls, key: str, known: Sequence[Any], values: Sequence[Any]) -> "Scale":
        found = list({repr(value): value for value in (*known, *values)}.values())
        if all(is_number(value) for value in found):
            found.sort()
        names = tuple(repr(value) for value in found)
        places = [0.5] if len(names) == 1 else [0.04 + 0.92 * at / (len(names) - 1) for at in range(len(names))]
        said = [short(value) if is_number(value) else str(value) for value in found]
        return cls(short_key(key), list(zip(places, said, strict=True)), categories=names)

    @classmethod
    def of_metric(cls, metric: str, values: Sequence[float], may_be_log: bool) -> "Scale":
        """From the least to the greatest value."""
        least, greatest = min(values), max(values)
        axis = Axis(least, greatest, may_be_log and least > 0 and greatest > STEEP * least)
        return cls(metric, _with_ends(axis), axis, note="log" if axis.is_log else "")

    def place(self, value: Any) -> float | None:
        """None where a trial has no such value."""
        if self.axis is None:
            name = repr(value)
            return self.ticks[self.categories.index(name)][0] if name in self.categories else None
        return _place(self.axis, value) if is_number(value) and math.isfinite(value) else None


def _with_ends(axis: Axis) -> list[tuple[float, str]]:
    """The two ends, and the round numbers between them that have room."""
    ends = [(_place(axis, end), short(end)) for end in dict.fromkeys((axis.least, axis.greatest))]
    between = [(_place(axis, tick), short(tick)) for tick in axis.ticks(4)]
    return [*ends, *(tick for tick in between if _NEAR < tick[0] < 1 - _NEAR)]


def _place(axis: Axis, value: float) -> float:
    if axis.least == axis.greatest:
        return 0.5
    return float(np.clip(axis.place(np.array([float(value)]))[0], 0.0, 1.0))


def parallel_coordinates(record: SearchRecord) -> Html | None:
    """A line for each trial through its params to its metrics: the better, the stronger."""
    trials = record.ranked[:MOST_LINES]
    if not trials or not record.keys:
        return None
    scales = [
        Scale.of_key(key, record.space.get(key), [t.params[key] for t in trials if key in t.params])
        for key in record.keys
        if any(key in trial.params for trial in trials)
    ]
    keys = [key for key in record.keys if any(key in trial.params for trial in trials)]
    metrics = [
        Scale.of_metric(each.metric, [trial.values[at] for trial in trials], each.mode == "min")
        for at, each in enumerate(record.objectives)
    ]
    every = [*scales, *metrics]
    apart = SIDE / max(1, len(every) - 1)
    drawn: list[Content] = [tag("path", class_="axis", d=f"M{at * apart:.1f} 0V{SIDE}") for at in range(len(every))]
    for place, trial in reversed(list(enumerate(trials))):
        held = [*(trial.params.get(key) for key in keys), *trial.values]
        heights = [scale.place(value) for scale, value in zip(every, held, strict=True)]
        points = [f"{at * apart:.1f} {SIDE * (1 - up):.1f}" for at, up in enumerate(heights) if up is not None]
        # Only the best are strong: of many, half would cover the rest.
        share = (1 - place / max(1, len(trials) - 1)) ** 3
        said = f"trial {trial.number}: " + ", ".join(
            [*(f"{short_key(key)} {measure(trial.params.get(key))}" for key in keys)]
            + [f"{each.metric} {measure(value)}" for each, value in zip(record.objectives, trial.values, strict=True)]
        )
        style = "winner" if place == 0 else "other"
        way, good = f"M{'L'.join(points)}", f"--good:{share:.2f}"
        drawn.append(tag("path", tag("title", said), class_=f"way {style}", d=way, style=good))
    plot: list[Content] = []
    for at, scale in enumerate(every):
        left = f"left:{at * apart / 10:.2f}%"
        title = [tag("b", scale.title), tag("span", scale.note) if scale.note else None]
        plot.append(tag("span", title, class_="axis-name", style=left, title=scale.title))
        plot += [
            tag("span", said, class_="tick on", style=f"{left};top:{100 * (1 - up):.1f}%") for up, said in scale.ticks
        ]
    note = "a line is a trial; strong: good, orange: the best"
    return _figure("Parallel coordinates", note, drawn, plot, "", "coordinates", least_width=110 * len(every))


def pareto_chart(record: SearchRecord) -> Html | None:
    """The first two metrics of all trials; the line goes along the front."""
    if len(record.objectives) < 2 or not record.ranked:
        return None
    first, second = record.objectives[:2]
    one, two = ([trial.values[at] for trial in record.ranked] for at in (0, 1))
    xs, ys = _around(one, first.mode == "min"), _around(two, second.mode == "min")
    front = sorted(record.front, key=lambda trial: trial.values[0])
    drawn: list[Content] = [tag("path", class_="grid", d=f"M0 {y_on(ys, tick):.1f}H{SIDE}") for tick in ys.ticks()]
    corners = [f"{x_on(xs, t.values[0]):.1f} {y_on(ys, t.values[1]):.1f}" for t in front]
    drawn.append(tag("path", class_="front", d=f"M{'L'.join(corners)}"))
    numbers = {trial.number for trial in front}
    plot: list[Content] = []
    # The front last: it lies over the others.
    for trial in sorted(record.ranked, key=lambda trial: trial.number in numbers):
        on_it = trial.number in numbers
        where = placed(xs, ys, trial.values[0], trial.values[1])
        said = f"trial {trial.number}: {measure(trial.values[0])}, {measure(trial.values[1])}"
        plot.append(tag("i", class_="dot front" if on_it else "dot", style=where, title=said))
    names = front if len(front) <= 12 else front[:: 1 + len(front) // 12]
    plot += [
        tag("span", str(t.number), class_="dot-name", style=placed(xs, ys, t.values[0], t.values[1])) for t in names
    ]
    plot += _ticks(xs, ys, only_whole=False)
    plot.append(tag("span", f"{first.metric} →", class_="x-name"))
    note = f"{first.metric} to the right, {second.metric} upwards; orange: no other trial is better in both"
    return _figure(f"{second.metric} against {first.metric}", note, drawn, plot, "", "scatter")


def lineage_chart(record: SearchRecord) -> Html | None:
    """A row for each trial of population-based training; where it went on from another's checkpoint, a line leads up or
    down from that one's row. The way to the best is orange."""
    trials = record.trials[:MOST_LINES]
    last = max((part.step for trial in trials for part in trial.parts), default=0)
    if not record.has_exploited or not last:
        return None
    xs = Axis(0.0, float(last))
    rows = {trial.number: SIDE * (at + 0.5) / len(trials) for at, trial in enumerate(trials)}
    drawn: list[Content] = []
    for trial in trials:
        y = rows[trial.number]
        for part in trial.parts:
            drawn.append(_stretch(xs, part.from_step, part.step, y, "life"))
            if part.donor in rows:
                drawn.append(_leap(xs, part.from_step, rows[part.donor], y, "life leap"))
    if (best := record.best) is not None and best.number in rows:
        drawn += _way_to(best, xs, rows)
    plot: list[Content] = [
        tag("span", f"trial {trial.number}", class_="tick y", style=f"top:{rows[trial.number] / 10:.2f}%")
        for trial in trials
    ]
    plot += [
        tag("span", short(tick), class_="tick x", style=f"left:{x_on(xs, tick) / 10:.1f}%")
        for tick in round_numbers(0.0, float(last), 5)
    ]
    plot += [
        tag(
            "i",
            class_="end",
            style=f"left:{x_on(xs, part.from_step) / 10:.2f}%;top:{rows[trial.number] / 10:.2f}%",
            title=f"trial {trial.number} continues from trial {part.donor} at step {part.from_step:,}",
        )
        for trial in trials
        for part in trial.parts
        if part.donor is not None
    ]
    ended = {trial.number: trial.best for trial in trials}
    plot += [
        tag("span", tag("b", measure(value.value)), class_="label", style=f"top:{rows[number] / 10:.2f}%")
        for number, value in ended.items()
        if value is not None
    ]
    return _figure(
        "Which trial continued from which", "orange: the way to the best", drawn, plot, "", "family", _ROW * len(trials)
    )


def _way_to(best: TrialRecord, xs: Axis, rows: dict[int, float]) -> list[Content]:
    drawn: list[Content] = []
    begin = 0
    numbers = [*(ancestor.trial for ancestor in best.lineage), best.number]
    for ancestor, child in zip(best.lineage, numbers[1:], strict=True):
        if ancestor.trial in rows and child in rows:
            drawn.append(_stretch(xs, begin, ancestor.until, rows[ancestor.trial], "life winner"))
            drawn.append(_leap(xs, ancestor.until, rows[ancestor.trial], rows[child], "life winner"))
        begin = ancestor.until
    return [*drawn, _stretch(xs, begin, best.parts[-1].step, rows[best.number], "life winner")]


def _stretch(xs: Axis, begin: int, end: int, y: float, style: str) -> Html:
    return tag("path", class_=style, d=f"M{x_on(xs, begin):.1f} {y:.1f}H{x_on(xs, end):.1f}")


def _leap(xs: Axis, step: int, above: float, below: float, style: str) -> Html:
    return tag("path", class_=style, d=f"M{x_on(xs, step):.1f} {above:.1f}V{below:.1f}")


def _around(values: Sequence[float], may_be_log: bool) -> Axis:
    least, greatest = min(values), max(values)
    if may_be_log and least > 0 and greatest > STEEP * least:
        return Axis(least / 1.3, greatest * 1.3, True)
    margin = 0.06 * (greatest - least) or abs(least) * 0.1 or 1.0
    return Axis(least - margin, greatest + margin)


def _ticks(xs: Axis, ys: Axis, only_whole: bool = True) -> list[Content]:
    down = [tag("span", short(tick), class_="tick y", style=f"top:{y_on(ys, tick) / 10:.1f}%") for tick in ys.ticks()]
    along = [
        tag("span", short(tick), class_="tick x", style=f"left:{x_on(xs, tick) / 10:.1f}%")
        for tick in (xs.ticks() if xs.is_log else round_numbers(xs.least, xs.greatest, 5))
        if not only_whole or tick == int(tick)
    ]
    return [*down, *along]


def _figure(
    title: str,
    note: str,
    drawn: Sequence[Content],
    plot: Sequence[Content],
    spoken: str,
    kind: str = "",
    height: int | None = None,
    least_width: int = 0,
) -> Html:
    """Words stand beside the drawing, since they are not stretched; with a `least_width` it is scrolled on a phone."""
    picture = tag("svg", drawn, viewBox=f"0 0 {SIDE} {SIDE}", preserveAspectRatio="none")
    style = None if height is None else f"height:{height}px"
    frame = tag(
        "div", [picture, *plot], class_=f"plot {kind}".rstrip(), role="img", aria_label=spoken or title, style=style
    )
    if least_width:
        frame = tag("div", tag("div", frame, style=f"min-width:{least_width}px"), class_="sideways")
    return tag("figure", tag("figcaption", tag("b", title), tag("span", note)), frame, class_="chart")
