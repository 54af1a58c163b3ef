"""A run that is resumed elsewhere while its launcher still lives, behind a cut cable say."""

import pytest

from command import Workplace
from quorate.storage.run_folder import RunFolder


@pytest.mark.faults
def test_a_launcher_whose_run_was_taken_over_during_a_step_ends_and_does_not_take_it_back(workplace: Workplace) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "2", "--set", "steps=100000")
    running.await_event("step", at_least=3)
    run = RunFolder(workplace.last)
    taken = run.next_incarnation(launch="another launch")
    done = running.done()
    assert done.code == 1
    assert f"run {run.name} continues elsewhere" in done.error
    assert run.incarnations.newest() == taken, "it was not taken back"
    assert "writes nothing more" in workplace.log("coordinator")
    assert not workplace.failures(), "the run's events are the other's to write"
