from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.cli.errors import fold
from quorate.cli.history import LONGEST_MESSAGE, line_of
from quorate.history.logs import LogRecord

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678000).timestamp()


def line(colour: bool = False, **fields: Any) -> str:
    return line_of(LogRecord(0.0, {"time": MOMENT, "level": "info", "process": "worker 1", **fields}), colour=colour)


def test_a_record_is_one_line_with_its_process() -> None:
    assert line(message="hello") == "01-02 03:04:05.678  worker 1          info     hello"
    assert line(message="printed", source="stdout") == "01-02 03:04:05.678  worker 1                   printed"


def test_a_traceback_stands_below() -> None:
    assert line(message="no good", exception="Traceback\n  File").endswith("no good\n    Traceback\n      File")


def test_nothing_in_a_message_moves_the_cursor_and_a_long_one_is_cut() -> None:
    assert line(message="\x1b[2J\x07\x00").endswith("\\x1b[2J\\x07\\x00")
    assert line(message="x" * 3_000_000).endswith(f"{'x' * 20} … (3,000,000 characters)")
    assert len(line(message="x" * 3_000_000)) < LONGEST_MESSAGE + 100


def test_warnings_and_errors_are_coloured_on_a_terminal() -> None:
    assert "\x1b[33mmind\x1b[0m" in line(colour=True, level="warning", message="mind")
    assert "\x1b[31mbad\x1b[0m" in line(colour=True, level="error", message="bad")


@pytest.mark.parametrize("time", [1e300, -1e300, float("nan"), "then", None])
def test_a_time_that_cannot_be_does_no_harm(time: Any) -> None:
    assert line(time=time, message="hello").endswith("hello")


def test_lines_are_broken_between_words_and_indented_under_their_own() -> None:
    text = "error: job.yaml has a mistake:\n  lanes: the text is not a whole number"
    assert fold(text, 24).split("\n") == [
        "error: job.yaml has a",
        "  mistake:",
        "  lanes: the text is not",
        "    a whole number",
    ]


def test_a_path_is_never_broken() -> None:
    path = "/a/very/long/path-with-dashes/that/does/not/fit"
    assert path in fold(f"see {path} for more", 20).split("\n  ")


@given(st.lists(st.text(alphabet="abc-/", min_size=1, max_size=12), min_size=1), st.integers(20, 100))
def test_no_word_is_lost(words: list[str], width: int) -> None:
    folded = fold(" ".join(words), width)
    assert folded.split() == words
    assert max(map(len, folded.split("\n"))) <= width
