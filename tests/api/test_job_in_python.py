import sys
from pathlib import Path
from typing import Any

import pytest

import quorate
from command import TASK_SOURCE
from quorate.api.job import Job, JobKeys, reference_to
from quorate.spec.job import CheckpointSpec, JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.supervisor import Launch

KEYS: dict[str, Any] = {"lanes": 2, "batch_size": 8, "steps": 1}


@pytest.fixture
def job() -> Job:
    return quorate.Job(task="package.module:Tiny", checkpoint={"every": 5, "keep": 2}, **KEYS)


def test_keys_are_checked_as_in_a_job_file() -> None:
    wrong: dict[str, Any] = {"batchsize": 8}
    with pytest.raises(quorate.JobFileError, match=r"batchsize.*batch_size"):
        quorate.Job(task="package.module:Task", lanes=2, steps=1, **wrong)
    job = quorate.Job(task="package.module:Tiny", lanes=2, batch_size=8, steps=1)
    assert (job.spec.name, job.spec.lanes) == ("tiny", 2)


def test_editors_and_type_checkers_know_the_keys_of_the_job_file() -> None:
    assert set(JobKeys.__annotations__) == set(JobSpec.model_fields) - {"task"}


def test_a_job_tells_its_task_and_what_is_not_at_its_default(job: Job) -> None:
    told = "task='package.module:Tiny', name='tiny', lanes=2, batch_size=8, steps=1, checkpoint={'every': 5, 'keep': 2}"
    assert repr(job) == f"Job({told})"


def test_jobs_with_equal_keys_are_equal(job: Job) -> None:
    same = quorate.Job(task="package.module:Tiny", checkpoint={"keep": 2, "every": 5}, **KEYS)
    assert (job == same, hash(job) == hash(same)) == (True, True)
    assert job != job.replace(seed=1)
    # A task may tell these two apart.
    assert job.replace(params={"x": 1}) != job.replace(params={"x": 1.0})
    assert job != "a job"


def test_a_job_from_a_file_takes_overrides(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK_SOURCE)
    (tmp_path / "job.yaml").write_text("{task: task.py:Tiny, batch_size: 8, steps: 3}")
    job = quorate.Job.from_file(tmp_path / "job.yaml", {"checkpoint.every": 2, "steps": 5})
    assert (job.spec.steps, job.spec.checkpoint.every) == (5, 2)
    assert job.resolved.origins["steps"] == "Job.from_file"
    longer = job.replace(steps=9)
    assert (longer.spec.task, longer.spec.steps) == (f"{tmp_path}/task.py:Tiny", 9)
    assert longer.resolved.origins["batch_size"] == "job.yaml line 1"


@pytest.mark.parametrize(
    ("instead", "told", "remedy"),
    [
        ("job.yaml", 'the text "job.yaml"', 'quorate.train(quorate.Job.from_file("job.yaml"))'),
        (Path("jobs/a.yaml"), "a PosixPath", 'quorate.train(quorate.Job.from_file("jobs/a.yaml"))'),
        (JobKeys, "the class JobKeys", "quorate.train(quorate.Job(task=JobKeys, batch_size=..., epochs=...))"),
        ({}, "a dict", "quorate.train(quorate.Job(task=..., batch_size=..., epochs=...))"),
    ],
)
def test_what_is_no_job_is_not_trained_and_the_remedy_is_told(instead: Any, told: str, remedy: str) -> None:
    with pytest.raises(quorate.RequestError) as refused:
        quorate.train(instead)
    assert refused.value.message == f"quorate.train takes a quorate.Job and was given {told}. Write {remedy}."


