"""Runs whose task is not where it was, with the real commands."""

import shutil
from pathlib import Path

import pytest

import quorate
from command import Workplace

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture
def stopped(used_workplace: Workplace) -> Workplace:
    """A folder with a run that has two of its eight steps to go, and whose project was called otherwise."""
    run = used_workplace.last
    job = run / "job.yaml"
    job.write_text(job.read_text().replace(str(used_workplace.task), "/old/project/task.py"))
    assert "/old/project/task.py:Tiny" in job.read_text()
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000008-evaluated")
    return used_workplace


def test_a_project_that_was_moved_and_given_another_comment_goes_on_to_the_same_bits(
    stopped: Workplace, undisturbed: str
) -> None:
    stopped.task.write_text(f"# A word about it.\n\n\n{stopped.task.read_text()}")
    done = stopped.run("resume", "last", "--workers", "2", "--json")
    assert done.code == 0, done.stderr
    assert "WARNING: the task is no longer at /old/project/task.py: the one at task.py is used" in done.stderr
    assert (done.document["from_step"], done.document["weights_digest"]) == (6, undisturbed)
    assert f"task: {stopped.task}:Tiny" in (stopped.last / "job.yaml").read_text(), "the next time it is found there"


def test_without_its_project_a_run_goes_on_evaluates_and_exports_by_the_source_that_it_keeps(
    stopped: Workplace, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    stopped.task.unlink()
    told = (
        "WARNING: the task /old/project/task.py is no longer there: the source that the run keeps is used "
        "(runs/tiny-0001/source); --task FILE:Class names another"
    )
    resumed = stopped.run("resume", "last", "--workers", "2", "--json")
    assert resumed.code == 0, resumed.stderr
    assert told in resumed.stderr
    assert resumed.document["weights_digest"] == undisturbed
    assert "task: /old/project/task.py:Tiny" in (stopped.last / "job.yaml").read_text()

    evaluated = stopped.run("eval", "last", "--workers", "1", "--json")
    assert evaluated.code == 0, evaluated.stderr
    assert told in evaluated.stderr
    assert "has changed" not in evaluated.stderr
    assert evaluated.document["metrics"] == resumed.document["final_metrics"]

    exported = stopped.run("checkpoints", "export", "last", "model.safetensors", "--json")
    assert exported.code == 0, exported.stderr
    assert told in exported.stderr
    model = quorate.open_run(stopped.last).load_model()
    assert "the source that the run keeps is used" in caplog.text
    assert sum(each.numel() for each in model.parameters()) > 0


def test_a_task_that_is_named_on_the_command_line_may_have_another_name(stopped: Workplace, undisturbed: str) -> None:
    elsewhere = stopped.folder / "elsewhere"
    elsewhere.mkdir()
    moved = stopped.task.rename(elsewhere / "digits.py")
    done = stopped.run("resume", "last", "--task", "elsewhere/digits.py:Tiny", "--workers", "2", "--json")
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    assert f"task: {moved}:Tiny  # --task" in (stopped.last / "job.yaml").read_text()
    refused = stopped.run("resume", "last", "--task", "elsewhere/digits.py:Other", "--steps", "16")
    assert "was started with other values for keys that affect results: task: " in refused.error
    exported = quorate.open_run(stopped.last).load_model(task=f"{Path(moved)}:Tiny")
    assert sum(each.numel() for each in exported.parameters()) > 0
