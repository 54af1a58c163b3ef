"""The benchmark on a Ray cluster: what its rows are held against."""

import pytest

from benchmarks.on_ray import FIRST_STEP, JOINED, LOST, METRICS, ROWS, OnRay, crowd_case
from benchmarks.row import Reading, Row, rows_of
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from benchmarks.told import reading

BENCH = OnRay(list(ROWS))


def told(system: str, case: str, ms: float, **details: float) -> list[Row]:
    return rows_of("ray", [Reading.of(system, reading(case, 2, [ms], details=details))])


def verdicts(*rows: list[Row]) -> dict[str, str]:
    explained = BENCH.explained([row for each in rows for row in each])
    return {each.target.text: each.verdict for each in judge(TARGETS, "ray", explained, 2)}


def test_each_row_has_a_case_of_its_own() -> None:
    cases = [turn.what for turn in BENCH.turns()]
    assert set(cases) == {FIRST_STEP, LOST, METRICS, crowd_case(64)}
    assert [turn.what for turn in OnRay(["crowd"], workers=8).turns()] == ["8 workers on 4 nodes"]


@pytest.mark.parametrize(("ms", "verdict"), [(9_900.0, "met"), (10_100.0, "missed")])
def test_a_start_is_held_against_a_local_one(ms: float, verdict: str) -> None:
    found = verdicts(told("quorate-ray", FIRST_STEP, ms), told("quorate-local", FIRST_STEP, 5_000.0))
    assert found["command to first step: times of a local job's"] == verdict


@pytest.mark.parametrize(("ms", "verdict"), [(50.4, "met"), (50.6, "missed")])
def test_metrics_are_held_against_steps_without(ms: float, verdict: str) -> None:
    found = verdicts(told("quorate-ray", METRICS, 50.0), told("quorate-ray-tracked", METRICS, ms))
    assert found["metrics of every step: % slower"] == verdict


def test_nodes_and_crowd_are_held_against_the_clock_and_memory() -> None:
    found = verdicts(
        told("quorate-ray", LOST, 2_100.0, next_step_ms=2_100.0),
        told("quorate-ray", JOINED, 900.0, used_ms=900.0),
        told("quorate-ray", crowd_case(64), 20_000.0, formed_ms=20_000.0, together_mb=301.0),
    )
    assert found["one of 3 nodes killed: ms to the next step"] == "missed"
    assert found["another node added: ms until it is used"] == "met"
    assert found["64 workers on 4 nodes: ms until they are formed"] == "met"
    assert found["64 workers on 4 nodes: MB of launcher and coordinator"] == "missed"


def test_a_crowd_of_another_size_says_nothing_about_the_target() -> None:
    found = verdicts(told("quorate-ray", crowd_case(8), 1.0, formed_ms=1.0, together_mb=1.0))
    assert found["64 workers on 4 nodes: ms until they are formed"] == "not measured"
