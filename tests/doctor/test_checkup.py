import threading
from collections.abc import Sequence

from quorate.core.errors import RunError
from quorate.doctor.checkup import Check, examine
from quorate.doctor.report import Finding, Level


def finds(name: str) -> Check:
    return Check(name, lambda: [Finding(name, Level.OK, "is well")])


def test_findings_come_in_the_order_of_the_checks() -> None:
    second_is_done = threading.Event()

    def slow() -> Sequence[Finding]:
        assert second_is_done.wait(60)
        return [Finding("slow", Level.OK, "waited"), Finding("slower", Level.NOTE, "too")]

    def quick() -> Sequence[Finding]:
        second_is_done.set()
        return [Finding("quick", Level.OK, "was there first")]

    found = list(examine([Check("slow", slow), Check("quick", quick)]))
    assert [finding.name for finding in found] == ["slow", "slower", "quick"]


def test_a_check_that_raises_is_a_problem_and_hides_no_other() -> None:
    def broken() -> Sequence[Finding]:
        raise ZeroDivisionError("of all things")

    first, second = examine([Check("broken", broken), finds("whole")])
    assert (first.name, first.level) == ("broken", Level.PROBLEM)
    assert "ZeroDivisionError: of all things" in first.text
    assert first.remedy
    assert second.level is Level.OK


def test_an_error_of_ours_speaks_for_itself() -> None:
    def refused() -> Sequence[Finding]:
        raise RunError("cannot look for runs in x: Not a directory. Say where they are.")

    assert list(examine([Check("runs", refused)])) == [
        Finding("runs", Level.PROBLEM, "cannot look for runs in x: Not a directory. Say where they are.")
    ]


def test_a_check_that_hangs_is_a_problem_and_keeps_nobody_waiting() -> None:
    never = threading.Event()

    def hangs() -> Sequence[Finding]:
        never.wait()
        return []

    try:
        first, second = examine([Check("hanging", hangs, patience=0.05), finds("whole")])
    finally:
        never.set()
    assert (first.name, first.level) == ("hanging", Level.PROBLEM)
    assert "within 0.05 s" in first.text
    assert second.level is Level.OK
