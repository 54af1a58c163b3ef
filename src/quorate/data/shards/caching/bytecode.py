"""What code uses by name, read from its bytecode."""

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Loaded:
    """A global variable, and the attributes that are taken of it right away."""

    name: str
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """A global variable that the code sets or deletes."""

    name: str


@dataclass(frozen=True)
class Imported:
    """A module that the code imports as it runs."""

    name: str
    is_relative: bool


@dataclass(frozen=True)
class Attribute:
    """An attribute, whatever it is of."""

    name: str


Use = Loaded | Stored | Imported | Attribute


def uses(code: CodeType) -> Iterator[Use]:
    """All of them in order, but for those of the code inside it."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "CACHE")]
    for position, each in enumerate(instructions):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield Loaded(each.argval, tuple(_attributes(instructions[position + 1 :])))
        elif each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield Stored(each.argval)
        elif each.opname == "IMPORT_NAME":
            # Before it come how many packages further up it is looked for, and what is taken of it.
            yield Imported(each.argval, bool(instructions[position - 2].argval))
        elif each.opname in _ATTRIBUTE:
            yield Attribute(each.argval)


def is_of_a_class_body(code: CodeType, name: str) -> bool:
    """Whether the code, or code inside it, sets such a name of its own, as the body of a class does."""
    if any(each.opname == "STORE_NAME" and each.argval == name for each in dis.get_instructions(code)):
        return True
    return any(is_of_a_class_body(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _attributes(instructions: list[dis.Instruction]) -> Iterator[str]:
    for each in instructions:
        if each.opname not in _ATTRIBUTE:
            return
        yield each.argval
