"""How a part of a run ends in its folder, with an engine that does as the test says."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from made_events import make_event
from quorate.api import run_part, session
from quorate.api.prints import NoDisplay, RunStart
from quorate.api.recorded_run import warn_of_stretched_schedule
from quorate.coordinator.places import Outcome
from quorate.core import machine
from quorate.core.errors import JobError, RequestError, RunError
from quorate.core.failure import Failure, JobFailed
from quorate.core.machine import Limits
from quorate.engines.engine import Prepared
from quorate.observe.event import Event
from quorate.observe.events import LogMessage
from quorate.observe.sinks import Sink
from quorate.spec.job import JobSpec
from quorate.spec.load import resolve_mapping
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import Submission, submission_of
from quorate.storage.task_files import read_source
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch

Show = Callable[[Event], None]


def refuse_as_worker() -> Outcome:
    return Outcome(Failure("TaskError", "a worker's refusal", exit_code=RequestError.exit_code), {})


def refuse_as_engine() -> Outcome:
    raise RunError("the engine's refusal")


def fail() -> Outcome:
    return Outcome(Failure("JobError", "worker 0 was lost"), {})


def resume(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], Outcome], steps: int) -> None:
    """Resume the finished run with an engine that trains so many steps and then refuses."""
    run = RunFolder(workplace.last)

    def train(_: Launch, show: Show, accept: Callable[[Prepared], None], __: Signals) -> Outcome:
        kept = read_source(run.path)
        assert kept is not None
        accept(Prepared(run.read_environment() or {}, kept.source))
        for step in range(steps):
            show(make_event("step", 9 + step, {}))
        return refuse()

    layer = [Override("steps", 16, "--steps")]
    session.resume(run.path.parent, run.name, {}, layer, watch=lambda _: NoDisplay(), runner=train)


def test_a_run_that_is_resumed_here_is_no_job_of_a_cluster_any_more(
    used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(used_workplace.last)
    Submission("tiny-0001-ab", "auto").write(run)
    with pytest.raises(JobFailed, match="refusal"):
        resume(used_workplace, monkeypatch, refuse_as_worker, steps=1)
    assert submission_of(run) is None


@pytest.mark.parametrize("refuse", [refuse_as_worker, refuse_as_engine])
def test_a_refusal_leaves_a_run_as_it_was_until_a_step_was_trained(
    used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], Outcome]
) -> None:
    job = used_workplace.last / "job.yaml"
    before = job.read_text(), used_workplace.result()
    with pytest.raises(RequestError, match="refusal"):
        resume(used_workplace, monkeypatch, refuse, steps=0)
    assert (job.read_text(), used_workplace.result()) == before

    with pytest.raises(JobFailed, match="worker 0 was lost") as lost:
        resume(used_workplace, monkeypatch, fail, steps=0)
    assert lost.value.remains is not None and "is complete, as it was" in lost.value.remains.advice
    assert (job.read_text(), used_workplace.result()) == before

    with pytest.raises(JobFailed, match="refusal") as failed:
        resume(used_workplace, monkeypatch, refuse, steps=1)
    assert failed.value.exit_code == 1
    result = used_workplace.result()
    assert (result["status"], result["failure"]["exit_code"]) == ("failed", 1)
    assert "steps: 16  # --steps" in job.read_text()


def test_a_branch_is_trained_by_the_runner_that_is_given(used_workplace: Workplace) -> None:
    run = RunFolder(used_workplace.last)
    began: list[Path] = []

    def train(launch: Launch, _: Show, __: Callable[[Prepared], None], ___: Signals) -> Outcome:
        began.append(launch.run.path)
        return refuse_as_engine()

    layer, watch = [Override("steps", 16, "--steps")], lambda _: NoDisplay()
    with pytest.raises(RunError, match="the engine's refusal"):
        session.resume(run.path.parent, run.name, {}, layer, watch=watch, branch=True, runner=train)
    assert [path != run.path for path in began] == [True]


def test_a_result_that_cannot_be_written_does_not_hide_that_the_job_is_done(
    used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_: Any) -> None:
        raise JobError("cannot write result.json: No space left on device.")

    monkeypatch.chdir(used_workplace.folder)
    monkeypatch.setattr(RunFolder, "write_result", no_space)
    result = {"ending": "complete", "steps": 16, "weights_digest": "d"}
    with pytest.raises(JobError) as failed:
        resume(used_workplace, monkeypatch, lambda: Outcome(None, result), steps=1)
    assert failed.value.message == (
        "cannot write result.json: No space left on device. The job itself is complete, after 16 steps, and its "
        "checkpoint is kept. Make room, then: quorate resume tiny-0001"
    )
    # The engine of this test has told a step and no end.
    assert "the last events could not be written: runs/tiny-0001/events.jsonl ends too early" in caplog.text


def test_auto_starts_as_many_workers_as_the_container_has_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shown(Exception):
        pass

    def stop_here(begun: RunStart) -> Sink:
        raise Shown(begun.workers)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(machine, "read_limits", lambda: Limits(cores=3.5))
    job = {"task": "t:T", "batch_size": 8, "steps": 1, "runs": str(tmp_path)}
    with pytest.raises(Shown) as shown:
        session.start(resolve_mapping(job, "the job", {}, []), stop_here)
    assert shown.value.args == (3,)


def test_gpus_that_stay_idle_are_told_when_a_run_begins(
    used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shown(NoDisplay):
        def handle(self, event: Event) -> None:
            told.append(event)

    def train(_: Launch, __: Show, ___: Callable[[Prepared], None], ____: Signals) -> Outcome:
        return refuse_as_engine()

    told: list[Event] = []
    monkeypatch.setattr(run_part, "idle_gpus", lambda _, workers: f"3 of 4 GPUs stay idle beside {workers}")
    run, layer = RunFolder(used_workplace.last), [Override("steps", 16, "--steps"), Override("workers", 1, "--workers")]
    with pytest.raises(RunError, match="the engine's refusal"):
        session.resume(run.path.parent, run.name, {}, layer, watch=lambda _: Shown(), runner=train)
    warnings = [event.message for event in told if isinstance(event, LogMessage) and event.level == "warning"]
    assert warnings == ["3 of 4 GPUs stay idle beside 1"]


def test_what_copiers_write_before_the_job_has_begun_is_news(
    used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quorate.api import copies

    run = RunFolder(used_workplace.last)
    before, told = run.events_file.stat().st_size, []

    class Hasty(copies.Copies):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self._publish("log", None, {"message": "copied"})

    def refuse(launch: Launch, *_: Any) -> Outcome:
        told.append(launch.events_from)
        raise RunError("the engine's refusal")

    monkeypatch.setattr(copies, "Copies", Hasty)
    further = ["checkpoints", str(used_workplace.folder)]
    layer = [Override("steps", 16, "--steps"), Override("checkpoint.to", further, "--set checkpoint.to")]
    with pytest.raises(RequestError, match="refusal"):
        session.resume(run.path.parent, run.name, {}, layer, watch=lambda _: NoDisplay(), runner=refuse)
    assert told == [before]
    assert run.events_file.stat().st_size > before > 0


def test_events_that_are_a_folder_are_told_before_a_worker_is_started(used_workplace: Workplace) -> None:
    run = RunFolder(used_workplace.last)
    run.events_file.unlink()
    run.events_file.mkdir()
    before = run.job_file.read_text(), run.read_result()
    layer = [Override("steps", 16, "--steps")]
    with pytest.raises(RequestError, match=r"cannot read .*events\.jsonl: Is a directory"):
        session.resume(run.path.parent, run.name, {}, layer, watch=lambda _: NoDisplay())
    assert (run.job_file.read_text(), run.read_result()) == before


@pytest.mark.parametrize(("task", "source"), [("/w\udcff/task.py:T", "job.yaml"), ("t:T", "\udcff.yaml")])
def test_a_job_that_could_not_be_read_again_is_refused_before_it_has_a_run(
    tmp_path: Path, task: str, source: str
) -> None:
    spec = JobSpec.model_validate({"task": task, "batch_size": 8, "steps": 1, "runs": str(tmp_path / "runs")})
    with pytest.raises(RequestError, match=r"\\udcff.* is not UTF-8.* Rename"):
        session.start(ResolvedJob(spec, {}, source), lambda _: NoDisplay())
    assert not (tmp_path / "runs").exists()


def test_a_longer_job_is_warned_of_where_its_rate_depends_on_its_length(caplog: pytest.LogCaptureFixture) -> None:
    scheduled = {"task": "t:T", "batch_size": 8, "schedule": {"kind": "cosine"}}
    short, long = (JobSpec.model_validate({**scheduled, "steps": steps}) for steps in (8, 16))
    warn_of_stretched_schedule(short, short)
    assert caplog.text == ""
    warn_of_stretched_schedule(short, long)
    assert "the rate of a cosine schedule depends on how long the job is" in caplog.text


@pytest.mark.parametrize("given", [{"kind": "constant"}, {"per": "epoch"}], ids=str)
def test_of_a_rate_that_does_not_depend_on_it_a_longer_job_is_not_warned(
    given: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    scheduled = {"task": "t:T", "batch_size": 8, "schedule": given}
    short, long = (JobSpec.model_validate({**scheduled, "steps": steps}) for steps in (8, 16))
    warn_of_stretched_schedule(short, long)
    assert caplog.text == ""
