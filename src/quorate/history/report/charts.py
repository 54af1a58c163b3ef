"""Curves as inline SVG, for a screen of any width: lines are stretched with their figure, words are not.

Lines differ in their dashes as well as in colour, and each has its name and its last value beside its end, so that a
page in black and white tells the same. Very many points are drawn as their means, with a band from least to greatest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorate.history.report.markup import Content, Html, tag
from quorate.observe.quantities import measure

MOST_POINTS = 400
"""Of a line: a screen has hardly more, and a page with a dozen charts stays small."""
STEEP = 30.0
SIDE = 1000
"""Of the square that lines are drawn in before it is stretched."""
_LABEL_APART = 8.5
"""Per cent of a chart's height that one label needs."""
_MARKED = 40
_MARKS_SHOWN = 60
_SMALLEST_SHARE = 0.005

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A number by step. Where it was `thinned`, `ys` are means and `low` and `high` what they are the means of."""

    name: str
    xs: Numbers
    ys: Numbers
    low: Numbers
    high: Numbers
    last: float
    is_thinned: bool

    @classmethod
    def of(
        cls, name: str, xs: Sequence[float] | NDArray[Any], ys: Sequence[float] | Numbers, most: int = MOST_POINTS
    ) -> "Line":
        """From at least one point; all are finite."""
        steps, values = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
        if len(steps) <= 2 * most:
            return cls(name, steps, values, values, values, float(values[-1]), False)
        starts = bucket_starts(steps, most)
        counts = np.diff(np.append(starts, len(steps)))
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        # Divided first: the sum of large numbers can be infinite where their mean is not.
        # And between the two ends: of equal numbers the mean is the same, to the last bit.
        means = np.clip(np.add.reduceat(values / np.repeat(counts, counts), starts), low, high)
        middle = np.add.reduceat(steps / np.repeat(counts, counts), starts)
        # The line begins and ends where the run does.
        middle[0], middle[-1] = steps[0], steps[-1]
        return cls(name, middle, means, low, high, float(values[-1]), True)


def bucket_starts(steps: Numbers, most: int) -> NDArray[np.intp]:
    """Where each of so many equal spans of steps begins; those without a step are left out."""
    edges = np.linspace(steps[0], steps[-1], most + 1)[:-1]
    return np.unique(np.searchsorted(steps, edges))


@dataclass(frozen=True)
class Axis:
    """From the least to the greatest number, perhaps by its logarithm."""

    least: float
    greatest: float
    is_log: bool = False

    @classmethod
    def around(cls, lines: Sequence[Line], may_be_log: bool, also: Sequence[float] = ()) -> "Axis":
        """With all lines on it, and some points. Outliers of what the lines are the means of may lie outside."""
        ends = [line.ys.min() for line in lines] + [line.ys.max() for line in lines]
        ends += [np.quantile(line.low, 0.02) for line in lines] + [np.quantile(line.high, 0.98) for line in lines]
        least, greatest = float(min(*ends, *also)), float(max(*ends, *also))
        if may_be_log and least > 0 and greatest > STEEP * least:
            return cls(least, greatest, True)
        span = greatest - least
        margin = (0.04 * span or abs(least) * 0.1 or 1.0) if span < math.inf else 0.0
        # From zero where that is near: a curve that ends at it should be seen to.
        floor = 0.0 if 0 <= least < 0.4 * greatest else least - margin
        return cls(floor, greatest + margin)

    def place(self, values: Numbers) -> Numbers:
        """From 0 at the least to 1 at the greatest."""
        low, high, at = self.least, self.greatest, values
        if self.is_log:
            low, high = math.log(low), math.log(high)
            at = np.log(np.maximum(values, self.least * 1e-3))
        # Halved: from the least to the greatest number may be further than numbers go.
        return (at / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers on it."""
        if self.is_log:
            first, last = math.floor(math.log10(self.least)), math.ceil(math.log10(self.greatest))
            wide = last - first > 2
            found = [base * 10.0**power for power in range(first, last + 1) for base in ((1,) if wide else (1, 2, 5))]
            on_it = [tick for tick in found if self.least <= tick <= self.greatest]
            return on_it[:: 1 + len(on_it) // (most + 2)]
        return round_numbers(self.least, self.greatest, most)


def round_numbers(least: float, greatest: float, most: int) -> list[float]:
    """At most so many round numbers between two, equally far from each other."""
    span = greatest - least
    if not 0 < span < math.inf:
        return [least]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 1e-300 else 1e-300
    apart = next(power * step for step in (1, 2, 5, 10) if power * step >= rough)
    first = math.ceil(least / apart)
    found = (number * apart for number in range(first, first + most + 2))
    return [number for number in found if least <= number <= greatest] or [least]


def short(value: float) -> str:
    """A number on an axis: 250k, 1.5M, 0.02."""
    if value == 0:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.2g}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Marks:
    """What else stands on the axis of steps: where workers were lost, and steps without a finite number."""

    losses: Sequence[int] = ()
    gaps: Sequence[int] = ()


