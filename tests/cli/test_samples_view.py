"""How a ledger is shown: long ones cut without hiding what is broken, and what it means for a trial under faults."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from quorate.api.chaos import Trial
from quorate.api.result import Result
from quorate.chaos.script import Firing, parse_fault
from quorate.cli.chaos import print_trial, succeeded
from quorate.cli.layout import Page
from quorate.cli.samples_view import EPOCHS_SHOWN, print_ledger
from quorate.history.ledger import EpochEntry, EpochStatus, Ledger
from quorate.observe.screen import Screen
from schemas import validate


def entry(epoch: int, status: EpochStatus = EpochStatus.WHOLE, dropped: tuple[int, ...] = ()) -> EpochEntry:
    reason = "" if status is EpochStatus.WHOLE else "step 7 did not record which samples were used"
    return EpochEntry(epoch, 3 * epoch + 1, 3 * epoch + 3, 3, 30, dropped, False, status, reason)


BROKEN = Ledger((entry(0), entry(1, EpochStatus.BROKEN)), 30)
WHOLE = Ledger((entry(0), entry(1)), 30)


def page(ledger: Ledger, width: int | None = None) -> str:
    stream = io.StringIO()
    print_ledger(Page(stream, is_terminal=False, width=width), "tiny-0001", ledger)
    return stream.getvalue()


def trial() -> Trial:
    result = Result("tiny-0001", Path("runs/tiny-0001"), "complete", 6, {}, "ab" * 32, 1.0, 1.0)
    return Trial(result, result, None, (parse_fault("kill all at step 2"),), (Firing(0, 1, 4711, 2, "data"),), ())


def test_of_many_epochs_the_last_and_the_broken_ones_are_shown() -> None:
    many = [entry(epoch) for epoch in range(EPOCHS_SHOWN + 10)]
    many[2] = entry(2, EpochStatus.BROKEN)
    lines = page(Ledger(tuple(many), 30, told_again=2)).splitlines()
    assert lines[0] == "tiny-0001  ledger broken"
    assert lines[2].split()[:4] == ["2", "7-9", "30", "broken"]
    assert lines[3].split()[0] == "10"
    assert "9 earlier epochs, none of them broken; --json has all" in lines
    assert "2 steps were repeated after resuming from a checkpoint; each counts once." in lines
    assert lines[-1] == "Broken in epoch 2: step 7 did not record which samples were used."


def test_bad_samples_have_a_column_where_there_are_any() -> None:
    assert "bad" not in page(WHOLE)
    lines = page(Ledger((entry(0), replace(entry(1), bad=((4, 4), (17, 19)))), 30)).splitlines()
    assert lines[1].split()[-2:] == ["bad", "samples"]
    assert lines[2].split()[-2:] == ["-", "-"]
    assert lines[3].split()[-3:] == ["-", "4,", "17-19"]
    assert "Left out, since the data do not give them: samples 4, 17, 18, 19." in lines[-1]


def test_skipped_steps_have_a_column_where_there_are_any() -> None:
    assert "skipped" not in page(WHOLE)
    skipping = replace(entry(1), skipped_steps=(4, 6), skipped_samples=20)
    lines = page(Ledger((entry(0), skipping), 30)).splitlines()
    assert lines[1].split()[-2:] == ["skipped", "steps"]
    assert lines[2].split()[-2:] == ["-", "-"]
    assert lines[3].split()[-3:] == ["-", "4,", "6"]
    assert "Skipped, since the loss was not finite: steps 4, 6, with 20 samples." in lines[-1]


def test_many_dropped_samples_are_cut_and_fit_a_narrow_terminal() -> None:
    text = page(Ledger((entry(0, dropped=tuple(range(1000, 1012))),), 42), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert "and 4 more" in " ".join(text.split())


@pytest.mark.parametrize(("ledger", "end"), [(WHOLE, "same: the faults have not changed a bit\n"), (BROKEN, "")])
def test_a_broken_ledger_fails_a_trial_that_ends_with_the_same_weights(ledger: Ledger, end: str) -> None:
    stream = io.StringIO()
    print_trial(trial(), ledger, Screen(stream))
    expected = end or "the ledger is broken. See where: quorate show tiny-0001 --ledger\n"
    assert stream.getvalue().endswith(expected)
    assert f"samples\n  {ledger.verdict}\n" in stream.getvalue()
    assert succeeded(trial(), ledger) is (ledger is WHOLE)
    document = trial().document(ledger)
    validate("chaos", document)
    assert document["ledger_whole"] is (ledger is WHOLE)
