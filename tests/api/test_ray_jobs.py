"""Detached runs: how they are found, waited for and stopped, by a list of jobs that is made here."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quorate.api import control
from quorate.api.detached import submit
from quorate.api.result import open_run
from quorate.cli.app import app
from quorate.cli.options import find_run
from quorate.core.errors import JobError, RequestError, RunError
from quorate.engines.ray import jobs as ray_jobs
from quorate.history.run_record import RunRecord, Status
from quorate.spec.load import resolve_mapping
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import Submission, asked_of, forget_submission, submission_of, waits_to_begin


class JobStatus(Enum):
    PENDING = "PENDING"
    FAILED = "FAILED"


@dataclass
class Job:
    metadata: dict[str, str] | None
    start_time: int = 0
    status: JobStatus = JobStatus.PENDING
    message: str = ""


@dataclass
class Jobs:
    """In the place of Ray's client."""

    known: list[Job] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    takes: bool = True
    answers: BaseException | None = None

    def submit_job(self, *, submission_id: str, metadata: dict[str, str], **_: Any) -> str:
        if self.takes:
            self.known.append(Job(metadata))
        if self.answers is not None:
            raise self.answers
        return submission_id

    def list_jobs(self) -> list[Job]:
        return self.known

    def get_job_info(self, name: str) -> Job:
        if not self.known:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist.")
        return self.known[0]

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(ray_jobs, "jobs_at", lambda _: made)
    for name in ray_jobs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def run(tmp_path: Path, jobs: Jobs) -> RunFolder:
    """Submitted, and not begun."""
    made = RunFolder.create(tmp_path / "shared", "digits")
    made.write_job("task: task.py:Digits\n")
    Submission("digits-0001-ab", "auto", "task.py").write(made)
    jobs.known.append(Job({ray_jobs.RUN: made.name, ray_jobs.FOLDER: str(made.path)}))
    return made


