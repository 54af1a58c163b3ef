import shutil
from pathlib import Path
from typing import Any

import pytest

from history.run_builder import COMPLETE, Story, build_run, complete_run
from quorate.history.run_record import Listing, Order, RunQuery, RunRecord, Status, chosen, has_task, read_runs
from quorate.storage.run_folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """From old to new: complete, failed, lost, damaged, of two tasks with two metrics."""
    accuracy = {"task": "nets.mnist:Mnist", "name": "mnist", "evaluate": {"metric": "accuracy", "mode": "max"}}
    complete_run(tmp_path, after=10)
    failed = {"status": "failed", "failure": {"kind": "LossError", "message": "nan"}}
    build_run(tmp_path, story=Story().begin().train(1, 5).evaluate(4, loss=0.25), result=failed, after=20)
    build_run(tmp_path, job=accuracy, story=Story().begin().train(1, 2).evaluate(2, accuracy=0.9), after=30)
    best = {"best": {"value": 0.95, "step": 6}, "steps": 30}
    build_run(tmp_path, job=accuracy, story=Story().begin(total_steps=30), result=COMPLETE | best, after=40)
    build_run(tmp_path, after=50).result_file.write_text("{")
    return tmp_path


def names(runs: Path, **query: Any) -> list[str]:
    return [record.name for record in Listing.read(runs, RunQuery(**query)).shown]


def test_all_the_newest_first(runs: Path) -> None:
    assert names(runs) == ["tiny-0003", "mnist-0002", "mnist-0001", "tiny-0002", "tiny-0001"]
    assert names(runs, reverse=True) == names(runs)[::-1]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order.NAME, ["mnist-0001", "mnist-0002", "tiny-0001", "tiny-0002", "tiny-0003"]),
        (Order.STATUS, ["tiny-0002", "mnist-0001", "tiny-0003", "mnist-0002", "tiny-0001"]),
        (Order.STEPS, ["mnist-0002", "tiny-0001", "tiny-0002", "mnist-0001", "tiny-0003"]),
        (Order.METRIC, ["mnist-0002", "mnist-0001", "tiny-0002", "tiny-0001", "tiny-0003"]),
    ],
)
def test_orders(runs: Path, order: Order, expected: list[str]) -> None:
    assert names(runs, order=order) == expected


def test_what_has_no_metric_stands_last_in_either_direction(runs: Path) -> None:
    assert names(runs, order=Order.METRIC, reverse=True)[-1] == "tiny-0003"
    assert names(runs, order=Order.METRIC, reverse=True)[:2] == ["tiny-0001", "tiny-0002"]


def test_filters_are_combined_and_statuses_are_alternatives(runs: Path) -> None:
    assert names(runs, statuses=(Status.LOST, Status.FAILED)) == ["mnist-0001", "tiny-0002"]
    assert names(runs, statuses=(Status.LOST, Status.FAILED), name="tiny") == ["tiny-0002"]
    assert names(runs, task="Mnist", statuses=(Status.COMPLETE,)) == ["mnist-0002"]
    assert names(runs, name="nix") == []


def test_a_limit_is_applied_after_all_else(runs: Path) -> None:
    listing = Listing.read(runs, RunQuery(name="tiny", limit=2))
    assert [record.name for record in listing.shown] == ["tiny-0003", "tiny-0002"]
    assert (len(listing.fitting), len(listing.records)) == (3, 5)


@pytest.mark.parametrize(
    ("reference", "wanted", "fits"),
    [
        ("/code/task.py:Tiny", "Tiny", True),
        ("/code/task.py:Tiny", "task.py", True),
        ("/code/task.py:Tiny", "task", True),
        ("/code/task.py:Tiny", "task.py:Tiny", True),
        ("/code/task.py:Tiny", "code/task.py:Tiny", True),
        ("/code/task.py:Tiny", "/code/task.py:Tiny", True),
        ("/code/task.py:Tiny", "tiny", False),
        ("/code/task.py:Tiny", "sk.py", False),
        ("/code/task.py:Tiny", "code", False),
        ("nets.mnist:Mnist", "mnist", True),
        ("nets.mnist:Mnist", "nets.mnist", True),
        ("nets.mnist:Mnist", "mnist:Mnist", True),
        ("nets.mnist:Mnist", "nets", False),
        ("", "Tiny", False),
    ],
)
def test_which_task_is_meant(reference: str, wanted: str, fits: bool) -> None:
    assert has_task(reference, wanted) is fits


def test_a_run_that_is_removed_while_it_is_read_is_left_out(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = RunRecord.read

    def remove_before(run: RunFolder) -> RunRecord:
        if run.name == "tiny-0002":
            shutil.rmtree(run.path)
        return read(run)

    def remove_after(run: RunFolder) -> RunRecord:
        record = read(run)
        if run.name == "mnist-0001":
            shutil.rmtree(run.path)
        return record

    monkeypatch.setattr(RunRecord, "read", remove_before)
    assert len(read_runs(runs)) == 4
    monkeypatch.setattr(RunRecord, "read", remove_after)
    assert [record.name for record in read_runs(runs)] == ["tiny-0001", "mnist-0002", "tiny-0003"]


def test_a_folder_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert read_runs(tmp_path / "missing") == ()
    assert chosen((), RunQuery(order=Order.METRIC)) == ()
