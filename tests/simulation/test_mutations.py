"""Which mistakes can be made in a piece of code, and what it does with one of them."""

import ast
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from simulation.mutation import EQUIVALENT, all_mutations, listed_survivors
from simulation.mutations import Mutation, code_with, mutations_of

SOURCE = """
import logging
log = logging.getLogger(__name__)
calls = []

def grade(mark, is_late=False):
    if mark < 0:
        raise ValueError(f"{'negative' if mark < 0 else 'odd'}")
    if is_late and mark > 5:
        calls.append(mark)
        log.info("late")
        return False
    return [one for one in range(mark) if one != 2] if not is_late else True

class Book:
    @property
    def is_open(self):
        def look(page):
            return True
        return look(1)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "book.py"
    file.write_text(SOURCE)
    return file


def named(file: Path) -> dict[str, Mutation]:
    return {one.name.removeprefix("shelf: "): one for one in mutations_of(file, "shelf")}


def test_every_condition_guard_operator_call_and_result_has_its_mistakes_and_words_have_none(file: Path) -> None:
    assert set(named(file)) == {
        "grade: negate: mark < 0",
        "grade: remove guard: mark < 0",
        "grade: shift: mark < 0",
        "grade: negate: is_late and mark > 5",
        "grade: remove guard: is_late and mark > 5",
        "grade: negate: is_late",
        "grade: negate: mark > 5",
        "grade: and → or: is_late and mark > 5",
        "grade: shift: mark > 5",
        "grade: drop: calls.append(mark)",
        "grade: flip: return False",
        "grade: negate: not is_late",
        "grade: negate: one != 2",
        "Book.is_open: flip: return True",
    }


def test_a_name_stays_when_other_lines_come_and_go(file: Path) -> None:
    before = set(named(file))
    file.with_name("other.py").write_text("\n\nfirst = 1\n" + SOURCE)
    assert set(named(file.with_name("other.py"))) == before


@pytest.mark.parametrize(
    ("name", "arguments", "given"),
    [
        ("grade: negate: one != 2", (4,), [2]),
        ("grade: negate: mark > 5", (7, True), True),
        ("grade: shift: mark > 5", (5, True), False),
        ("grade: and → or: is_late and mark > 5", (7,), False),
        ("grade: flip: return False", (7, True), True),
        ("grade: remove guard: mark < 0", (-1,), []),
        ("grade: negate: not is_late", (3,), True),
    ],
)
def test_the_code_has_the_mistake(file: Path, name: str, arguments: tuple[Any, ...], given: object) -> None:
    world: dict[str, Any] = {"__name__": "book"}
    exec(compile(SOURCE, str(file), "exec"), world)
    function: FunctionType = world["grade"]
    mutation = named(file)[name]
    code = code_with(mutation)
    assert (code.co_qualname, code.co_firstlineno) == (function.__code__.co_qualname, function.__code__.co_firstlineno)
    function.__code__ = code
    assert function(*arguments) == given
    assert mutation.line in mutation.lines
    assert mutation.text in ast.unparse(ast.parse(SOURCE))


def test_a_function_within_a_method_is_changed_with_it(file: Path) -> None:
    world: dict[str, Any] = {"__name__": "book"}
    exec(compile(SOURCE, str(file), "exec"), world)
    code = code_with(named(file)["Book.is_open: flip: return True"])
    world["Book"].is_open.fget.__code__ = code
    assert world["Book"]().is_open is False


def test_every_listed_survivor_exists_and_has_a_reason_of_a_known_kind() -> None:
    names = [one.name for one in all_mutations()]
    assert len(names) == len(set(names)) > 1000
    listed = listed_survivors()
    assert set(listed) <= set(names)
    kinds = (EQUIVALENT, "message only", "performance only")
    assert [reason for reason in listed.values() if not reason.startswith(kinds)] == []
