"""A trial as a run: how it ends where its folder cannot be written, or somebody else is at work on it."""

import errno
import os
from pathlib import Path

import pytest

from quorate.storage import run_folder
from quorate.supervisor.signals import Signals
from quorate.tune import trial_run
from quorate.tune.driver import DEATHS, Driver, TrialSource
from quorate.tune.loading import load_recorded_search
from quorate.tune.trial_run import BUSY, IN_ORDER, NO_SPACE, STOPPING, Plan, Report, TrialRun
from quorate.tune.trials import Journal
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


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """With a trial that has begun."""
    teller = search_folder(tmp_path).begin(1)
    search, journal = load_recorded_search(teller.folder.path), Journal(teller.folder)
    return Driver(search, journal, TrialSource(search.spec, journal), Signals(), lambda: None)


@pytest.mark.parametrize("ending", [NO_SPACE, BUSY])
def test_what_is_no_fault_of_a_trial_ends_the_search_and_leaves_the_trial(driver: Driver, ending: str) -> None:
    driver.told(1, Report(0, ending=ending, message="it cannot be written"))
    assert driver.refusal is not None and driver.refusal.message == driver.reason == "it cannot be written"
    assert (driver.journal.folder.trials / STOPPING).read_text() == IN_ORDER
    assert driver.journal.trials[1].status == "running"
    assert not driver.source.has_more


def test_a_process_that_dies_again_and_again_without_progress_is_the_fault_of_its_trial(driver: Driver) -> None:
    assert not any(driver.died(1) for _ in range(DEATHS - 1))
    driver.told(1, Report(20, {"loss": 0.5}))
    assert not any(driver.died(1) for _ in range(DEATHS - 1))
    assert f"has died {DEATHS} times without any progress" in driver.died(1)
