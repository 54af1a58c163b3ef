"""A supervisor with a real coordinator, on an engine in memory: its workers never come to register."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memory_engine import MemoryEngine
from quorate.core.errors import RequestError
from quorate.core.failure import Failure, JobFailed
from quorate.engines.engine import Prepared
from quorate.observe.event import Event
from quorate.observe.events import LogMessage, StepCompleted
from quorate.observe.jsonl import JsonlSink
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Controls, Launch, Supervisor
from quorate.task.run_mode import RunMode
from quorate.worker.assignment import Assignment


class Engine(MemoryEngine):
    """Remembers what its workers were told, and whether it was closed."""

    def __init__(self, failure: Failure | None = None) -> None:
        super().__init__(failure)
        self.assigned: list[Assignment] = []
        self.is_closed = False

    def start(self, assignment: Assignment) -> None:
        self.assigned.append(assignment)
        super().start(assignment)

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Hook:
    """Has every worker told something, looks on for some rounds, and then does something."""

    def __init__(self, signals: Signals, rounds: int = 3) -> None:
        self._signals = signals
        self._rounds = rounds
        self.seen: list[Controls] = []

    def on_start(self, assignment: Assignment) -> Assignment:
        return replace(assignment, hook="some.module:Hook", hook_options={"slot": assignment.slot})

    def on_round(self, controls: Controls, now: float) -> None:
        self.seen.append(replace(controls, running=dict(controls.running)))
        if len(self.seen) == 1:
            controls.kill_coordinator()
        if len(self.seen) == self._rounds:
            self._signals.received += [signal.SIGINT]


def supervised(folder: Path, engine: Engine, signals: Signals, hook: Hook | None = None, **parts: Any) -> Supervisor:
    run = RunFolder(folder)
    run.logs.mkdir()
    # A tenth of the timeout is what the coordinator, which may just have been replaced, has to answer in.
    spec = JobSpec.model_validate(
        {"task": "task.py:T", "lanes": 2, "batch_size": 2, "steps": 1, "failure_timeout": 60.0}
    )
    handle, accept = parts.get("handle", lambda _: None), parts.get("accept", lambda _: None)
    launch = Launch(run, spec, 2, "job.yaml", events_from=parts.get("events_from", 0))
    return Supervisor(engine, launch, lambda event: None if event.kind == "" else handle(event), accept, signals, hook)


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_job_that_is_stopped_before_it_has_begun_ends_and_nothing_is_left_open(tmp_path: Path) -> None:
    engine, signals = Engine(), Signals([signal.SIGTERM])
    outcome = supervised(tmp_path, engine, signals).run()
    assert outcome.failure is None
    assert outcome.result == {"ending": "terminated"}
    assert (engine.assigned, engine.is_closed) == ([], True)
    assert not (tmp_path / "coordinator.json").exists()


class Mute:
    """A coordinator that does not come to listen, and does not end by itself. The user asks for an end meanwhile."""

    pid, departure, is_alive = 1, "the coordinator was killed", True

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.looks = 0

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        assert limit is not None
        self.looks += 1
        assert self.looks < 100, "the signal is not acted on"
        self._signals.received.append(signal.SIGTERM)
        return {}

    def kill(self) -> None:
        self.is_alive = False

    def close(self, patience: float) -> None:
        assert patience == 0
        self.is_alive = False


def test_a_job_that_is_stopped_while_its_coordinator_does_not_listen_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, signals = Engine(), Signals()
    mute = Mute(signals)
    monkeypatch.setattr(engine, "start_coordinator", lambda _: mute)
    outcome = supervised(tmp_path, engine, signals).run()
    assert (outcome.failure, outcome.result) == (None, {"ending": "terminated"})
    assert (mute.looks, mute.is_alive, engine.is_closed) == (1, False, True)


def test_what_the_engine_finds_wrong_with_the_task_is_raised_and_stands_in_the_events(tmp_path: Path) -> None:
    engine = Engine(Failure("TaskError", "there is no such task", exit_code=2))
    told: list[Event] = []
    with pytest.raises(RequestError, match="no such task"):
        supervised(tmp_path, engine, Signals(), handle=told.append).run()
    assert engine.is_closed
    assert kinds(tmp_path) == ["failure"]
    assert [event.kind for event in told] == ["failure"], "by the coordinator's stream, to its end"


def test_what_an_earlier_part_of_the_run_has_told_is_not_news(tmp_path: Path) -> None:
    events_file, told = tmp_path / "events.jsonl", list[Event]()
    events_file.write_text(LogMessage(message="earlier").to_json() + "\n")
    size, engine = events_file.stat().st_size, Engine(Failure("TaskError", "there is no such task", exit_code=2))
    with pytest.raises(RequestError, match="no such task"):
        supervised(tmp_path, engine, Signals(), handle=told.append, events_from=size).run()
    assert kinds(tmp_path) == ["log", "failure"]
    assert [event.kind for event in told] == ["failure"]


def test_a_machine_that_is_not_accepted_starts_no_worker(tmp_path: Path) -> None:
    engine = Engine()

    def refuse(_: Prepared) -> None:
        raise JobFailed(Failure("Other", "another machine"))

    with pytest.raises(JobFailed, match="another machine"):
        supervised(tmp_path, engine, Signals(), accept=refuse).run()
    assert (engine.assigned, engine.is_closed) == ([], True)


def test_a_hook_is_asked_at_every_start_and_in_every_round_and_a_coordinator_that_it_kills_is_replaced(
    tmp_path: Path,
) -> None:
    engine, signals, told = Engine(), Signals(), list[Event]()
    hook = Hook(signals)
    outcome = supervised(tmp_path, engine, signals, hook, handle=told.append).run()
    assert outcome.result == {"ending": "interrupted"}
    assert [(one.slot, one.hook, one.hook_options) for one in engine.assigned] == [
        (slot, "some.module:Hook", {"slot": slot}) for slot in range(2)
    ]
    assert hook.seen[-1].running == {0: 4710, 1: 4711}
    assert hook.seen[-1].workers == 2
    # The last is of the coordinator that is let go.
    assert [event.kind for event in told] == ["coordinator", "stop"] == kinds(tmp_path)[:2]


def test_a_mesh_is_for_training_who_evaluates_has_the_whole_model(tmp_path: Path) -> None:
    """Else one of two workers in a tensor dimension would have no lanes of its own."""
    strategy = {"kind": "fsdp", "tensor": 2}
    keys = {"task": "task.py:T", "lanes": 2, "batch_size": 2, "steps": 1, "workers": 2, "strategy": strategy}
    appointed = []
    for number, mode in enumerate((RunMode(), RunMode(evaluates_only=True))):
        launch = Launch(RunFolder(tmp_path / str(number)), JobSpec.model_validate(keys), 2, "job.yaml", mode=mode)
        supervisor = Supervisor(Engine(), launch, lambda _: None, lambda _: None, Signals(), None)
        appointed.append(supervisor._appointment()["mesh"])
    assert appointed == [(1, 1, 2), None]


class DeadlyHook(Hook):
    """Kills the coordinator, and the job with it."""

    def on_round(self, controls: Controls, now: float) -> None:
        controls.kill_coordinator()
        raise JobFailed(Failure("Other", "everything is lost"))


def test_why_a_job_has_ended_is_told_too_where_its_coordinator_is_dead(tmp_path: Path) -> None:
    signals, told = Signals(), list[Event]()
    with pytest.raises(JobFailed, match="everything is lost"):
        supervised(tmp_path, Engine(), signals, DeadlyHook(signals), handle=told.append).run()
    assert [event.kind for event in told] == ["failure"] == kinds(tmp_path)


class MovingHook(Hook):
    """Renames the folder of the run."""

    def __init__(self, signals: Signals, folder: Path) -> None:
        super().__init__(signals)
        self._folder = folder

    def on_round(self, controls: Controls, now: float) -> None:
        if not self.seen:
            self.seen.append(controls)
            self._folder.rename(self._folder.with_name("moved"))


def test_a_run_that_is_renamed_ends_and_is_not_made_again(tmp_path: Path) -> None:
    folder, signals = tmp_path / "run", Signals()
    folder.mkdir()
    with pytest.raises(JobFailed, match=f"the folder {folder} was renamed or removed") as failed:
        supervised(folder, Engine(), signals, MovingHook(signals, folder)).run()
    assert (failed.value.exit_code, folder.exists()) == (1, False)


class RelentlessHook(Hook):
    """Kills one coordinator after the other; the first has written down a step that it told nobody of."""

    def __init__(self, signals: Signals, events_file: Path) -> None:
        super().__init__(signals)
        self._events_file = events_file

    def on_round(self, controls: Controls, now: float) -> None:
        controls.kill_coordinator()
        if not self.seen:
            self.seen.append(controls)
            sink = JsonlSink(self._events_file)
            sink.handle(StepCompleted(step=3, time=1.0))
            sink.close()


def test_a_job_that_loses_its_coordinators_says_at_which_step(tmp_path: Path) -> None:
    signals = Signals()
    hook = RelentlessHook(signals, RunFolder(tmp_path).events_file)
    with pytest.raises(JobFailed, match="was killed by SIGKILL at step 3, as those before it"):
        supervised(tmp_path, Engine(), signals, hook).run()


@pytest.mark.parametrize(("grow", "workers", "first"), [(None, 3, 3), ({}, 3, 2), ({}, 1, 1)])
def test_a_job_that_grows_begins_with_its_least_workers(
    grow: dict[str, Any] | None, workers: int, first: int, tmp_path: Path
) -> None:
    keys = {"task": "task.py:Tiny", "lanes": 4, "batch_size": 4, "steps": 1, "min_workers": 2}
    spec = JobSpec.model_validate({**keys, "engine": {"kind": "local", "grow": grow}})
    assert Launch(RunFolder(tmp_path), spec, workers, "job.yaml").first_workers == first
