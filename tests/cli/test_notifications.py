"""Real jobs that tell somebody: by a command, and by a local HTTP server."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, await_condition, in_step
from webhook_receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver([503, 500, 200, 200, 200])
    yield server
    server.shutdown()
    server.server_close()


def notifying(workplace: Workplace, **keys: Any) -> Path:
    """The folder in which a command leaves what it is told: a file each, since several may run at a time."""
    folder = workplace.folder / "told"
    folder.mkdir()
    workplace.write_job(notify={"command": f"cat > {folder}/$$.part && mv {folder}/$$.part {folder}/$$.json", **keys})
    return folder


def messages(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.glob("*.json")]


def test_a_webhook_that_fails_twice_is_told_and_its_address_is_shown_nowhere(
    workplace: Workplace, receiver: Receiver
) -> None:
    workplace.write_job(notify={"webhook": receiver.url})
    done = workplace.train("--json")
    assert done.code == 0, done.stderr
    await_condition("three attempts", lambda: len(receiver.bodies) == 3)
    (body,) = {json.dumps(body) for body in receiver.bodies}
    told = json.loads(body)
    assert (told["run"], told["event"], told["status"], told["steps"]) == ("tiny-0001", "finished", "complete", 8)
    assert told["metrics"] == done.document["final_metrics"]
    assert told["folder"] == str(workplace.last)
    await_condition("its log", lambda: "delivered" in workplace.log("notify"))
    assert [each["level"] for each in workplace.log_records("notify")] == ["warning", "warning", "info"]
    exposed = [file for file in workplace.last.rglob("*") if file.is_file() and b"a-secret-path" in file.read_bytes()]
    assert {file.name for file in exposed} <= {"job.yaml", "manifest.json"}
    assert "a-secret-path" not in workplace.run("show", "last").stdout + workplace.run("logs", "last").stdout


def test_a_webhook_that_never_answers_does_not_hold_up_the_end(workplace: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        workplace.write_job(notify={"webhook": f"http://127.0.0.1:{deaf.getsockname()[1]}/"})
        running = workplace.start("train", "job.yaml", "--json")
        running.await_event("finished")
        assert running.done().code == 0
        (notifier,) = workplace.pids("quorate.tracking.notify")
        os.kill(notifier, signal.SIGKILL)
    workplace.assert_nobody_left()


@pytest.mark.parametrize(
    "place", ["import", *(pytest.param(place, marks=pytest.mark.long) for place in ("datasets", "loss"))]
)
def test_a_failure_is_told_also_before_the_first_step(workplace: Workplace, place: str) -> None:
    told = notifying(workplace)
    done = workplace.train("--json", "--workers", "2", TROUBLE=place)
    assert done.code != 0
    (message,) = await_condition("a message", lambda: messages(told))
    assert (message["event"], message["status"]) == ("failed", "failed")
    assert f"trouble in {place}" in message["message"]


def test_a_launcher_that_is_terminated_tells_it(workplace: Workplace) -> None:
    told = notifying(workplace)
    running = workplace.start("train", "job.yaml", "--workers", "1", "--json", HOLD=in_step(3, workers=1))
    running.await_event("step", at_least=2)
    running.process.send_signal(signal.SIGTERM)
    running.await_asked("stop")
    workplace.go()
    assert running.done().code == 143
    (message,) = await_condition("a message", lambda: messages(told))
    assert (message["event"], message["status"]) == ("finished", "terminated")


def test_a_failure_that_no_worker_can_tell_and_each_loss_are_told_once(workplace: Workplace) -> None:
    told = notifying(workplace, on=["failed", "lost"])
    done = workplace.train("--workers", "1", TROUBLE="os._exit")
    assert done.code == 1
    losses = [event for event in workplace.events() if event["kind"] == "lost"]
    await_condition("all messages", lambda: len(messages(told)) >= len(losses) + 1)
    workplace.assert_nobody_left()
    events = [message["event"] for message in messages(told)]
    assert sorted(events) == ["failed", *["lost"] * len(losses)]
    assert losses


@pytest.mark.long
def test_without_the_key_nobody_is_told(workplace: Workplace) -> None:
    assert workplace.train().code == 0
    assert not (workplace.last / "logs" / "notify.jsonl").exists()
