from pathlib import Path

import pytest

import quorate
from command import TASK_SOURCE
from quorate.api.job import reference_to


def test_the_public_names_are_these() -> None:
    assert quorate.__all__ == ["Job", "JobFailed", "QuorateError", "RequestError", "Result", "Task", "resume", "train"]
    for name in quorate.__all__:
        assert getattr(quorate, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(quorate, "trian")  # noqa: B009 (mypy knows that it is not there)


def test_keys_are_checked_as_in_a_job_file() -> None:
    with pytest.raises(quorate.RequestError, match=r"batchsize.*batch_size"):
        quorate.Job(task="package.module:Task", lanes=2, batchsize=8, steps=1)
    job = quorate.Job(task="package.module:Tiny", lanes=2, batch_size=8, steps=1)
    assert (job.spec.name, job.spec.lanes, repr(job)) == ("tiny", 2, "Job(tiny: package.module:Tiny, lanes=2)")


def test_a_job_from_a_file_takes_overrides(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK_SOURCE)
    (tmp_path / "job.yaml").write_text("{task: task.py:Tiny, batch_size: 8, steps: 3}")
    job = quorate.Job.from_file(tmp_path / "job.yaml", {"checkpoint.every": 2, "steps": 5})
    assert (job.spec.steps, job.spec.checkpoint.every) == (5, 2)
    assert job.resolved.origins["steps"] == "Job.from_file"


def test_a_class_is_found_by_its_module_and_what_cannot_be_found_is_refused() -> None:
    class Local:
        pass

    assert reference_to(Path) == "pathlib:Path"
    with pytest.raises(quorate.RequestError, match="is defined inside a function"):
        reference_to(Local)
    with pytest.raises(quorate.RequestError, match="is not a class"):
        reference_to(3)