def test_a_run_that_is_not_here_is_found_by_the_list_of_the_cluster_that_is_named(
    tmp_path: Path, jobs: Jobs, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.known.append(Job(None))
    here = tmp_path / "runs"
    assert find_run(here, "digits-0001", "head:6379").path == run.path
    assert find_run(here, "digits", "head:6379").path == run.path
    with pytest.raises(RunError, match="there is no run"):
        find_run(here, "digits-0001")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert find_run(here, "digits-0001").path == run.path


def test_a_run_of_the_folder_of_runs_comes_first(tmp_path: Path, run: RunFolder) -> None:
    own = RunFolder.create(tmp_path / "runs", "digits")
    assert own.name == run.name
    assert find_run(tmp_path / "runs", "digits-0001", "head:6379").path == own.path


def test_what_is_missing_is_told(tmp_path: Path, jobs: Jobs) -> None:
    with pytest.raises(RunError, match=r"no run 'digits'.* No detached run"):
        find_run(tmp_path, "digits", "head:6379")
    jobs.known.append(Job({ray_jobs.RUN: "digits-0001", ray_jobs.FOLDER: "/mnt/away/digits-0001"}))
    with pytest.raises(RunError, match="Mount /mnt/away here"):
        find_run(tmp_path, "digits", "head:6379")
    jobs.known.append(Job({ray_jobs.RUN: "digits-0002", ray_jobs.FOLDER: "/mnt/away/digits-0002"}))
    with pytest.raises(RunError, match="may be any of digits-0001, digits-0002"):
        find_run(tmp_path, "digits", "head:6379")


def test_a_run_waits_until_its_launcher_takes_it_up(run: RunFolder) -> None:
    assert waits_to_begin(run) and RunRecord.read(run).status is Status.SUBMITTED
    with pytest.raises(RunError, match="has not begun"):
        control.resize(run, 2)
    with run.lock():
        assert not waits_to_begin(run) and RunRecord.read(run).status is Status.RUNNING
        ray_jobs.await_begin(run)
    assert RunRecord.read(run).status is Status.LOST


def test_one_that_ray_gave_up_is_told_with_its_reason(
    jobs: Jobs, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.known[0].status, jobs.known[0].message = JobStatus.FAILED, "runtime_env setup failed"
    monkeypatch.setattr(ray_jobs, "ASK_EVERY", 0.0)
    with pytest.raises(JobError, match="runtime_env setup failed"):
        ray_jobs.await_begin(run)


IMPORT_FAILED = """Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):
Traceback (most recent call last):
  File "task.py", line 1, in <module>
ModuleNotFoundError: No module named 'rdkit'
"""


def test_one_that_ray_gave_up_is_failed_with_its_reason(jobs: Jobs, run: RunFolder) -> None:
    jobs.known[0].status, jobs.known[0].message = JobStatus.FAILED, IMPORT_FAILED
    opened = open_run(run.path)
    assert (opened.status, opened.exit_code) == ("failed", 1)
    assert opened.error is not None and "ModuleNotFoundError: No module named 'rdkit'" in opened.error
    jobs.known.clear()  # whatever becomes of the cluster
    record = RunRecord.read(run)
    assert (record.status, record.reason) == (Status.FAILED, opened.error)
    assert "Traceback" not in record.reason and "ray job logs digits-0001-ab" in record.reason
    with pytest.raises(RunError, match=r"not running \(failed\).* No module named 'rdkit'"):
        control.stop(run)
    assert RunRecord.read(run).status is Status.FAILED
    assert CliRunner().invoke(app, ["logs", str(run.path)]).exit_code == 1
    for verb in ("runs", "show"):
        where = ["--runs", str(run.path.parent)] if verb == "runs" else [str(run.path)]
        shown = " ".join(CliRunner().invoke(app, [verb, *where]).stdout.split())
        assert "failed" in shown and "No module named 'rdkit'" in shown
    with run.lock():  # a resume that is refused
        pass
    assert RunRecord.read(run).status is Status.FAILED


@pytest.mark.parametrize("verb", ["runs", "show", "top --once", "report", "logs", "stop"])
def test_every_verb_asks_ray_about_a_run_that_waits(
    jobs: Jobs, run: RunFolder, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.known[0].status, jobs.known[0].message = JobStatus.FAILED, IMPORT_FAILED
    monkeypatch.chdir(run.path.parent)
    name, *options = verb.split()
    done = CliRunner().invoke(app, [name, *options, *(["--runs", "."] if name == "runs" else [str(run.path)])])
    assert (done.exit_code == 0) is (name not in ("logs", "stop"))
    assert RunRecord.read(run).status is Status.FAILED
    if name != "report":
        assert "failed" in done.output + str(done.exception)


def test_a_refusal_of_the_launcher_is_told_whole(jobs: Jobs, run: RunFolder) -> None:
    said = "Job entrypoint command failed, last logs:\nconnecting\nerror: the task has changed.\n  Use --branch.\n"
    jobs.known[0].status, jobs.known[0].message = JobStatus.FAILED, said
    reason = open_run(run.path).error or ""
    assert "last logs: error: the task has changed. Use --branch. All that was printed:" in reason


def test_a_resume_that_ray_gave_up_is_failed_until_it_is_stopped(jobs: Jobs, run: RunFolder) -> None:
    run.write_result({"status": "interrupted", "steps": 7})
    asked_of(run).write_text(run.job_file.read_text())
    assert open_run(run.path).status == "submitted"
    jobs.known[0].status, jobs.known[0].message = JobStatus.FAILED, IMPORT_FAILED
    assert (open_run(run.path).status, RunRecord.read(run).status) == ("failed", Status.FAILED)
    control.stop(run)
    assert (open_run(run.path).status, open_run(run.path).steps) == ("interrupted", 7)


def test_without_ray_a_run_is_shown_and_why_it_cannot_be_asked(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: str) -> Jobs:
        raise RequestError("the jobs of the Ray cluster cannot be asked")

    monkeypatch.setattr(ray_jobs, "jobs_at", away)
    done = CliRunner().invoke(app, ["show", str(run.path)])
    assert (done.exit_code, done.stdout.split()[:2]) == (0, ["digits-0001", "submitted"])
    assert done.stderr == "note: the jobs of the Ray cluster cannot be asked\n"


def test_one_that_has_not_begun_is_stopped_by_ray(jobs: Jobs, run: RunFolder) -> None:
    assert control.stop(run) is run
    assert jobs.stopped == ["digits-0001-ab"]
    assert RunRecord.read(run).status is Status.INTERRUPTED


def test_a_run_that_is_resumed_is_no_job_of_rays_any_more(run: RunFolder) -> None:
    forget_submission(run)
    forget_submission(run)
    assert submission_of(run) is None and not waits_to_begin(run)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"kind": "local"}, "engine: local"),
        ({"kind": "ray", "address": "local"}, "a cluster of the job's own"),
        ({"kind": "ray"}, "needs engine.storage"),
        ({"kind": "ray", "storage": "/not/there"}, "there is no folder /not/there"),
    ],
)
def test_a_job_that_cannot_be_detached_is_refused_with_what_to_do(
    tmp_path: Path, engine: dict[str, Any], told: str
) -> None:
    (tmp_path / "task.py").write_text("")
    keys = {
        "version": 2,
        "name": "digits",
        "task": f"{tmp_path}/task.py:Task",
        "batch_size": 8,
        "steps": 1,
        "engine": engine,
    }
    with pytest.raises(RequestError, match=told):
        submit(resolve_mapping(keys, "a test", {}, []))


SUBMISSION = Submission("tiny-0001-0a1b2c3d", "auto", "")


def test_a_job_that_ray_has_taken_is_submitted_even_if_its_answer_is_lost(run: RunFolder) -> None:
    jobs = Jobs(answers=ConnectionError("reset"))
    ray_jobs.submit_launcher(jobs, run, SUBMISSION, {})
    assert jobs.known and not jobs.stopped


def test_a_job_that_ray_has_not_taken_is_refused(run: RunFolder) -> None:
    jobs = Jobs(takes=False, answers=RuntimeError("no room"))
    with pytest.raises(RequestError, match="Ray has not taken the job: no room"):
        ray_jobs.submit_launcher(jobs, run, SUBMISSION, {})


def test_ctrl_c_while_a_job_is_submitted_stops_it(run: RunFolder) -> None:
    jobs = Jobs(answers=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ray_jobs.submit_launcher(jobs, run, SUBMISSION, {})
    assert jobs.stopped == [SUBMISSION.id]