NO_MARKS = Marks()


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Marks = NO_MARKS,
    note: str = "",
    best: tuple[int, float] | None = None,
    tell: Callable[[float], str] = measure,
    may_be_log: bool = False,
) -> Html:
    """Lines over the steps of a run; `best` is a point to be pointed at. Where it `may_be_log`, what spans orders of
    magnitude is drawn by its logarithm."""
    xs = Axis(
        float(min(line.xs[0] for line in lines)),
        float(max(max(line.xs[-1] for line in lines), min(line.xs[0] for line in lines) + 1)),
    )
    ys = Axis.around(lines, may_be_log, [] if best is None else [best[1]])
    drawn: list[Content] = [tag("path", class_="grid", d=f"M0 {y_on(ys, tick):.1f}H{SIDE}") for tick in ys.ticks()]
    drawn += [
        tag("path", class_="mark", d=f"M{x_on(xs, step):.1f} 0V{SIDE}")
        for step in _some(marks.losses)
        if xs.least <= step <= xs.greatest
    ]
    drawn += [tag("path", class_="gap", d=f"M{x_on(xs, step):.1f} 0v45") for step in _some(marks.gaps)]
    for number, line in enumerate(lines):
        style = f"line-{number % 6}"
        if line.is_thinned:
            drawn.append(tag("path", class_=f"band {style}", d=_band(xs, ys, line)))
        drawn.append(tag("path", class_=f"line {style}", d=path_of(xs, ys, line)))
    plot: list[Content] = [
        tag("svg", drawn, viewBox=f"0 0 {SIDE} {SIDE}", preserveAspectRatio="none", aria_hidden="true")
    ]
    for number, line in enumerate(lines):
        if len(line.xs) <= _MARKED:
            plot += [
                tag("i", class_=f"point line-{number % 6}", style=placed(xs, ys, x, y))
                for x, y in zip(line.xs.tolist(), line.ys.tolist(), strict=True)
            ]
    if best is not None:
        plot.append(tag("i", class_="best", style=placed(xs, ys, *best), title=f"best: {tell(best[1])}"))
    plot += [tag("span", short(tick), class_="tick y", style=f"top:{y_on(ys, tick) / 10:.1f}%") for tick in ys.ticks()]
    plot += [
        tag("span", short(tick), class_="tick x", style=f"left:{x_on(xs, tick) / 10:.1f}%")
        for tick in round_numbers(xs.least, xs.greatest, 5)
        if tick == int(tick)
    ]
    plot += _labels(ys, lines, tell)
    notes = [note, "logarithmic scale" if ys.is_log else ""]
    notes.append("line: mean, band: min to max" if any(line.is_thinned for line in lines) else "")
    told = "; ".join(each for each in notes if each)
    first, last = lines[0].xs[0], lines[0].xs[-1]
    spoken = ", ".join(f"{line.name} from {tell(float(line.ys[0]))} to {tell(line.last)}" for line in lines)
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", told) if told else None),
        tag("div", plot, class_="plot", role="img", aria_label=f"steps {first:,.0f} to {last:,.0f}: {spoken}"),
        class_="chart",
    )


