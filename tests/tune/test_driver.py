"""What the driver of a search makes of the ends of its trials, wherever they run."""

from pathlib import Path

import pytest

from quorate.supervisor.signals import Signals
from quorate.tune.driver import DEATHS, Driver, TrialSource
from quorate.tune.loading import load_recorded_search
from quorate.tune.trial_run import BUSY, IN_ORDER, NO_SPACE, STOPPING, Report
from quorate.tune.trials import Journal
from tune.search_builder import search_folder


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
