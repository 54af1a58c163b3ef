"""What is done next with a save, from every state that it can be in."""

from itertools import product
from typing import Any

import pytest

from quorate.training.save_decisions import (
    Action,
    Decision,
    SaveProgress,
    decide,
    why_void,
)

WRITERS = ("first", "second", "third")


def test_the_one_that_commits_goes_through_all_of_it_in_order() -> None:
    steps = ["is_copied", "is_written", "is_complete", "may_commit", "is_committed"]
    done: dict[str, Any] = {}
    seen = [decide(SaveProgress(commits=True))]
    for step in steps:
        done[step] = True
        seen.append(decide(SaveProgress(commits=True, **done)))
    assert seen == [
        Decision(Action.COPY, "a copy of the state"),
        Decision(Action.WRITE, "the disk"),
        Decision(Action.WAIT, "the other workers"),
        Decision(Action.WAIT, "leave of the coordinator to commit"),
        Decision(Action.COMMIT, "the disk"),
        Decision(Action.FINISH),
    ]


def test_another_is_done_when_its_part_is_written() -> None:
    assert decide(SaveProgress(commits=False, is_copied=True)).action is Action.WRITE
    assert decide(SaveProgress(commits=False, is_copied=True, is_written=True)).action is Action.FINISH


def test_one_that_is_given_up_is_never_committed_and_one_that_is_committed_never_given_up() -> None:
    for commits, copied, written, complete, may, committed in product((False, True), repeat=6):
        decision = decide(SaveProgress(commits, copied, written, complete, may, committed, "the worker leaves"))
        assert decision == (Decision(Action.FINISH) if committed else Decision(Action.GIVE_UP, "the worker leaves"))


@pytest.mark.parametrize("commits", [False, True])
def test_nothing_is_committed_before_all_is_there_and_leave_is_given(commits: bool) -> None:
    for copied, written, complete, may in product((False, True), repeat=4):
        decision = decide(SaveProgress(commits, copied, written, complete, may))
        if decision.action is Action.COMMIT:
            assert commits and copied and written and complete and may


@pytest.mark.parametrize(
    ("present", "is_saved", "delivered", "words"),
    [
        (WRITERS, True, (), None),
        (WRITERS[1:], False, (0, 1, 2), "that commits it is gone"),
        (WRITERS[1:], True, (0, 1, 2), None),
        (WRITERS[:2], True, (0, 1), "writes a part of it is gone"),
        (WRITERS[:2], True, (2,), None),
        ((*WRITERS[:2], "new"), True, (), "writes a part of it is gone"),
    ],
)
def test_when_a_generation_begins_what_cannot_be_completed_is_void(
    present: tuple[str, ...], is_saved: bool, delivered: tuple[int, ...], words: str | None
) -> None:
    reason = why_void(WRITERS, present, is_saved=is_saved, delivered=delivered)
    assert (reason is None) if words is None else (reason is not None and words in reason)
