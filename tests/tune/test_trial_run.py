"""A trial as a run: how it ends where its folder cannot be written, or somebody else is at work on it."""

import errno
import os
from pathlib import Path

import pytest

from quorate.storage import run_folder
from quorate.tune import trial_run
from quorate.tune.loading import load_recorded_search
from quorate.tune.trial_run import BUSY, NO_SPACE, Plan, TrialRun
from tune.search_builder import search_folder


@pytest.mark.parametrize(("number", "ending"), [(errno.ENOSPC, NO_SPACE), (errno.EACCES, "failed")])
def test_a_full_disk_is_no_failure_of_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, ending: str
) -> None:
    def write(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder, "write_atomically", write)
    folder = search_folder(tmp_path).folder
    search = load_recorded_search(folder.path)
    job = search.trial_job(search.spec.params(1), 1)
    trial = TrialRun()
    trial.begin(Plan(folder.trials, "trial-0001", job))
    told = trial.next()
    trial.close()
    assert told.ending == ending and os.strerror(number) in told.message


def test_a_run_that_somebody_else_holds_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "LOCK_PATIENCE", 0.0)
    folder = search_folder(tmp_path).folder
    search = load_recorded_search(folder.path)
    run = folder.run("trial-0001")
    run.make()
    trial = TrialRun()
    with run.lock():
        trial.begin(Plan(folder.trials, "trial-0001", search.trial_job(search.spec.params(1), 1)))
        told = trial.next()
    trial.close()
    assert told.ending == BUSY and "trial-0001 is still in use" in told.message
