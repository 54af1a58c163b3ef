"""Curves as a picture of their own: an SVG by hand, or a PNG by Pillow."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quorate.core.errors import RequestError
from quorate.history.report.charts import Axis, Line, Numbers, short
from quorate.history.report.markup import Html, tag
from quorate.storage.atomic import write_atomically

WIDTH, HEIGHT = 800, 450
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 780, 50, 400
_COLOURS = ("#0b6cb8", "#b8560b", "#2e8540", "#7b3fa0", "#a01f3c", "#5c5c5c")
_GRID, _INK = "#dddddd", "#222222"
KINDS = (".svg", ".png")


@dataclass(frozen=True)
class Plot:
    """Lines over a common axis, and points to be pointed at: what to call each, its x and its y."""

    title: str
    x_name: str
    lines: Sequence[Line]
    points: Sequence[tuple[str, float, float]] = ()
    x_is_log: bool = False
    y_may_be_log: bool = False


def check_plot_file(file: Path) -> None:
    """Refuse what cannot be written, before anything is done that takes long."""
    if file.suffix.lower() not in KINDS:
        raise RequestError(f"--plot {file}: name a file that ends in {' or '.join(KINDS)}.")
    if not file.absolute().parent.is_dir():
        raise RequestError(f"--plot {file}: there is no folder {file.parent}.")
    if file.suffix.lower() == ".png":
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise RequestError(
                f"--plot {file}: a PNG is drawn by Pillow, which is not installed. Install it by `pip install "
                "'quorate[pictures]'`, or name a file that ends in .svg."
            ) from None


def write_plot(plot: Plot, file: Path) -> None:
    """Draw it into a file, by the ending of its name."""
    check_plot_file(file)
    content = _svg(plot).encode() if file.suffix.lower() == ".svg" else _png(plot)
    try:
        write_atomically(file, content)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}.") from None


def _axes(plot: Plot) -> tuple[Axis, Axis]:
    xs = Axis(
        float(min(line.xs.min() for line in plot.lines)),
        float(max(line.xs.max() for line in plot.lines)),
        plot.x_is_log,
    )
    return xs, Axis.around(plot.lines, plot.y_may_be_log, [y for _, _, y in plot.points])


def _x(axis: Axis, values: Numbers) -> Numbers:
    return _LEFT + axis.place(values) * (_RIGHT - _LEFT)


def _y(axis: Axis, values: Numbers) -> Numbers:
    return _BOTTOM - np.clip(axis.place(values), -0.1, 1.1) * (_BOTTOM - _TOP)


def _svg(plot: Plot) -> Html:
    xs, ys = _axes(plot)
    drawn: list[Html] = [tag("rect", width=WIDTH, height=HEIGHT, fill="white"), _text(plot.title, _LEFT, 26, size=16)]
    for tick in ys.ticks():
        at = float(_y(ys, np.array([tick]))[0])
        drawn.append(tag("path", d=f"M{_LEFT} {at:.1f}H{_RIGHT}", stroke=_GRID))
        drawn.append(_text(short(tick), _LEFT - 8, at + 4, anchor="end"))
    for tick in xs.ticks():
        at = float(_x(xs, np.array([tick]))[0])
        drawn.append(tag("path", d=f"M{at:.1f} {_BOTTOM}v5", stroke=_INK))
        drawn.append(_text(short(tick), at, _BOTTOM + 20, anchor="middle"))
    drawn.append(_text(plot.x_name, (_LEFT + _RIGHT) / 2, HEIGHT - 10, anchor="middle"))
    for number, line in enumerate(plot.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        ends = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(_x(xs, line.xs), _y(ys, line.ys), strict=True))
        drawn.append(tag("path", d=f"M{ends}", fill="none", stroke=colour, stroke_width=2))
        drawn.append(_text(line.name, _RIGHT, _TOP - 24 + 16 * number, anchor="end", colour=colour))
    for name, x, y in plot.points:
        left, top = float(_x(xs, np.array([x]))[0]), float(_y(ys, np.array([y]))[0])
        drawn.append(tag("circle", cx=f"{left:.1f}", cy=f"{top:.1f}", r=5, fill=_COLOURS[1]))
        drawn.append(_text(name, left, top - 10, anchor="middle"))
    inner = tag("g", drawn, font_family="sans-serif", font_size=12)
    return tag("svg", inner, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}")


def _text(
    content: str, x: float, y: float, *, anchor: str = "start", size: int | None = None, colour: str = _INK
) -> Html:
    return tag("text", content, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, font_size=size, fill=colour)


def _png(plot: Plot) -> bytes:
    from PIL import Image, ImageDraw

    xs, ys = _axes(plot)
    picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((_LEFT, 14), plot.title, fill=_INK, font_size=16)
    for tick in ys.ticks():
        at = float(_y(ys, np.array([tick]))[0])
        pen.line([(_LEFT, at), (_RIGHT, at)], fill=_GRID)
        pen.text((_LEFT - 8, at), short(tick), fill=_INK, anchor="rm", font_size=12)
    for tick in xs.ticks():
        at = float(_x(xs, np.array([tick]))[0])
        pen.line([(at, _BOTTOM), (at, _BOTTOM + 5)], fill=_INK)
        pen.text((at, _BOTTOM + 16), short(tick), fill=_INK, anchor="mm", font_size=12)
    pen.text(((_LEFT + _RIGHT) / 2, HEIGHT - 14), plot.x_name, fill=_INK, anchor="mm", font_size=12)
    for number, line in enumerate(plot.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        pen.line(list(zip(_x(xs, line.xs).tolist(), _y(ys, line.ys).tolist(), strict=True)), fill=colour, width=2)
        pen.text((_RIGHT, _TOP - 28 + 16 * number), line.name, fill=colour, anchor="rm", font_size=12)
    for name, x, y in plot.points:
        left, top = float(_x(xs, np.array([x]))[0]), float(_y(ys, np.array([y]))[0])
        pen.ellipse([(left - 5, top - 5), (left + 5, top + 5)], fill=_COLOURS[1])
        pen.text((left, top - 14), name, fill=_INK, anchor="mm", font_size=12)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
