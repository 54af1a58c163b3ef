"""An event survives its line, whatever numbers and names it holds."""

import json
import math

import pytest

from quorate.observe.event import Event

FIELDS = [
    {"loss": 0.1 + 0.2, "norm": 1e-310, "samples": 32},
    {"loss": math.nan, "norm": -math.inf},
    {"best": None, "text": "it is null here"},
    {"large": 2**70, "name": "\ud800 ä"},
    {"metrics": {"a": {"b": [1.5, None]}}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_line_tells_the_same_event_in_the_same_form(fields: dict[str, object]) -> None:
    event = Event("step", 3, fields, time=12.345678)
    line = event.to_json()
    assert repr(Event.from_json(line)) == repr(event), "by repr, in which NaN equals itself"
    assert line.startswith('{"kind":"step",'), "which is how a glance at a file knows a step"


def test_an_event_of_no_step_has_none() -> None:
    assert "step" not in json.loads(Event("run").to_json())
