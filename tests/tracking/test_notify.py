import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quorate.core.failure import Failure
from quorate.observe.events import EvaluationDone, RunFailed, RunFinished, StepCompleted, WorkerLost
from quorate.spec.tracking import NotifySpec
from quorate.storage.run_folder import RunFolder
from quorate.tracking import notify
from quorate.tracking.notify import PATIENCE, GiveUp, Message, Notifier, deliver, pauses, post, run_command
from webhook_receiver import Receiver


def told(events: list[Any], on: list[str]) -> list[Message]:
    messages: list[Message] = []
    notifier = Notifier(
        RunFolder(Path("runs/tiny-0001")), "tiny", NotifySpec.model_validate({"on": on}), messages.append
    )
    for event in events:
        notifier.handle(event)
    notifier.close()
    return messages


EVERYTHING = ["failed", "finished", "lost"]
STEP = StepCompleted(step=7, time=1.0)


def test_a_complete_job_is_told_once_with_its_metrics() -> None:
    end = RunFinished(time=9.0, result={"ending": "complete", "steps": 8, "final_metrics": {"loss": 0.5}})
    (message,) = told([STEP, EvaluationDone(metrics={"loss": 0.7}), end, end], EVERYTHING)
    assert (message.event, message.status, message.steps, message.metrics) == ("finished", "complete", 8, {"loss": 0.5})
    assert message.message == "tiny-0001 is complete after 8 steps"
    assert (message.run, message.job, message.time) == ("tiny-0001", "tiny", 9.0)


def test_a_failure_is_told_with_why() -> None:
    failed = RunFailed.of(Failure("UserCodeError", "worker 0: ValueError"))
    (message,) = told([STEP, failed], EVERYTHING)
    assert (message.event, message.status, message.message, message.steps) == (
        "failed",
        "failed",
        "worker 0: ValueError",
        7,
    )


@pytest.mark.parametrize(("code", "status"), [(130, "interrupted"), (143, "terminated")])
def test_a_stop_is_no_failure(code: int, status: str) -> None:
    failed = RunFailed.of(Failure("Interrupted", "stopped at once", exit_code=code))
    stopped = RunFinished(result={"ending": status, "steps": 3})
    for event in (failed, stopped):
        (message,) = told([event], EVERYTHING)
        assert (message.event, message.status) == ("finished", status)


def test_each_lost_worker_is_told_and_only_what_is_asked_for() -> None:
    events = [WorkerLost(worker=1, message="worker 1 was killed"), WorkerLost(worker=2), RunFinished(result={})]
    assert [each.message for each in told(events, ["lost"])] == ["worker 1 was killed", "worker 2 is lost"]
    assert told(events, ["failed"]) == []


def test_it_is_tried_less_and_less_often_and_not_for_ever() -> None:
    waits = list(pauses())
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits == sorted(waits)
    assert 0.8 * PATIENCE < sum(waits) <= PATIENCE


def test_delivery_goes_on_until_it_succeeds() -> None:
    attempts: list[Exception | None] = [OSError("no"), subprocess.TimeoutExpired("x", 1), None]
    waited: list[float] = []

    def attempt() -> None:
        if (error := attempts.pop(0)) is not None:
            raise error

    assert deliver("it", attempt, wait=waited.append)
    assert waited == [0.5, 1.0]


def test_delivery_gives_up() -> None:
    def fail() -> None:
        raise OSError("never")

    def refuse() -> None:
        raise GiveUp("404")

    waited: list[float] = []
    assert not deliver("it", fail, wait=waited.append)
    assert len(waited) == len(list(pauses()))
    waited.clear()
    assert not deliver("it", refuse, wait=waited.append)
    assert waited == []


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver([503, 429, 404, 200])
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_that_is_ill_is_asked_again_and_one_that_refuses_is_not(receiver: Receiver) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="the answer is"):
            post(receiver.url, b"{}")
    with pytest.raises(GiveUp, match="404"):
        post(receiver.url, b"{}")
    post(receiver.url, b'{"run": "tiny-0001"}')
    assert receiver.bodies[-1] == {"run": "tiny-0001"}


def test_a_command_gets_the_message_and_its_failure_is_told(tmp_path: Path) -> None:
    run_command(f"cat > {tmp_path / 'got'}", b'{"a": 1}')
    assert (tmp_path / "got").read_text() == '{"a": 1}'
    with pytest.raises(subprocess.CalledProcessError):
        run_command("exit 3", b"{}")
    with pytest.raises(subprocess.TimeoutExpired):
        run_command("sleep 600", b"{}", timeout=0.1)


def test_an_address_that_does_not_answer_does_not_fill_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "tiny-0001")
    run.logs.mkdir(parents=True)
    monkeypatch.setattr(notify, "MOST", 2)
    notifier = Notifier(
        run, "tiny", NotifySpec.model_validate({"on": EVERYTHING, "command": "read line; exec sleep 60"})
    )
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        for worker in range(5):
            notifier.handle(WorkerLost(worker=worker))
        assert len(started) == 2
        notifier.handle(RunFinished(result={}))
        assert len(started) == 3, "of the end somebody is always told"
    finally:
        for child in started:
            os.killpg(child.pid, signal.SIGKILL)
