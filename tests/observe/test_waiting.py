"""Waiting for data: how much of a step it is, when that is worth a word, and the knobs that are named."""

import io
from typing import Any

import pytest

from quorate.observe.event import Event
from quorate.observe.summary import print_summary
from quorate.observe.waiting import DataWait, DataWaitLog, Knobs


def step(number: int, data: Any, compute: float = 0.5, exchange: float = 0.25, apply: float = 0.25) -> Event:
    fields = {"data_s": data, "compute_s": compute, "exchange_s": exchange, "apply_s": apply}
    return Event("step", number, fields, float(number))


def waited(*events: Event) -> DataWait:
    log = DataWaitLog()
    for event in events:
        log.take_in(event)
    return log.wait


def test_waiting_is_held_against_all_phases_of_the_steps() -> None:
    wait = waited(Event("run"), *(step(number, 1.0) for number in range(1, 4)))
    assert (wait.waited_s, wait.step_s, wait.share) == (2.0, 4.0, 0.5)


def test_the_first_step_of_each_generation_is_left_out() -> None:
    begin = [Event("generation"), Event("run"), step(1, 9.0), step(2, 0.0)]
    again = [Event("generation"), step(3, 9.0), step(4, 0.0)]
    assert waited(*begin, *again) == DataWait(0.0, 2.0)
    assert waited(*begin, *again[1:]) == DataWait(9.0, 12.0)


def test_without_steps_nothing_was_waited_for() -> None:
    assert waited(Event("run"), step(1, 3.0)).share == 0.0


@pytest.mark.parametrize("odd", [None, "1", True, -1.0, [1]])
def test_what_is_no_duration_counts_as_none(odd: Any) -> None:
    assert waited(step(1, 1.0), step(2, odd)) == DataWait(0.0, 1.0)


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        (DataWait(6.0, 100.0), True),
        (DataWait(5.0, 100.0), False),
        (DataWait(0.9, 1.0), False),
        (DataWait(0.0, 0.0), False),
    ],
)
def test_only_what_is_worth_it_is_told(wait: DataWait, told: bool) -> None:
    assert wait.is_worth_telling == told


@pytest.mark.parametrize(
    ("knobs", "advice"),
    [
        (Knobs.of(0, 2, None), "more loader_workers (now 0) may help"),
        (Knobs.of(3, 2, None), "more loader_workers (now 3) or a larger loader_prefetch (now 2) may help"),
        (
            Knobs.of(0, 2, {"window": 8192, "index": "s3://bucket/index.quorate"}),
            "more loader_workers (now 0), cache= of quorate.Shards or a smaller window= of it (now 8,192) may help",
        ),
        (Knobs.of(0, 2, {"window": "8192"}), "more loader_workers (now 0) may help"),
    ],
)
def test_the_knobs_that_there_are_are_named_with_their_values(knobs: Knobs, advice: str) -> None:
    assert knobs.advice == advice


def test_the_summary_has_a_line_for_it() -> None:
    stream = io.StringIO()
    waiting = {"share": 0.314, "seconds": 12.0, "advice": Knobs(0, 2).advice}
    print_summary({"run": "a-0001", "status": "complete", "waiting_for_data": waiting}, stream)
    assert "  waiting     for data, 31% of a step: more loader_workers (now 0) may help" in stream.getvalue()
