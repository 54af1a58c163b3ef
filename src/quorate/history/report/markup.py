"""HTML that cannot be broken by what is put into it: text is escaped wherever it is not known to be markup."""

import html
import re
from collections.abc import Iterable

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
