"""A checkpoint that is asked for while a job runs: which one counts, and what is said where none comes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.whole_save import save_whole
from command import await_condition
from coordinator.served import TOKEN, serve
from quorate.api import control
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.client import SupervisorClient
from quorate.core.errors import RunError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor
from quorate.observe.event import Event
from quorate.observe.events import CheckpointFailed, CheckpointSaved, GenerationFormed
from quorate.observe.jsonl import JsonlSink
from quorate.storage.run_folder import RunFolder
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import open_channel, stub_on, token_metadata

AT = 7
"""The step that the worker of these tests is in."""


class Job:
    """A run whose only worker is the test: `heard` are the wishes that reach it."""

    def __init__(self, run: RunFolder, stub: Any, address: str) -> None:
        self.run = run
        self.heard: list[str] = []
        self.on_wish: Callable[[], object] = lambda: None
        self.address = address
        self._stub = stub
        self._follow = stub.Follow(pb.FollowRequest(), metadata=token_metadata(TOKEN))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def save(self, step: int) -> CheckpointInfo:
        fields: dict[str, Any] = {"phase": 0, "weights_digest": "d", "job": {}, "environment": {}, "metrics": {}}
        info = save_whole(CheckpointFolder(self.run.checkpoints), {"a": torch.zeros(2)}, step=step, **fields)
        self.tell(CheckpointSaved(step=step, path=str(info.path)))
        return info

    def tell(self, event: Event) -> None:
        sink = JsonlSink(self.run.events_file)
        sink.handle(event)
        sink.close()

    def end(self) -> None:
        client = SupervisorClient(self.address, TOKEN, timeout=60.0)
        client.report_failure(Failure("TaskError", "that was all"))
        client.close()

    def close(self) -> None:
        self._follow.cancel()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _listen(self) -> None:
        try:
            for directive in self._follow:
                if directive.HasField("save"):
                    self.heard.append(directive.save.request)
                    self.on_wish()
        except Exception as error:
            assert "CANCELLED" in repr(error)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(control, "_ASK_EVERY", 0.1)
    with _running(tmp_path) as job:
        yield job


@contextmanager
def _running(tmp_path: Path) -> Iterator[Job]:
    run = RunFolder.create(tmp_path / "runs", "asked")
    run.write_job("")  # what makes the folder a run
    with serve(tmp_path, workers=1) as served:
        channel = open_channel(served.address)
        stub: Any = stub_on(channel)
        token = token_metadata(TOKEN)
        stub.Register(pb.RegisterRequest(pid=1), metadata=token, timeout=60)
        stub.Heartbeat(pb.HeartbeatRequest(pid=1, sequence=1, step=AT, phase="forward"), metadata=token, timeout=60)
        run.write_address(served.address, TOKEN)
        job = Job(run, stub, served.address)
        try:
            yield job
        finally:
            job.close()
            channel.close()


@pytest.fixture
def asked_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how often it is asked: however slow the machine is, a save does not take that long."""
    monkeypatch.setattr(control, "_ASK_EVERY", 60.0)


def ask(job: Job, patience: float = 100.0) -> CheckpointInfo:
    return control.save(job.run, patience)


@pytest.mark.usefixtures("asked_once")
def test_it_is_of_no_earlier_step_and_none_that_was_told_before(job: Job) -> None:
    job.save(AT + 3)
    job.on_wish = lambda: (job.save(AT - 2), job.save(AT + 1))
    assert ask(job).cursor == Cursor(AT + 1)
    assert len(job.heard) == 1


@pytest.mark.parametrize("happened", [GenerationFormed(generation="1.2"), CheckpointFailed(step=8, reason="full")])
def test_who_takes_the_place_of_one_who_was_lost_is_asked_anew(job: Job, happened: Event) -> None:
    def be_lost_then_save() -> None:
        if len(set(job.heard)) > 1:
            job.save(9)
        elif len(job.heard) == 3:
            job.tell(happened)

    job.on_wish = be_lost_then_save
    assert ask(job).cursor == Cursor(9)
    assert len(set(job.heard[:3])) == 1, "the same wish, until something has happened to it"


def test_a_checkpoint_of_an_earlier_step_is_not_what_was_asked_for(job: Job) -> None:
    steps = [AT, AT - 2, AT - 3]
    job.on_wish = lambda: job.save(steps.pop()) if steps else None
    assert ask(job).cursor == Cursor(AT)


def test_where_none_comes_it_is_told_after_a_while(job: Job) -> None:
    with pytest.raises(RunError, match=r"has saved no checkpoint in 3 s\. .* Wait longer with --timeout"):
        ask(job, patience=3)
    await_condition("that it was asked for again", lambda: len(job.heard) > 1)


def test_a_run_that_ends_meanwhile_is_told_so(job: Job) -> None:
    job.on_wish = job.end
    with pytest.raises(RunError, match=r"has ended, and no checkpoint was saved .*quorate checkpoints ls asked-0001"):
        ask(job)


def test_the_checkpoint_with_which_a_run_ends_is_as_good(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_ASK_EVERY", 0.0)  # so that it is not seen before the job has ended

    def end() -> None:
        if len(job.heard) == 1:
            job.save(AT)
            job.end()

    job.on_wish = end
    assert ask(job).cursor == Cursor(AT)


def test_a_run_that_is_not_running_cannot_be_asked(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "over")
    run.write_job("")
    with pytest.raises(RunError, match="over-0001 is not running, so it cannot be asked"):
        control.save(run, 5)
