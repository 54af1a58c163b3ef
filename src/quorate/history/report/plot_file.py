"""Curves as a picture of their own: an SVG by hand, or a PNG by Pillow, of the same marks."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.history.report.charts import Axis, Line, Numbers, short
from quorate.history.report.markup import Html, tag
from quorate.observe.quantities import measure
from quorate.storage.atomic import write_atomically

WIDTH, HEIGHT = 800, 450
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 780, 56, 400
_COLOURS = ("#0b6cb8", "#b8560b", "#2e8540", "#7b3fa0", "#a01f3c", "#5c5c5c")
_GRID, _INK, _PALE = "#e4e4e4", "#222222", "#777777"
_MARKED = 40
"""A line of so few points shows them."""
_SHARP, _SMOOTH = 2, 2
"""A PNG has so many pixels for each of the picture's, and is drawn so many times as large, for smooth edges."""
KINDS = (".svg", ".png")


@dataclass(frozen=True)
class Plot:
    """Lines over a common axis, and points to be pointed at: what to call each, its x and its y. `x_ends` are those of
    the axis, if not those of the lines."""

    title: str
    x_name: str
    lines: Sequence[Line]
    points: Sequence[tuple[str, float, float]] = ()
    x_is_log: bool = False
    y_may_be_log: bool = False
    x_ends: tuple[float, float] | None = None


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


def write_plot(plot: Plot, file: Path) -> None:
    """Draw it into a file, by the ending of its name."""
    write_plots([plot], file)


def write_plots(plots: Sequence[Plot], file: Path) -> None:
    """The same of several, two in a row."""
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


class Stroke(NamedTuple):
    """A line through points; an area between them where it `is_filled`."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    is_filled: bool = False

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
    for tick in ys.ticks():
        at = float(_y(ys, np.array([tick]))[0])
        yield Stroke(((_LEFT, at), (_RIGHT, at)), _GRID)
        yield Words(short(tick), _LEFT - 8, at, "r", colour=_PALE)
    for tick in xs.ticks():
        at = float(_x(xs, np.array([tick]))[0])
        yield Stroke(((at, _BOTTOM), (at, _BOTTOM + 5)), _PALE)
        yield Words(short(tick), at, _BOTTOM + 16, "m", colour=_PALE)
    yield Stroke(((_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)), _PALE)
    yield Words(plot.x_name, (_LEFT + _RIGHT) / 2, HEIGHT - 14, "m", colour=_PALE)
    for number, line in enumerate(plot.lines):
        yield from _line(xs, ys, line, _COLOURS[number % len(_COLOURS)])
    # The first names stand above the lines, further ones below each other.
    for number, line in enumerate(plot.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        yield Words(f"{line.name}  {measure(line.last)}", _RIGHT, 22 + 16 * number, "r", colour=colour)
    for name, x, y in plot.points:
        left, top = float(_x(xs, np.array([x]))[0]), float(_y(ys, np.array([y]))[0])
        yield Dot(left, top, 5, _COLOURS[1])
        yield Words(name, left, top - 14, "m")


def _line(xs: Axis, ys: Axis, line: Line, colour: str) -> Iterator[Mark]:
    at = _x(xs, line.xs).tolist()
    if line.is_thinned:
        there = zip(at, _y(ys, line.high).tolist(), strict=True)
        back = zip(reversed(at), reversed(_y(ys, line.low).tolist()), strict=True)
        yield Stroke((*there, *back), _pale(colour), is_filled=True)
    points = tuple(zip(at, _y(ys, line.ys).tolist(), strict=True))
    yield Stroke(points, colour, 2)
    if len(points) <= _MARKED:
        yield from (Dot(x, y, 3, colour) for x, y in points)


def _pale(colour: str) -> str:
    """A fifth of it on white: not every viewer of pictures knows of opacity."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) // 5:02x}" for part in parts)


def _axes(plot: Plot) -> tuple[Axis, Axis]:
    least, greatest = plot.x_ends or (
        float(min(line.xs.min() for line in plot.lines)),
        float(max(line.xs.max() for line in plot.lines)),
    )
    return Axis(least, greatest, plot.x_is_log), Axis.around(
        plot.lines, plot.y_may_be_log, [y for _, _, y in plot.points]
    )


def _x(axis: Axis, values: Numbers) -> Numbers:
    return _LEFT + axis.place(values) * (_RIGHT - _LEFT)


def _y(axis: Axis, values: Numbers) -> Numbers:
    return _BOTTOM - np.clip(axis.place(values), -0.02, 1.02) * (_BOTTOM - _TOP)


def _svg(drawn: Sequence[Mark], width: int, height: int) -> Html:
    inner: list[Html] = [tag("rect", width=width, height=height, fill="white")]
    for mark in drawn:
        match mark:
            case Stroke():
                path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in mark.points)
                fill = {"fill": mark.colour} if mark.is_filled else {"fill": "none", "stroke": mark.colour}
                inner.append(tag("path", d=path, stroke_width=mark.width, **fill))
            case Dot():
                inner.append(tag("circle", cx=f"{mark.x:.1f}", cy=f"{mark.y:.1f}", r=mark.radius, fill=mark.colour))
            case Words():
                anchor = {"l": "start", "m": "middle", "r": "end"}[mark.anchor]
                place = {"x": f"{mark.x:.1f}", "y": f"{mark.y + 0.35 * mark.size:.1f}", "text_anchor": anchor}
                inner.append(tag("text", mark.text, font_size=mark.size, fill=mark.colour, **place))
    group = tag("g", inner, font_family="sans-serif", stroke_linejoin="round")
    return tag("svg", group, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}")


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
