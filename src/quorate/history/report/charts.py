"""Curves as a picture: lines, marks and words over two axes, as SVG by hand or as PNG by Pillow.

Each line has its name and its last value in its colour. Very many points are drawn as their means, with a band from
least to greatest. What is put into SVG or HTML is escaped wherever it is not known to be markup.
"""

import html
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.observe.quantities import measure
from quorate.storage.atomic import write_atomically

# What no document may hold, and what a terminal would take for a colour.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | Iterable["Content"] | None


def tag(name: str, *children: Content, **attributes: str | float | bool | None) -> Html:
    """An element. `class_` stands for class, `stroke_width` for stroke-width; what is None or False is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    told = "".join(
        f" {key}" if value is True else f' {key}="{_escaped(str(value))}"'
        for key, value in given.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{told}>{_markup(children)}</{name}>")


def _escaped(plain: str) -> str:
    return html.escape(_CONTROL.sub("\ufffd", plain), quote=True)


def _markup(child: Content) -> str:
    if child is None or isinstance(child, Html):
        return child or ""
    return _escaped(child) if isinstance(child, str) else "".join(map(_markup, child))


MOST_POINTS = 400
"""Of a line: a screen has hardly more, and a page with a dozen charts stays small."""
STEEP = 30.0
WIDTH, HEIGHT = 800, 450
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 780, 56, 400
_KEYS = 540
"""Where the names of lines begin."""
_COLOURS = ("#0b6cb8", "#b8560b", "#2e8540", "#7b3fa0", "#a01f3c", "#5c5c5c")
_DASHES = (None, "7 4", "2 4", "10 4 2 4", "14 5", "4 2")
"""Lines differ in their dashes as well, for a page in black and white."""
_GRID, _INK, _PALE = "#e4e4e4", "#222222", "#777777"
_MARKED = 40
"""A line of so few points shows them."""
_NAMED = 5
"""So many lines have their names in a chart."""
_MARKS_SHOWN = 60
_SHARP, _SMOOTH = 2, 2
"""A PNG has so many pixels for each of the picture's, and is drawn so many times as large, for smooth edges."""
KINDS = (".svg", ".png")

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """A number by step. Where it was `thinned`, `ys` are means and `low` and `high` what they are the means of. Without
    a name it is not told of beside the chart."""

    name: str
    xs: Numbers
    ys: Numbers
    low: Numbers
    high: Numbers
    last: float
    is_thinned: bool
    colour: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        xs: Sequence[float] | NDArray[Any],
        ys: Sequence[float] | Numbers,
        most: int = MOST_POINTS,
        colour: str = "",
    ) -> "Line":
        """From at least one point; all are finite."""
        steps, values = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
        if len(steps) <= 2 * most:
            return cls(name, steps, values, values, values, float(values[-1]), False, colour)
        # Equal spans of steps; those without a step are left out.
        starts = np.unique(np.searchsorted(steps, np.linspace(steps[0], steps[-1], most + 1)[:-1]))
        counts = np.diff(np.append(starts, len(steps)))
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        # Divided first: the sum of large numbers can be infinite where their mean is not.
        # And between the two ends: of equal numbers the mean is the same, to the last bit.
        means = np.clip(np.add.reduceat(values / np.repeat(counts, counts), starts), low, high)
        middle = np.add.reduceat(steps / np.repeat(counts, counts), starts)
        # The line begins and ends where the run does.
        middle[0], middle[-1] = steps[0], steps[-1]
        return cls(name, middle, means, low, high, float(values[-1]), True, colour)


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
        least, greatest = float(min([*ends, *also])), float(max([*ends, *also]))
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
class Plot:
    """Lines over a common axis, and points to be pointed at: what to call each, its x and its y. Dotted lines stand at
    `marks`. `x_ends` are those of the axis, if not those of the lines and points. Where there are `x_labels`, they
    stand at 0, 1, 2, … and nothing else is numbered."""

    title: str
    x_name: str
    lines: Sequence[Line]
    points: Sequence[tuple[str, float, float]] = ()
    y_may_be_log: bool = False
    x_ends: tuple[float, float] | None = None
    marks: Sequence[float] = ()
    note: str = ""
    x_labels: Sequence[str] = ()


