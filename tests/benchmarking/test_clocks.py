"""The arithmetic of times: exchanges of several processes, blocks of steps, events of a run."""

import json
from pathlib import Path

import pytest

from benchmarks.blocks import Blocks
from benchmarks.laps import Laps
from benchmarks.shares import scaling_reading
from benchmarks.spans import Span, durations_ms
from benchmarks.step_events import read_steps, step_times


def test_an_exchange_lasts_from_the_last_arrival_to_the_last_result() -> None:
    early, late = [Span(1.0, 3.0), Span(5.0, 5.5)], [Span(2.0, 2.75), Span(4.0, 5.75)]
    assert durations_ms([early, late]) == [1000.0, 750.0]


def test_processes_that_exchanged_unequally_often_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        durations_ms([[Span(1.0, 2.0)], []])


def test_blocks_end_evenly_and_with_the_last_step() -> None:
    assert Blocks(10, 100).ends == (10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110)
    assert Blocks(2, 3).ends == (2, 3, 4, 5)
    assert Blocks(5, 25).ends[-1] == Blocks(5, 25).total == 30


def test_the_time_of_a_step_is_what_passed_by_the_steps_of_the_block() -> None:
    blocks = Blocks(1, 2)
    seconds = {1: 10.0, 2: 10.5, 3: 12.5}
    assert blocks.ms(seconds) == [500.0, 2000.0]
    assert blocks.mean_ms(seconds) == 1250.0
    assert Blocks(10, 100).ms({step: step * 0.5 for step in range(111)}) == [500.0] * 10


def test_laps_take_the_time_at_the_ends_of_blocks_only() -> None:
    laps = Laps(Blocks(3, 20))
    for _ in range(23):
        laps.complete()
    assert tuple(laps.seconds) == laps.blocks.ends
    assert all(ms >= 0 for ms in laps.blocks.ms(laps.seconds))


def test_a_loop_that_ended_early_has_no_time() -> None:
    laps = Laps(Blocks(1, 2))
    laps.complete()
    with pytest.raises(KeyError):
        laps.blocks.ms(laps.seconds)


def event(step: int, time: float, **seconds: float) -> str:
    phases = {f"{phase}_s": seconds.get(phase, 0.0) for phase in ("data", "compute", "exchange", "apply")}
    return json.dumps({"kind": "step", "step": step, "time": time, **phases})


def test_the_events_of_a_run_tell_the_time_of_its_steps_and_phases(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    lines = [
        json.dumps({"kind": "run", "time": 0.0}),
        event(1, 100.0, compute=50.0),
        event(2, 100.5, data=0.1, exchange=0.2),
        event(3, 102.0, data=0.3, exchange=0.4),
        json.dumps({"kind": "finished", "time": 103.0}),
    ]
    file.write_text("\n".join(lines) + "\n")
    times = step_times(read_steps(file), Blocks(1, 2))
    assert times.ms == [500.0, 1500.0]
    assert times.mean_ms == 1000.0
    assert times.details == pytest.approx(
        {"mean_ms": 1000, "data_ms": 200, "compute_ms": 0, "exchange_ms": 300, "apply_ms": 0, "other_ms": 500}
    )


def test_a_step_of_several_processes_is_as_slow_as_the_slowest() -> None:
    order = {"case": "cnn", "processes": 2, "threads": 1, "warm_up": 1, "steps": 2}
    found = scaling_reading(order, [[[1, 0.0], [2, 1.0], [3, 2.0]], [[1, 0.0], [2, 2.0], [3, 6.0]]])
    assert found["ms"] == [3000.0]
    assert found["details"] == {"mean_ms": 3000.0}
