"""The overlap benchmark: clocks of two workers, the batch it chooses, its ideal, and how it is judged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarking.wired import needs_cables
from benchmarks.calibration import FIRST, LARGEST, calibrated, scaled
from benchmarks.overlap import Overlap, overlap_readings
from benchmarks.own import overlap as own_overlap
from benchmarks.phases import Medians, StepClock, StepPhases, steps_of
from benchmarks.row import Reading, Row, rows_of
from benchmarks.run import Options, measure
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from schemas import validate


def step(wall: float, *, forward: float = 50.0, backward: float = 100.0, exchange: float = 100.0) -> StepPhases:
    return StepPhases(wall, data=1.0, forward=forward, backward=backward, exchange=exchange, apply=10.0)


def readings(*, overlapped: float, plain: StepPhases) -> list[dict[str, Any]]:
    stretches = [(False, [plain] * 2), (True, [step(overlapped, exchange=3.0)] * 3)]
    return overlap_readings("200 Mbit/s", stretches, {"lane_samples": 7})


def rows(*rounds: list[dict[str, Any]]) -> list[Row]:
    return rows_of("overlap", [Reading.of("quorate", fields) for told in rounds for fields in told])


# --- clocks


def test_a_step_lasts_from_the_last_beginning_to_the_last_beginning_of_the_next() -> None:
    early, late = StepClock(1.0, 0, 0, 0, 0, 0), StepClock(1.25, 0, 0, 0, 0, 0)
    following = [StepClock(2.0, 0, 0, 0, 0, 0), StepClock(1.75, 0, 0, 0, 0, 0)]
    assert StepPhases.of([early, late], following).wall == 750.0


def test_a_phase_takes_as_long_as_the_slowest_but_the_exchange_as_the_last_to_come() -> None:
    clocks = [
        StepClock(0.0, data=0.01, forward=0.2, compute=0.5, exchange=0.4, apply=0.02),
        StepClock(0.0, data=0.02, forward=0.1, compute=0.6, exchange=0.3, apply=0.01),
    ]
    found = StepPhases.of(clocks, clocks)
    assert (found.data, found.forward, found.apply) == (20.0, 200.0, 20.0)
    assert found.backward == pytest.approx(500.0)
    assert found.exchange == 300.0


def test_the_first_steps_do_not_count_and_the_last_only_ends_the_one_before() -> None:
    worker = [StepClock(float(number**2), 0, 0, 0, 0, 0) for number in range(5)]
    assert [found.wall for found in steps_of([worker, worker], 2)] == [5000.0, 7000.0]
    with pytest.raises(ValueError, match="shorter"):
        steps_of([worker, worker[:-1]], 2)


# --- the batch


@pytest.mark.parametrize("wanted", [0.004, 0.17, 1.0])
def test_the_batch_takes_the_wanted_time_though_time_does_not_grow_evenly(wanted: float) -> None:
    def seconds_of(samples: int) -> float:
        return 0.0005 + samples * (4e-5 if samples < 2000 else 5e-5)

    assert seconds_of(calibrated(seconds_of, wanted)) == pytest.approx(min(wanted, seconds_of(LARGEST)), rel=0.1)


def test_a_batch_has_a_sample_and_fits_into_memory() -> None:
    assert calibrated(lambda samples: 1.0 * samples, 0.001) == 1
    assert calibrated(lambda samples: 1e-12 * samples, 1.0) == LARGEST
    assert scaled(FIRST, 1.5) == FIRST * 3 // 2


# --- the ideal, and the judgement


@pytest.mark.parametrize(("backward", "exchange", "ideal"), [(100.0, 60.0, 160.0), (60.0, 100.0, 160.0)])
def test_the_ideal_hides_the_shorter_of_backward_and_exchange(backward: float, exchange: float, ideal: float) -> None:
    assert Medians.of([step(0.0, backward=backward, exchange=exchange)]).ideal_ms == ideal


def test_the_ideal_is_that_of_the_phases_without_overlap() -> None:
    overlapped, plain = readings(overlapped=176.0, plain=step(270.0))
    assert (overlapped["system"], plain["system"]) == ("quorate", "quorate-no-overlap")
    assert (overlapped["ms"], plain["ms"]) == ([176.0] * 3, [270.0] * 2)
    assert overlapped["details"]["ideal_ms"] == plain["details"]["ideal_ms"] == 160.0
    assert overlapped["details"]["of_ideal"] == 1.1
    assert (overlapped["details"]["exchange_ms"], plain["details"]["exchange_ms"]) == (3.0, 100.0)
    assert overlapped["details"]["lane_samples"] == 7


@pytest.mark.parametrize(("ms", "verdict"), [(183.0, "met"), (186.0, "missed")])
def test_the_step_with_overlap_is_held_against_the_ideal(ms: float, verdict: str) -> None:
    (judgement,) = judge(TARGETS, "overlap", rows(readings(overlapped=ms, plain=step(270.0))), 2)
    assert judgement.value == pytest.approx(ms / 160)
    assert judgement.verdict == verdict


def test_a_step_without_overlap_does_not_meet_the_target_of_one_with() -> None:
    only_plain = [row for row in rows(readings(overlapped=160.0, plain=step(160.0))) if row.system != "quorate"]
    assert [each.verdict for each in judge(TARGETS, "overlap", only_plain, 2)] == ["not measured"]


def test_a_cable_of_another_speed_says_nothing_about_the_target() -> None:
    found = rows(overlap_readings("1000 Mbit/s", [(False, [step(1.0)]), (True, [step(1.0)])], {}))
    assert [each.verdict for each in judge(TARGETS, "overlap", found, 2)] == ["not measured"]


def test_every_round_is_held_against_its_own_ideal() -> None:
    rounds = [
        readings(overlapped=ideal * 1.1, plain=step(0.0, backward=ideal - 60.0)) for ideal in (160.0, 260.0, 360.0)
    ]
    found = rows(*rounds)
    assert found[0].details["of_ideal"] == pytest.approx(1.1)
    assert found[0].details["ideal_ms"] == 260.0


def test_the_phases_and_the_ideal_are_told_to_people() -> None:
    (found, _) = rows(readings(overlapped=176.0, plain=step(270.0)))
    assert Overlap().remarks(found) == {
        "forward": "50.0",
        "backward": "100.0",
        "exchange": "3.0",
        "apply": "10.0",
        "ideal": "160.0",
        "of ideal": "1.10×",
    }


# --- the script


def test_stretches_with_and_without_overlap_take_turns() -> None:
    (turn,) = Overlap(stretches=2).turns()
    assert turn.order["stretches"] == [False, True, False, True]
    assert [system.name for system in turn.systems] == ["quorate", "quorate-no-overlap"]
    assert (turn.label, turn.order["mbit"]) == ("quorate, 200 Mbit/s", 200.0)


def test_other_bits_with_overlap_are_noticed() -> None:
    own_overlap.check_bits(["a", "a", "a", "a"])
    with pytest.raises(SystemExit, match="different weights"):
        own_overlap.check_bits(["a", "a", "b", "a"])


def test_who_may_not_make_namespaces_is_told_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.interpreters.effective_rights", frozenset)
    monkeypatch.setattr("benchmarks.interpreters.find_program", lambda name: f"/usr/sbin/{name}")
    report = measure(Overlap(), Options(rounds=1))
    document = report.to_document()
    assert (report.status, report.exit_code, document["rows"]) == ("complete", 0, [])
    assert [told["what"] for told in document["not_measured"]] == ["quorate", "quorate-no-overlap"]
    assert all("needs root" in told["reason"] and "sudo" in told["command"] for told in document["not_measured"])
    assert [told["verdict"] for told in document["targets"]] == ["not measured"]
    validate("bench", json.loads(json.dumps(document)))


@pytest.mark.long
@needs_cables
def test_both_workers_train_with_and_without_overlap(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (turn,) = Overlap(mbit=2000, stretches=1, warm_up=1, steps=3).turns()
    monkeypatch.setattr(sys, "argv", ["script", json.dumps({**turn.order, "folder": str(tmp_path)})])
    own_overlap.main()
    assert list(tmp_path.iterdir()) == [], "the next round has the same folder"
    told = json.loads(capfd.readouterr().out)["readings"]
    assert [each["system"] for each in told] == ["quorate", "quorate-no-overlap"]
    for each in told:
        details = each["details"]
        assert (each["case"], each["processes"], len(each["ms"])) == ("2000 Mbit/s", 2, 3)
        assert min(details[f"{phase}_ms"] for phase in ("data", "forward", "backward", "exchange", "apply")) > 0
        assert each["ms"][0] > 0
        assert details["lane_samples"] >= 1
    plain = told[1]["details"]
    longer = max(plain["backward_ms"], plain["exchange_ms"])
    assert plain["ideal_ms"] == pytest.approx(plain["forward_ms"] + longer + plain["apply_ms"])
