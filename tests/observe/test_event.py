"""An event survives its line, whatever numbers and names it holds, and lines of other versions stay readable."""

import json
import math
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from made_events import EVERY, fields_of, make_event
from quorate.history.ledger import Account
from quorate.history.timeline import Timeline
from quorate.observe.event import KINDS, VERSION, Event, UnknownEvent
from quorate.observe.events import GenerationFormed, Resized, RunBegan, RunFailed, StepCompleted, WorkerLost, read_event
from schemas import validate

ROOT = Path(__file__).resolve().parents[2]
EARLIER = Path(__file__).with_name("events_before_versions.jsonl")
LATER = Path(__file__).with_name("events_of_a_later_version.jsonl")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_kind_is_here() -> None:
    assert {type(event) for event in EVERY} == set(KINDS.values())


@pytest.mark.parametrize("event", EVERY, ids=lambda event: event.kind)
def test_every_kind_comes_back_from_its_line_and_is_as_the_schema_says(event: Event) -> None:
    back = read_event(event.to_json())
    assert back.to_record() == event.to_record()
    assert back == event or isinstance(event, RunFailed)
    record = json.loads(event.to_json())
    assert (record["kind"], record["version"]) == (event.kind, VERSION)
    validate("events", record)


def test_the_schema_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "event_schema.py"))
    assert (ROOT / "docs" / "json" / "events.schema.json").read_text() == script["text"](), (
        "run scripts/event_schema.py"
    )


@pytest.mark.parametrize("record", [{"kind": "step", "time": 1.0}, {"kind": "lost", "time": 1.0, "worker": "one"}])
def test_the_schema_tells_what_is_wrong(record: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate("events", record)


FIELDS: list[dict[str, Any]] = [
    {"loss": 0.1 + 0.2, "norm": 1e-310, "samples": 32},
    {"loss": math.nan, "norm": -math.inf},
    {"best": None, "text": "it is null here"},
    {"large": 2**70, "name": "\ud800 ä"},
    {"metrics": {"a": {"b": [1.5, None]}}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_line_keeps_what_its_kind_does_not_know(fields: dict[str, Any]) -> None:
    event = make_event("step", 3, fields, time=12.345678)
    line = event.to_json()
    assert repr(read_event(line)) == repr(event), "by repr, in which NaN equals itself"
    assert repr(sorted(fields_of(event).items())) == repr(sorted(fields.items()))
    assert line.startswith('{"kind":"step",'), "which is how a glance at a file knows a step"


def test_an_event_of_no_step_has_none() -> None:
    assert "step" not in json.loads(RunBegan().to_json())


def test_what_is_of_another_type_counts_as_not_told() -> None:
    odd = {"worker": "one", "message": 3, "cause": None, "detect_s": "soon", "phase": "compute"}
    event = make_event("lost", 5, odd, 1.0)
    passed_over = {name: value for name, value in odd.items() if name != "phase"}
    assert event == WorkerLost(step=5, time=1.0, phase="compute", extra=passed_over)
    generation = make_event("generation", None, {"members": [{"worker": True}], "lanes": 3}, 1.0)
    assert isinstance(generation, GenerationFormed)
    assert (generation.members, generation.lanes) == (None, 3)


class TestEarlierVersions:
    def test_every_line_is_read_and_written_as_it_was(self) -> None:
        for line, record in zip(EARLIER.read_bytes().splitlines(), lines(EARLIER), strict=True):
            event = read_event(line)
            assert not isinstance(event, UnknownEvent)
            assert event.extra is None
            assert event.to_record() == {**record, "version": VERSION}
            validate("events", record)

    def test_it_tells_what_it_told(self) -> None:
        timeline = Timeline.read(EARLIER)
        assert timeline.unreadable_lines == 0
        assert {"step", "run", "generation", "evaluation", "checkpoint", "lost", "failure"} <= timeline.counts.keys()
        assert timeline.counts == Counter(each["kind"] for each in lines(EARLIER))
        (recovery,) = timeline.recoveries
        assert recovery.refill_s is not None
        account = Account.read(EARLIER)
        assert account.steps.keys() == timeline.steps.keys()
        assert account.without == 0


class TestLaterVersions:
    def test_known_kinds_are_read_as_far_as_they_are_known(self) -> None:
        events = [read_event(line) for line in LATER.read_bytes().splitlines()]
        assert [type(event).__name__ for event in events] == [
            "GenerationFormed",
            "RunBegan",
            "StepCompleted",
            "UnknownEvent",
            "StepCompleted",
            "UnknownEvent",
            "RunFinished",
        ]
        step = events[2]
        assert isinstance(step, StepCompleted)
        assert (step.losses, step.extra) == ({"": 0.5}, {"energy_j": 12.5, "samples": {"local": 4, "remote": 4}})
        assert step.samples is None, "which is of another type there"

    def test_unknown_kinds_keep_their_record(self) -> None:
        for record in lines(LATER):
            event = read_event(json.dumps(record))
            if isinstance(event, UnknownEvent):
                assert json.loads(event.to_json()) == record
                assert (event.kind, event.step) == (record["kind"], record.get("step"))

    def test_they_are_counted_and_hinder_nobody(self) -> None:
        timeline = Timeline.read(LATER)
        assert (timeline.position, timeline.total_steps, timeline.unreadable_lines) == (2, 2, 0)
        assert timeline.counts["preempted"] == 1
        assert {*Timeline.glance(LATER).counts} == {*timeline.counts}


def test_one_of_something_is_said_in_the_singular() -> None:
    assert Resized(before=2, workers=2, servers=1).said == "1 server"
    assert Resized(before=2, workers=1, servers=3).said == "1 worker instead of 2, and 3 servers"
