"""What `main` does between two steps is a change of the state like an update; what cannot be one is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from own_loop import loops_as_written as loops
from own_loop.loops_as_written import EQUAL, REFUSED, Main
from quorate.own_loop.loop import own_loop_of
from training.recorded import run

OFTEN = {loops.rate_halved_at_the_top_of_an_epoch, loops.frozen_statistics, loops.buffer_filled_by_the_epoch}
KEYS: dict[str, Any] = {"lanes": 4, "batch_size": 12, "epochs": 3, "checkpoint": {"every": 2}, "last_batch": "drop"}


def as_named(main: Main, is_often: bool) -> Any:
    return pytest.param(main, id=main.__name__, marks=() if is_often else pytest.mark.long)


@pytest.mark.parametrize("main", [as_named(main, main in OFTEN) for main in EQUAL])
def test_a_loop_has_the_same_bits_on_any_number_of_workers_and_after_a_resume(main: Main, tmp_path: Path) -> None:
    task = own_loop_of(main)
    whole = run(task, tmp_path / "one", 1, **KEYS)
    told = [message for message in whole.fields("log", "message").values() if "where no checkpoint has them" in message]
    assert len(told) == (main is loops.average_in_a_local), told
    assert run(task, tmp_path / "four", 4, **KEYS).ended.digest == whole.ended.digest
    # Within an epoch, and at its end: 4 steps.
    for stop_at, workers in ((6, 3), (8, 2)):
        folder = tmp_path / f"stopped at {stop_at}"
        assert run(task, folder, 2, stop_at=stop_at, **KEYS).ended.ending == "interrupted"
        assert run(task, folder, workers, **KEYS).ended.digest == whole.ended.digest


@pytest.mark.parametrize(
    "main", [as_named(main, main is EQUAL[2]) for main in EQUAL if main is not loops.cycle_over_all_steps]
)
def test_a_job_that_is_made_longer_has_the_bits_of_one_of_that_length(main: Main, tmp_path: Path) -> None:
    """What comes after the last epoch is done before the last checkpoint, and not again."""
    task = own_loop_of(main)
    assert run(task, tmp_path / "made longer", 2, **KEYS | {"epochs": 2}).ended.ending == "complete"
    longer = run(task, tmp_path / "made longer", 3, **KEYS)
    assert longer.ended.digest == run(task, tmp_path / "at once", 1, **KEYS).ended.digest


@pytest.mark.long
@pytest.mark.parametrize("main", EQUAL[1:], ids=lambda main: main.__name__)
def test_what_a_loop_changes_between_steps_changes_its_bits(main: Main, tmp_path: Path) -> None:
    """Otherwise it was put back, and the tests above show nothing."""
    plain = run(own_loop_of(EQUAL[0]), tmp_path / "plain", **KEYS).ended.digest
    alike = loops.without_epochs, loops.average_in_a_local, loops.totals_for_the_log, loops.global_count_for_the_log
    is_plain = main in (*alike, loops.dataset_made_anew_for_each_epoch)
    assert (run(own_loop_of(main), tmp_path / "changed", **KEYS).ended.digest == plain) is is_plain


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("main", "words"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_depends_on_the_number_of_workers_is_refused(main: Main, words: str, workers: int, tmp_path: Path) -> None:
    assert words in run(own_loop_of(main), tmp_path, workers, **KEYS).ended.failure.message


def test_a_loop_runs_in_the_precision_of_the_job(tmp_path: Path) -> None:
    """Which is a mode of the thread around each lane, as one of `main` would be."""
    task, keys = own_loop_of(loops.plateau_by_hand), KEYS | {"precision": "bf16"}
    one, two = (run(task, tmp_path / str(workers), workers, **keys).ended for workers in (1, 2))
    assert one.digest == two.digest
