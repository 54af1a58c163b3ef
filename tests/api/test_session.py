"""How a part of a run ends in its folder, with an engine that does as the test says."""

from collections.abc import Callable
from typing import Any

import pytest

from command import Workplace
from quorate.api import session
from quorate.api.resumption import warn_of_stretched_schedule
from quorate.coordinator.client import Outcome
from quorate.core.errors import RequestError, RunError
from quorate.core.failure import Failure, JobFailed
from quorate.observe.event import Event
from quorate.spec.job import JobSpec
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder

Show = Callable[[Event], None]


def refuse_as_worker() -> Outcome:
    return Outcome(Failure("TaskError", "a worker's refusal", exit_code=RequestError.exit_code), {})


def refuse_as_engine() -> Outcome:
    raise RunError("the engine's refusal")


def resume(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], Outcome], steps: int) -> None:
    """Resume the finished run with an engine that trains so many steps and then refuses."""
    run = RunFolder(workplace.last)

    class Engine:
        def __init__(self, _: Any, show: Show, accept_facts: Callable[[dict[str, str]], None], *__: Any) -> None:
            self.show, self.accept_facts = show, accept_facts

        def run(self) -> Outcome:
            self.accept_facts(dict(run.read_environment() or {}))
            for step in range(steps):
                self.show(Event("step", 9 + step, {}))
            return refuse()

    monkeypatch.setattr(session, "LocalEngine", Engine)
    layer = [Override("steps", 16, "--steps")]
    session.resume(run.path.parent, run.name, {}, layer, watch=lambda _: session.Silence())


@pytest.mark.parametrize("refuse", [refuse_as_worker, refuse_as_engine])
def test_a_refusal_leaves_a_run_as_it_was_until_a_step_was_trained(
    used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], Outcome]
) -> None:
    job = used_workplace.last / "job.yaml"
    before = job.read_text(), used_workplace.result()
    with pytest.raises(RequestError, match="refusal"):
        resume(used_workplace, monkeypatch, refuse, steps=0)
    assert (job.read_text(), used_workplace.result()) == before

    with pytest.raises(JobFailed, match="refusal") as failed:
        resume(used_workplace, monkeypatch, refuse, steps=1)
    assert failed.value.exit_code == 1
    result = used_workplace.result()
    assert (result["status"], result["failure"]["exit_code"]) == ("failed", 1)
    assert "steps: 16  # --steps" in job.read_text()


def test_a_longer_job_is_warned_of_where_its_rate_depends_on_its_length(caplog: pytest.LogCaptureFixture) -> None:
    scheduled = {"task": "t:T", "batch_size": 8, "schedule": {"kind": "cosine"}}
    short, long = (JobSpec.model_validate({**scheduled, "steps": steps}) for steps in (8, 16))
    warn_of_stretched_schedule(short, short)
    assert caplog.text == ""
    warn_of_stretched_schedule(short, long)
    assert "the rate of a cosine schedule depends on how long the job is" in caplog.text