def check_plot_file(file: Path) -> None:
    """Refuse what cannot be written, before anything is done that takes long."""
    if file.suffix.lower() not in KINDS:
        raise RequestError(f"{file}: name a file that ends in {' or '.join(KINDS)}.")
    if not file.absolute().parent.is_dir():
        raise RequestError(f"{file}: there is no folder {file.parent}.")
    if file.suffix.lower() == ".png":
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise RequestError(
                f"{file}: a PNG is drawn by Pillow, which is not installed: {install_of('pictures')}. Or name a file "
                "that ends in .svg."
            ) from None


def write_plots(plots: Sequence[Plot], file: Path) -> None:
    """Draw them into a file, by the ending of its name, two in a row."""
    check_plot_file(file)
    columns = min(2, len(plots))
    width, height = columns * WIDTH, -(-len(plots) // columns) * HEIGHT
    drawn = [
        mark.moved(number % columns * WIDTH, number // columns * HEIGHT)
        for number, plot in enumerate(plots)
        for mark in _marks(plot)
    ]
    is_svg = file.suffix.lower() == ".svg"
    content = _svg(drawn, width, height).encode() if is_svg else _png(drawn, width, height)
    try:
        write_atomically(file, content)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}.") from None


def inline_svg(plot: Plot) -> Html:
    """A plot as an element of a page."""
    return _svg(list(_marks(plot)), WIDTH, HEIGHT, role="img", aria_label=plot.title)


class Stroke(NamedTuple):
    """A line through points; an area between them where it `is_filled`."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    is_filled: bool = False
    dashes: str | None = None

    def moved(self, x: float, y: float) -> "Stroke":
        return self._replace(points=tuple((left + x, top + y) for left, top in self.points))


class Dot(NamedTuple):
    """A point to be seen."""

    x: float
    y: float
    radius: float
    colour: str

    def moved(self, x: float, y: float) -> "Dot":
        return self._replace(x=self.x + x, y=self.y + y)


class Words(NamedTuple):
    """A text that begins, has its middle or ends at a place: "l", "m" or "r"."""

    text: str
    x: float
    y: float
    anchor: str = "l"
    size: int = 12
    colour: str = _INK

    def moved(self, x: float, y: float) -> "Words":
        return self._replace(x=self.x + x, y=self.y + y)


Mark = Stroke | Dot | Words


def _marks(plot: Plot) -> Iterator[Mark]:
    xs, ys = _axes(plot)
    yield Words(plot.title, _LEFT, 22, size=16)
    log = "logarithmic scale" if ys.is_log else ""
    if note := "; ".join(filter(None, (plot.note, log))):
        yield Words(note, _LEFT, 42, colour=_PALE)
    for tick in () if plot.x_labels else ys.ticks():
        at = float(_y(ys, np.array([tick]))[0])
        yield Stroke(((_LEFT, at), (_RIGHT, at)), _GRID)
        yield Words(short(tick), _LEFT - 8, at, "r", colour=_PALE)
    for tick, said in enumerate(plot.x_labels) if plot.x_labels else ((tick, short(tick)) for tick in xs.ticks()):
        at = float(_x(xs, np.array([tick]))[0])
        yield Stroke(((at, _TOP if plot.x_labels else _BOTTOM), (at, _BOTTOM + 5)), _PALE)
        yield Words(said, at, _BOTTOM + 16, "m", colour=_PALE)
    yield Stroke(((_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)), _PALE)
    yield Words(plot.x_name, (_LEFT + _RIGHT) / 2, HEIGHT - 14, "m", colour=_PALE)
    # So few that they can be told apart.
    for at in _x(xs, np.array(plot.marks[:: 1 + len(plot.marks) // _MARKS_SHOWN], np.float64)).tolist():
        if _LEFT <= at <= _RIGHT:
            yield Stroke(((at, _TOP), (at, _BOTTOM)), _PALE, dashes="2 4")
    named = [line for line in plot.lines if line.name]
    for line in plot.lines:
        number = named.index(line) if line.name else 0
        style = line.colour or _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        yield from _line(xs, ys, line, *style)
        # The first names stand above the lines, further ones below each other.
        if line.name and number < _NAMED:
            place = 22 + 16 * number
            yield Stroke(((_KEYS, place), (_KEYS + 24, place)), style[0], 2, dashes=style[1])
            said = line.name if plot.x_labels else f"{line.name}  {measure(line.last)}"
            yield Words(said, _KEYS + 30, place, colour=style[0])
    for name, x, y in plot.points:
        left, top = float(_x(xs, np.array([x]))[0]), float(_y(ys, np.array([y]))[0])
        yield Dot(left, top, 5, _COLOURS[1])
        if name:
            yield Words(name, left, top - 14, "m")


def _line(xs: Axis, ys: Axis, line: Line, colour: str, dashes: str | None) -> Iterator[Mark]:
    at = _x(xs, line.xs).tolist()
    if line.is_thinned:
        there = zip(at, _y(ys, line.high).tolist(), strict=True)
        back = zip(reversed(at), reversed(_y(ys, line.low).tolist()), strict=True)
        yield Stroke((*there, *back), _pale(colour), is_filled=True)
    points = tuple(zip(at, _y(ys, line.ys).tolist(), strict=True))
    yield Stroke(points, colour, 2, dashes=dashes)
    if len(points) <= _MARKED:
        yield from (Dot(x, y, 3, colour) for x, y in points)


def _pale(colour: str) -> str:
    """A fifth of it on white: not every viewer of pictures knows of opacity."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) // 5:02x}" for part in parts)


