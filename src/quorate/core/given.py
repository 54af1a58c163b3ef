"""What user code gave where something else was expected, in words."""

from typing import Any


def given(value: Any) -> str:
    """The value as a sentence names it: "nothing (None)", "a Tensor of shape (8, 3)", "the float 0.5"."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, bool | int | float):
        return f"the {kind} {value!r}"
    if isinstance(value, str):
        return f'the text "{value if len(value) <= 40 else value[:37] + "..."}"'
    if isinstance(value, tuple | list):
        return f"a {kind} of {len(value)} values" if len(value) != 1 else f"a {kind} of one value"
    shape = getattr(value, "shape", None)
    return f"{_article(kind)} {kind}" if not isinstance(shape, tuple) else f"a {kind} of shape {tuple(shape)}"


def likely_slip(value: Any) -> str:
    """What was probably forgotten, to follow a sentence; nothing if that is not plain to see."""
    if value is None:
        return " Is a `return` missing?"
    return f" Is `()` missing after {value.__name__}?" if isinstance(value, type) else ""


def _article(kind: str) -> str:
    return "an" if kind[:1] in "AEIOaeio" else "a"
