"""HTML that cannot be broken by what is put into it: text is escaped wherever it is not known to be markup."""

import html
import re
from collections.abc import Iterable
from importlib.resources import files

# What no document may hold, and what a terminal would take for a colour.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched and nothing runs, whatever a name or a message would like to be."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | Iterable["Content"] | None


def tag(name: str, *children: Content, **attributes: str | float | bool | None) -> Html:
    """An element. `class_` stands for class, `stroke_width` for stroke-width; what is None or False is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    told = "".join(
        f" {key}" if value is True else f' {key}="{text(str(value))}"'
        for key, value in given.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{told}>{joined(children)}</{name}>")


def joined(children: Iterable[Content]) -> Html:
    """All of them, what is plain text escaped."""
    return Html("".join(_markup(child) for child in children))


def text(plain: str) -> Html:
    """Plain text as markup, also inside of an attribute."""
    return Html(html.escape(_CONTROL.sub("\ufffd", plain), quote=True))


def _markup(child: Content) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    return text(child) if isinstance(child, str) else joined(child)


def document(title: str, content: Iterable[Content], footer: str, styles: Iterable[str] = ("style.css",)) -> str:
    """A whole page in one file that needs nothing else."""
    package = files("quorate.history.report")
    return "<!doctype html>\n" + tag(
        "html",
        tag(
            "head",
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            Html('<link rel="icon" href="data:,">'),
            tag("title", title),
            tag("style", [Html(package.joinpath(name).read_text()) for name in styles]),
        ),
        tag("body", tag("main", content), tag("footer", footer)),
        lang="en",
    )


def section(title: str, content: Content) -> Html:
    """A part of a page with its heading."""
    return tag("section", tag("h2", title), content, id=title.lower().replace(" ", "-"))