class TestReplace:
    def test_changes_the_named_keys_and_keeps_the_origin_of_the_others(self, job: Job) -> None:
        other = job.replace(seed=8, workers=2)
        assert other.spec == job.spec.model_copy(update={"seed": 8, "workers": 2})
        assert (job.spec.seed, job.spec.workers) == (0, "auto")
        told = [other.resolved.origins[key] for key in ("seed", "workers", "lanes", "threads")]
        assert told == ["Job.replace", "Job.replace", "Job(...)", "default"]

    @pytest.mark.parametrize("key", ["checkpoint__every", "checkpoint.every"])
    def test_changes_one_key_of_a_section(self, job: Job, key: str) -> None:
        other = job.replace(**{key: 7})
        assert other.spec.checkpoint.model_dump(exclude_defaults=True) == {"every": 7, "keep": 2}
        assert other.resolved.origins["checkpoint.every"] == "Job.replace"
        assert other.resolved.origins["checkpoint.keep"] == "Job(...)"

    def test_changes_a_whole_section(self, job: Job) -> None:
        assert job.replace(checkpoint={"every": 7}).spec.checkpoint == CheckpointSpec(every=7)

    @pytest.mark.parametrize(
        ("task", "name"),
        [
            ("scripts/train gpt.py:main", "train-gpt"),
            ("package.finetune:main", "finetune"),
            ("my.old.script.py:run_it", "script"),
            ("_.py:main", "job"),
            ("package.module:TinyNet", "tinynet"),
        ],
    )
    def test_a_loop_is_named_after_its_script_and_a_task_after_its_class(self, task: str, name: str) -> None:
        assert Job(task=task, batch_size=8, epochs=1).spec.name == name

    def test_another_task_gives_its_name_unless_the_job_has_one_of_its_own(self, job: Job) -> None:
        assert job.replace(task="package.module:Other").spec.name == "other"
        named = job.replace(name="mine")
        assert named.replace(task="package.module:Other").spec.name == "mine"
        assert named.replace(task=Job).spec.task == "quorate.api.job:Job"

    def test_every_mistake_is_told_at_once(self, job: Job) -> None:
        with pytest.raises(quorate.JobFileError) as told:
            job.replace(workers=9, stepps=3)
        assert told.value.message.startswith("Job.replace")
        assert "has 2 mistakes" in told.value.message
        assert "Did you mean steps?" in told.value.message
        assert "9 > 2" in told.value.message

    def test_what_is_replaced_in_python_goes_over_the_environment(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("QUORATE_SEED", "5")
        assert quorate.Job(task="package.module:Tiny", **KEYS).spec.seed == 5
        assert job.replace(seed=6).spec.seed == 6


class TestReference:
    def test_a_class_of_a_package_is_found_by_its_module(self) -> None:
        assert reference_to(Job) == "quorate.api.job:Job"

    def test_a_class_of_a_single_file_is_found_by_that_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "lonely_module.py").write_text("class Lonely:\n    class Inner: pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        import lonely_module  # type: ignore[import-not-found]

        assert reference_to(lonely_module.Lonely) == f"{tmp_path}/lonely_module.py:Lonely"

    def test_a_class_of_a_package_itself_or_of_what_is_installed_is_found_by_its_module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package, installed = tmp_path / "whole_package", tmp_path / "dist-packages"
        package.mkdir()
        (package / "layers.py").write_text("WIDTH = 3\n")
        (package / "__init__.py").write_text("from .layers import WIDTH\nclass Whole:\n    width = WIDTH\n")
        installed.mkdir()
        (installed / "installed_module.py").write_text("class Installed: pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.syspath_prepend(installed)
        import installed_module  # type: ignore[import-not-found]
        import whole_package  # type: ignore[import-not-found]

        assert reference_to(whole_package.Whole) == "whole_package:Whole"
        assert reference_to(installed_module.Installed) == "installed_module:Installed"

    def test_workers_search_the_working_folder_where_an_interactive_session_does(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
        monkeypatch.chdir(tmp_path)
        launch = Launch(RunFolder(tmp_path), job.spec, workers=1, job_source="")
        assert launch.search_path == [str(tmp_path), "/elsewhere"]

    def test_what_cannot_be_found_is_refused(self) -> None:
        class Local:
            pass

        with pytest.raises(quorate.TaskError, match="is defined inside a function"):
            reference_to(Local)
        with pytest.raises(quorate.TaskError, match="is not a class"):
            reference_to(3)
