"""A report as plain values, and its two forms: HTML in one file that needs nothing else, and Markdown."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from quorate.history.report.charts import Content, Html, Plot, inline_svg, tag

MOST_ROWS = 200
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched and nothing runs, whatever a name or a message would like to be."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")


@dataclass(frozen=True)
class Words:
    """A paragraph. Its kind is nothing, `bad`, or `code`, where lines are kept as they are."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Command:
    """What to type, and what it is good for."""

    command: str
    purpose: str


@dataclass(frozen=True)
class Table:
    """Rows of text, of which as many are shown as can be looked at. Columns of `numbers` end at the right. What is
    `folded` away has that title."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[int] = ()
    folded: str = ""


Block = Words | Command | Table | Plot


@dataclass(frozen=True)
class Report:
    """A name with its status, what it is about, the facts that somebody wants to know first (name, value, and what more
    there is to it), what to say at once, and the sections."""

    name: str
    status: str
    about: str
    facts: Sequence[tuple[str, str, str]]
    head: Sequence[Block]
    sections: Sequence[tuple[str, Sequence[Block]]]


def as_html(report: Report, folder: Path, now: datetime) -> str:
    """A page that says where it was made of."""
    style = Html(files("quorate.history.report").joinpath("style.css").read_text())
    tiles = [tag("div", tag("span", name), tag("b", value), tag("em", more)) for name, value, more in report.facts]
    content: list[Content] = [
        tag("h1", report.name, " ", tag("span", report.status, class_=f"status {report.status}")),
        tag("p", report.about, class_="about"),
        tag("div", tiles, class_="tiles"),
        [_element(block) for block in report.head],
    ]
    for title, blocks in report.sections:
        charts = [_element(block) for block in blocks if isinstance(block, Plot)]
        others = [_element(block) for block in blocks if not isinstance(block, Plot)]
        drawn = tag("div", charts, class_="charts") if charts else None
        content.append(tag("section", tag("h2", title), drawn, others, id=title.lower().replace(" ", "-")))
    made = f"Made by quorate {version('quorate')} on {at_minute(now)} from {folder.absolute()}"
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<link rel="icon" href="data:,">'),
        tag("title", f"{report.name} – {report.status}"),
        tag("style", style),
    ]
    body = tag("body", tag("main", content), tag("footer", made))
    return "<!doctype html>\n" + tag("html", tag("head", head), body, lang="en")


def as_markdown(report: Report) -> str:
    """The same for a pull request or a notebook, without the drawings."""
    told = Table(("", "", ""), report.facts)
    lines = [f"# {plain(report.name)}", "", f"{plain(report.status)}. {plain(report.about)}.", "", *_lines(told)]
    for block in report.head:
        lines += _lines(block)
    for title, blocks in report.sections:
        lines += [f"## {plain(title)}", "", *(line for block in blocks for line in _lines(block))]
    return "\n".join(lines)


def plain(text: str) -> str:
    """A text as it is, in one line: nothing in it is markup, or ends a cell."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def at_minute(time: datetime) -> str:
    """A moment for people, in the zone in which it is read nearly everywhere alike."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _element(block: Block) -> Html:
    match block:
        case Words(kind="code"):
            return tag("pre", block.text.rstrip())
        case Words():
            return tag("p", block.text, class_=block.kind or None)
        case Command():
            return tag("p", tag("code", block.command), f" {block.purpose}", class_="next")
        case Plot():
            return tag("figure", inline_svg(block), class_="chart")
    cells = [
        tag("tr", [tag("td", cell, class_="number" if at in block.numbers else None) for at, cell in enumerate(row)])
        for row in block.rows[:MOST_ROWS]
    ]
    head = [tag("th", each, class_="number" if at in block.numbers else None) for at, each in enumerate(block.headings)]
    whole = tag("table", tag("thead", tag("tr", head)), tag("tbody", cells))
    more = tag("p", f"and {left:,} more; quorate show --json has all") if (left := _left_out(block)) else None
    table = tag("div", whole, more, class_="table")
    return tag("details", tag("summary", block.folded), table) if block.folded else table


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Words(kind="code"):
            yield from ("```", block.text.rstrip(), "```", "")
        case Words():
            yield from (plain(block.text), "")
        case Command():
            yield from (f"`{block.command}` {block.purpose}.", "")
        case Table():
            yield f"| {' | '.join(map(plain, block.headings))} |"
            yield f"| {' | '.join('---' for _ in block.headings)} |"
            yield from (f"| {' | '.join(map(plain, row))} |" for row in block.rows[:MOST_ROWS])
            yield ""
            if left := _left_out(block):
                yield from (f"and {left:,} more", "")


def _left_out(table: Table) -> int:
    return max(0, len(table.rows) - MOST_ROWS)
