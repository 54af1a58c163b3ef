import os
import signal
import sys
import time

import pytest

from quorate.core.child import Answer, ask_child


def test_a_child_answers_and_leaves_nothing_behind_here() -> None:
    seen: list[int] = []

    def answer() -> str:
        seen.append(os.getpid())
        return f"{os.getppid()} " + "x" * 200_000

    told = ask_child(answer)
    assert told == Answer(f"{os.getpid()} " + "x" * 200_000, "exited with code 0")
    assert seen == []


def test_a_child_that_fails_or_dies_gives_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask_child(lambda: str(1 / 0)) == Answer("", "exited with code 1")
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert ask_child(die) == Answer("", "was killed by signal 9")
    assert ask_child(lambda: sys.exit(0)).text == ""


def take_long() -> str:
    time.sleep(60)
    return "late"


def die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


def test_a_child_that_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    assert ask_child(take_long, seconds=0.1) == Answer("", "took longer than 0.1 s")
    assert time.monotonic() - started < 30
