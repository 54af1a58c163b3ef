"""Manifests of earlier formats, brought to the present one as they are read. The files stay as they are."""

from collections.abc import Callable
from typing import Any

from quorate.core.errors import CheckpointError, NewerFormatError

FORMAT = 3

Content = dict[str, Any]


def migrated(content: Content) -> Content:
    """The content of a manifest of any format that was ever released, in the present one."""
    refuse_unknown(content)
    while content["format"] != FORMAT:
        content = _STEPS[content["format"]](content)
    return content


def refuse_unknown(content: Content) -> None:
    """Raise `CheckpointError` for a format that is not known, and `NewerFormatError` for that of a later version."""
    given = content.get("format")
    # The exact type: to Python, true equals 1.
    if type(given) is int and given > FORMAT:
        raise NewerFormatError(f"was written by a newer Quorate (format {given}; this one reads up to {FORMAT})")
    if type(given) is not int or given not in (*_STEPS, FORMAT):
        known = f"{', '.join(map(str, _STEPS))} and {FORMAT}"
        raise CheckpointError(f"the manifest has format {given!r} and this version of Quorate reads formats {known}")


def _from_1(content: Content) -> Content:
    """Format 1 had one kind of digest, in a field of that name, and nothing was encrypted. What it says of the weights
    is a digest of another kind, which compares with none of today's."""
    parts = [
        {"file": part["file"], "bytes": part["bytes"], "digest": f"xxh3-128:{part['xxh3_128']}"}
        for part in content["parts"]
    ]
    return {**content, "format": 2, "parts": parts, "encryption": None, "weights_digest": ""}


def _from_2(content: Content) -> Content:
    """Format 2 did not say which evaluation was the best so far, nor which generation has written it, and a key
    vouched for its tensors only."""
    return {**content, "format": 3, "best": None, "generation": None, "tag": ""}


_STEPS: dict[int, Callable[[Content], Content]] = {1: _from_1, 2: _from_2}