def _axes(plot: Plot) -> tuple[Axis, Axis]:
    xs = [float(x) for line in plot.lines for x in (line.xs.min(), line.xs.max())] + [x for _, x, _ in plot.points]
    ys = Axis.around(plot.lines, plot.y_may_be_log, [y for _, _, y in plot.points])
    return Axis(*(plot.x_ends or (min(xs), max(*xs, min(xs) + 1)))), ys


def _x(axis: Axis, values: Numbers) -> Numbers:
    return _LEFT + axis.place(values) * (_RIGHT - _LEFT)


def _y(axis: Axis, values: Numbers) -> Numbers:
    return _BOTTOM - np.clip(axis.place(values), -0.02, 1.02) * (_BOTTOM - _TOP)


def _svg(drawn: Sequence[Mark], width: int, height: int, **attributes: str) -> Html:
    inner: list[Html] = [tag("rect", width=width, height=height, fill="white")]
    for mark in drawn:
        match mark:
            case Stroke():
                path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in mark.points)
                fill = {"fill": mark.colour} if mark.is_filled else {"fill": "none", "stroke": mark.colour}
                inner.append(tag("path", d=path, stroke_width=mark.width, stroke_dasharray=mark.dashes, **fill))
            case Dot():
                inner.append(tag("circle", cx=f"{mark.x:.1f}", cy=f"{mark.y:.1f}", r=mark.radius, fill=mark.colour))
            case Words():
                anchor = {"l": "start", "m": "middle", "r": "end"}[mark.anchor]
                place = {"x": f"{mark.x:.1f}", "y": f"{mark.y + 0.35 * mark.size:.1f}", "text_anchor": anchor}
                inner.append(tag("text", mark.text, font_size=mark.size, fill=mark.colour, **place))
    group = tag("g", inner, font_family="sans-serif", stroke_linejoin="round")
    return tag("svg", group, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", **attributes)


def _png(drawn: Sequence[Mark], width: int, height: int) -> bytes:
    from PIL import Image, ImageDraw

    scale = _SHARP * _SMOOTH
    picture = Image.new("RGB", (scale * width, scale * height), "white")
    pen = ImageDraw.Draw(picture)
    for mark in drawn:
        match mark:
            case Stroke():
                points = [(scale * x, scale * y) for x, y in mark.points]
                if mark.is_filled:
                    pen.polygon(points, fill=mark.colour)
                else:
                    pen.line(points, fill=mark.colour, width=round(scale * mark.width), joint="curve")
            case Dot():
                pen.circle((scale * mark.x, scale * mark.y), scale * mark.radius, fill=mark.colour)
            case Words():
                place = (scale * mark.x, scale * mark.y)
                size = scale * mark.size
                pen.text(place, mark.text, fill=mark.colour, anchor=f"{mark.anchor}m", font_size=size)
    content = io.BytesIO()
    picture.reduce(_SMOOTH).save(content, "PNG")
    return content.getvalue()
