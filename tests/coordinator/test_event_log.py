"""What workers tell is written down once, also where they tell it to two coordinators."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import RecordEvents
from quorate.core.failure import Failure
from quorate.observe.event import Event
from quorate.observe.events import CoordinatorReplaced, LogMessage, RolledBack, RunFailed, StepCompleted, WorkerLost
from quorate.observe.jsonl import JsonlSink
from quorate.observe.seldom_events import SystemSampled

BATCH = (
    StepCompleted(step=1, time=1.0).to_json(),
    SystemSampled(step=1, time=1.5, worker=0, memory_bytes=10).to_json(),
    LogMessage(time=1.75, message="hello").to_json(),
    SystemSampled(step=1, time=2.5, worker=0, memory_bytes=10).to_json(),
)


class Lines(JsonlSink):
    """A file in memory that two coordinators write, one after the other."""

    def __init__(self) -> None:
        super().__init__(Path("events.jsonl"))
        self.lines: list[str] = []

    def append(self, line: str) -> None:
        self.lines.append(line)


@given(st.integers(0, len(BATCH)))
def test_what_one_coordinator_has_written_of_a_batch_the_next_does_not_write_again(written: int) -> None:
    sink = Lines()
    EventLog(sink).record(RecordEvents(BATCH[:written]))
    successor = EventLog(sink)
    successor.take_up(tuple(sink.lines))
    successor.record(RecordEvents(BATCH))
    assert sink.lines == list(BATCH)


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (WorkerLost(step=3, worker=1, cause="WorkerLost", message="worker 1 was killed"), "WARNING"),
        (WorkerLost(step=3, worker=1, cause="ReplicasDiffer", message="worker 1 has other weights"), "WARNING"),
        (LogMessage(step=3, level="warning", message="the link between worker 0 and worker 1 failed"), "WARNING"),
        (CoordinatorReplaced(incarnation=2, present=3), "WARNING"),
        (RunFailed.of(Failure("UserCodeError", "worker 1: ValueError")), "ERROR"),
        (RunFailed.of(Failure("Interrupted", "stopped at once", exit_code=130)), None),
        (LogMessage(step=3, level="info", message="worker 2 is welcome"), None),
        (StepCompleted(step=3), None),
    ],
)
def test_what_went_wrong_is_in_the_log_as_a_warning_and_nothing_else_is(
    event: Event, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventLog(Lines())
    events.publish(event)
    assert [record.levelname for record in caplog.records] == ([] if level is None else [level])
    if level is not None:
        assert getattr(event, "message", None) in (None, caplog.messages[0])


def test_a_return_to_a_checkpoint_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog(Lines())
    events.publish(StepCompleted(step=5))
    events.publish(RolledBack(step=4))
    assert caplog.messages == ["back to step 4: what follows it is trained again"]


def test_two_samples_that_differ_in_nothing_but_their_time_are_two(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    EventLog(JsonlSink(file)).record(RecordEvents(BATCH[1:2]))
    successor = EventLog(JsonlSink(file))
    successor.recall(0)
    successor.record(RecordEvents((BATCH[1], BATCH[3])))
    told: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["time"] for each in told] == [1.5, 2.5]


def test_a_job_says_that_it_goes_back_where_somebody_was_lost_or_later_steps_were_told(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    log = EventLog(JsonlSink(file))
    steps = [StepCompleted(step=step) for step in (1, 2, 3)]
    lost = WorkerLost(step=2, worker=1, message="")
    for event in (*steps, RolledBack(step=3), RolledBack(step=1), steps[1], lost, RolledBack(step=2)):
        log.publish(event)
    told = [json.loads(line) for line in file.read_text().splitlines()]
    later = [("rollback", 1), ("step", 2), ("lost", 2), ("rollback", 2)]
    assert [(one["kind"], one["step"]) for one in told[3:]] == later


@pytest.mark.parametrize(
    ("cause", "is_condemned"),
    [("ReplicasDiffer", True), ("LanesDiffer", True), ("SettingsDiffer", True), ("PeerLost", False)],
)
def test_another_coordinator_knows_that_replicas_or_lanes_differed(
    tmp_path: Path, cause: str, is_condemned: bool
) -> None:
    log = EventLog(JsonlSink(tmp_path / "events.jsonl"))
    for event in (StepCompleted(step=1), WorkerLost(step=2, worker=1, message="", cause=cause)):
        log.publish(event)
    assert EventLog(JsonlSink(tmp_path / "events.jsonl")).recall(0).is_condemned is is_condemned