def area_chart(title: str, parts: Mapping[str, float], xs: Numbers, shares: Sequence[Numbers], note: str) -> Html:
    """Shares of a whole over the steps, one on the other, each with its name and its part of the run beside it, but for
    those that are next to nothing."""
    axis = Axis(float(xs[0]), float(max(xs[-1], xs[0] + 1)))
    left = [x_on(axis, float(x)) for x in xs]
    below = np.zeros(len(xs))
    drawn: list[Content] = []
    labels: list[tuple[int, float, str]] = []
    for number, ((name, part), share) in enumerate(zip(parts.items(), shares, strict=True)):
        if part < _SMALLEST_SHARE:
            continue
        above = below + share
        edge = [f"{x:.1f} {SIDE * (1 - y):.1f}" for x, y in zip(left, above, strict=True)]
        back = [f"{x:.1f} {SIDE * (1 - y):.1f}" for x, y in zip(reversed(left), below[::-1], strict=True)]
        drawn.append(tag("path", class_=f"area area-{number}", d=f"M{'L'.join(edge + back)}Z"))
        end = float((below[-1] + above[-1]) / 2)
        labels.append((number, end, f"{name} {part:.1%}"))
        below = above
    drawn += [tag("path", class_="grid over", d=f"M0 {SIDE * (1 - tick):.0f}H{SIDE}") for tick in (0.25, 0.5, 0.75)]
    places = spread([100 * (1 - end) for _, end, _ in labels])
    plot: list[Content] = [
        tag("svg", drawn, viewBox=f"0 0 {SIDE} {SIDE}", preserveAspectRatio="none", aria_hidden="true"),
        [tag("span", f"{tick:.0%}", class_="tick y", style=f"top:{100 * (1 - tick):.0f}%") for tick in (0, 0.5, 1)],
        [
            tag("span", short(tick), class_="tick x", style=f"left:{x_on(axis, tick) / 10:.1f}%")
            for tick in round_numbers(axis.least, axis.greatest, 5)
            if tick == int(tick)
        ],
        [
            tag("span", tag("i", class_=f"key area-{number}"), said, class_="label", style=f"top:{place:.1f}%")
            for place, (number, _, said) in zip(places, labels, strict=True)
        ],
    ]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", note)),
        tag("div", plot, class_="plot", role="img", aria_label=", ".join(said for _, _, said in labels)),
        class_="chart",
    )


def spread(places: Sequence[float], apart: float = _LABEL_APART) -> list[float]:
    """The same places, moved so far that no two are nearer than that, in the same order."""
    order = sorted(range(len(places)), key=lambda each: places[each])
    moved = [places[each] for each in order]
    for place in range(1, len(moved)):
        moved[place] = max(moved[place], moved[place - 1] + apart)
    over = max(0.0, moved[-1] - 98) if moved else 0.0
    for place in range(len(moved) - 1, -1, -1):
        limit = 98.0 if place == len(moved) - 1 else moved[place + 1] - apart
        moved[place] = min(moved[place], limit) if over else moved[place]
    return [moved[order.index(each)] for each in range(len(places))]


def _labels(ys: Axis, lines: Sequence[Line], tell: Callable[[float], str]) -> list[Html]:
    apart = _LABEL_APART * (2 if len(lines) > 1 else 1)
    places = spread([min(100.0, max(0.0, y_on(ys, float(line.ys[-1])) / 10)) for line in lines], apart)
    return [
        tag(
            "span",
            tag("svg", tag("path", class_=f"line line-{number % 6}", d="M0 5H24"), class_="key", viewBox="0 0 24 10")
            if len(lines) > 1
            else None,
            [tag("span", line.name), Html("<br>")] if len(lines) > 1 else None,
            tag("b", tell(line.last)),
            class_="label",
            style=f"top:{place:.1f}%",
        )
        for number, (line, place) in enumerate(zip(lines, places, strict=True))
    ]


def x_on(axis: Axis, value: float) -> float:
    """How far to the right of the square a value stands."""
    return float(axis.place(np.array([value]))[0]) * SIDE


def y_on(axis: Axis, value: float) -> float:
    """How far down a value stands."""
    return (1 - float(axis.place(np.array([value]))[0])) * SIDE


def placed(xs: Axis, ys: Axis, x: float, y: float) -> str:
    """The style of an element that stands at a point, also when the square is stretched."""
    return f"left:{x_on(xs, x) / 10:.2f}%;top:{y_on(ys, y) / 10:.2f}%"


def _points(xs: Axis, ys: Axis, at: Numbers, values: Numbers) -> list[str]:
    left, top = xs.place(at) * SIDE, np.clip((1 - ys.place(values)) * SIDE, -SIDE, 2 * SIDE)
    return [f"{x:.1f} {y:.1f}" for x, y in zip(left.tolist(), top.tolist(), strict=True)]


def path_of(xs: Axis, ys: Axis, line: Line) -> str:
    """A line as SVG draws it."""
    points = _points(xs, ys, line.xs, line.ys)
    return "M" + "L".join(points) + ("h0.1" if len(points) == 1 else "")


def _band(xs: Axis, ys: Axis, line: Line) -> str:
    there = _points(xs, ys, line.xs, line.high)
    back = _points(xs, ys, line.xs[::-1], line.low[::-1])
    return f"M{'L'.join(there + back)}Z"


def _some(steps: Sequence[int]) -> Sequence[int]:
    """So few that they can be told apart."""
    return steps[:: 1 + len(steps) // _MARKS_SHOWN]
