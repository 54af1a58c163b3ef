"""A value of a record, or the place of some, in a few words."""

import os
from pathlib import Path
from typing import Any

import numpy

from quorate.api.contact_sheet import picture_kind
from quorate.core.addresses import is_url, shown
from quorate.observe.quantities import size

LONGEST = 60
_FEW = 4
WHOLE = "record"


def fields_of(record: Any) -> dict[str, str]:
    """The fields of a record, each as a short text; a record that has no fields is one itself."""
    values = record if isinstance(record, dict) else {WHOLE: record}
    return {str(name): short(value) for name, value in values.items()}


def shown_file(place: str) -> str:
    """A folder, a file or a URL, by the shortest path; a link on the way may make that another one, then as it is."""
    if is_url(place):
        return shown(place)
    plain = os.path.normpath(place)
    return plain if Path(plain).resolve() == Path(place).resolve() else place


def short(value: Any) -> str:
    """What a value is, on one line."""
    if isinstance(value, bytes):
        return _bytes(value)
    if isinstance(value, numpy.ndarray):
        few = " ".join(f"{each:.4g}" if value.dtype.kind in "iufb" else str(each) for each in value.flat[:_FEW])
        more = " …" if value.size > _FEW else ""
        return f"{value.dtype} {list(value.shape)}: {few}{more}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return _cut(" ".join(text.split()) if "\n" in text else text)


def _bytes(value: bytes) -> str:
    kind = picture_kind(value)
    if not kind:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        if text.isprintable() and len(text) <= LONGEST:
            return text
    return f"{kind or 'bytes'}, {size(len(value))}"


def _cut(text: str) -> str:
    plain = "".join(each if each.isprintable() else "\ufffd" for each in text)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"
