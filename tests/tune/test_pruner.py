"""Which trials Optuna's pruners end early, after whatever is known of others."""

import math
from pathlib import Path
from typing import Any

import pytest

from quorate.tune.loading import load_recorded_search
from quorate.tune.selection import Pruner
from quorate.tune.trial_run import Report
from quorate.tune.trials import Journal
from tune.search_builder import Teller, search_folder


def begun(tmp_path: Path, **scheduler: Any) -> Teller:
    return search_folder(tmp_path, metric="loss", mode="min", scheduler=scheduler).tell("search-began")


def pruner_of(teller: Teller) -> Pruner:
    return Pruner(load_recorded_search(teller.folder.path).spec, Journal(teller.folder))


def told(step: int, loss: float, total: int = 100) -> Report:
    return Report(step, {"loss": loss}, total)


def test_asha_ends_the_worse_with_a_reason_and_not_at_their_last_step(tmp_path: Path) -> None:
    pruner = pruner_of(begun(tmp_path, kind="asha", reduction=2))
    assert not pruner.judge(1, told(20, 0.5))
    assert pruner.judge(2, told(20, 0.6)) == "asha: loss 0.6000 at step 20 is not among the best 1/2 there"
    assert not pruner.judge(3, told(20, 0.4))
    assert not pruner.judge(4, told(100, 9.0))
    assert pruner.judge(5, told(20, math.nan))


def test_grace_is_the_step_at_which_trials_are_judged_first(tmp_path: Path) -> None:
    pruner = pruner_of(begun(tmp_path, kind="asha", reduction=2, grace=40))
    assert not pruner.judge(1, told(20, 0.1))
    assert not pruner.judge(2, told(20, 0.9))
    assert not pruner.judge(1, told(40, 0.1))
    assert pruner.judge(2, told(40, 0.9))


def test_what_trials_of_an_earlier_part_have_told_counts(tmp_path: Path) -> None:
    teller = begun(tmp_path, kind="asha", reduction=2)
    teller.begin(1).report(1, 0.9, 0.4).finish(1).begin(2).report(2, 0.5, 0.2).finish(2).begin(3).report(3, 0.1)
    pruner = pruner_of(teller)
    assert not pruner.judge(3, told(20, 0.45))
    assert pruner.judge(3, told(40, 0.35))


@pytest.mark.parametrize("scheduler", [{"kind": "asha", "reduction": 2}, {"kind": "hyperband", "reduction": 2}])
def test_a_search_that_goes_on_decides_as_one_that_was_not_killed(tmp_path: Path, scheduler: Any) -> None:
    losses = {number: 0.1 * (7 * number % 12) for number in range(1, 13)}
    whole = pruner_of(begun(tmp_path / "whole", **scheduler))
    decided = {number: whole.judge(number, told(20, loss)) for number, loss in losses.items()}
    assert 0 < sum(map(bool, decided.values())) < len(decided)

    teller = begun(tmp_path / "killed", **scheduler)
    for number in range(1, 7):
        teller.begin(number).report(number, losses[number])
        if decided[number]:
            teller.tell("stopped", number, step=20, reason=decided[number])
        else:
            teller.finish(number)
    resumed = pruner_of(teller)
    assert {number: resumed.judge(number, told(20, losses[number])) for number in range(7, 13)} == {
        number: decided[number] for number in range(7, 13)
    }


def test_the_trials_of_hyperband_are_judged_from_different_steps_on(tmp_path: Path) -> None:
    pruner = pruner_of(begun(tmp_path, kind="hyperband", reduction=2))
    assert not pruner.judge(1, told(20, 0.0))
    worse = [[pruner.judge(number, told(step, float(number))) for step in (20, 40, 80)] for number in range(2, 30)]
    assert {[bool(each) for each in judged].index(True) for judged in worse if any(judged)} == {0, 1, 2}


def test_without_a_scheduler_no_trial_ends_early(tmp_path: Path) -> None:
    pruner = pruner_of(begun(tmp_path, kind="none"))
    assert not any(pruner.judge(number, told(20, float(number))) for number in (1, 2, 3))
