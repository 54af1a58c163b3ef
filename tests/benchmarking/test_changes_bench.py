"""The changes benchmark: pauses around a change, the real thing, and rounds that do not see each other's runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.changes import SIGTERM, Changes, Pause, resize_case
from benchmarks.own import changes as own_changes
from benchmarks.own import recovery as own_recovery
from benchmarks.own.watched_run import WatchedRun, await_sight
from benchmarks.row import Row
from benchmarks.run import Options, measure
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from schemas import validate


def moments(*gaps: float, start: float = 100.0) -> list[float]:
    found = [start]
    for gap in gaps:
        found.append(found[-1] + gap)
    return found


# --- pauses


def test_the_longest_pause_counts_beyond_the_longer_usual_step() -> None:
    told = moments(*[0.2] * 6, 0.25, *[0.1] * 6)
    pause = Pause.around(told, told[6] + 0.01, told[-1] + 0.01)
    assert (pause.before, pause.after, pause.longest) == pytest.approx((200, 100, 250))
    assert pause.beyond == pytest.approx(50)


def test_steps_that_take_longer_afterwards_are_not_the_cost_of_the_change() -> None:
    told = moments(*[0.1] * 6, *[0.4] * 7)
    assert Pause.around(told, told[6] + 0.01, told[-1] + 0.01).beyond == pytest.approx(0, abs=1e-6)


def test_what_happens_before_or_after_the_change_does_not_count() -> None:
    told = moments(0.9, *[0.1] * 12, 0.9)
    assert Pause.around(told, told[7] + 0.01, told[-2] + 0.01).longest == pytest.approx(100)


def test_a_change_without_steps_around_it_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no step was complete before the change"):
        Pause.around(moments(0.1, 0.1), 0.0, 1.0)


# --- the judgement


def changed(case: str, worst: float, lost: float = 0.0) -> Row:
    return Row(
        "changes", case, "quorate", 3, 1, None, worst, (worst,), details={"worst_ms": worst, "lost_workers": lost}
    )


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        ([changed("resize 2→4", 20), changed("resize 4→1", 99), changed(SIGTERM, 100)], ["met", "met", "met"]),
        ([changed("resize 2→4", 101), changed("resize 4→1", 5), changed(SIGTERM, 5, 1)], ["missed", "met", "missed"]),
        ([], ["not measured"] * 3),
    ],
)
def test_the_worst_change_is_held_against_one_step(rows: list[Row], verdicts: list[str]) -> None:
    assert [judgement.verdict for judgement in judge(TARGETS, "changes", rows, 2)] == verdicts


# --- a run in a folder of its own


def event(kind: str, time: float, **fields: Any) -> str:
    return json.dumps({"kind": kind, "time": time, **fields}) + "\n"


def told(run: WatchedRun, *lines: str, pids: str = "") -> None:
    folder = run.runs / "job-0001"
    (folder / "logs").mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "logs" / "fork_server.jsonl").write_text(pids)


def test_a_run_does_not_see_what_an_earlier_round_has_left(tmp_path: Path) -> None:
    job = {"name": "job", "steps": 1}
    first, second = WatchedRun(str(tmp_path), job), WatchedRun(str(tmp_path), job)
    told(first, event("step", 1.0, step=1), pids="worker 0 is process 17\n")
    assert (first.pids(), len(first.events())) == ({0: 17}, 1)
    assert (second.pids(), second.events(), second.members()) == ({}, [], [])
    assert json.loads((Path(second.command()[4])).read_text())["runs"] == str(second.runs)


def test_torchrun_begins_anew_in_every_round(tmp_path: Path) -> None:
    order = {"processes": 2, "step_ms": 50, "folder": str(tmp_path)}
    folders = {own_recovery.Torchrun(order).command()[-2] for _ in range(2)}
    assert len(folders) == 2
    assert all(Path(folder).is_dir() for folder in folders)


def test_a_run_is_steady_in_a_generation_that_was_formed_since_and_has_its_steps(tmp_path: Path) -> None:
    run = WatchedRun(str(tmp_path), {"name": "job"})
    members = [{"worker": 0}, {"worker": 3}]
    lines = [event("generation", 1.0, members=members), *(event("step", 1.0 + step, step=step) for step in (1, 2, 3))]
    told(run, *lines, '{"kind": "st', pids="worker 3 is process 5\nworker 3 is process 7\n")
    assert run.members() == [0, 3]
    assert run.pids() == {3: 7}
    assert run.is_steady(2, 3)
    assert not run.is_steady(2, 4)
    assert not run.is_steady(1, 3)
    assert not run.is_steady(2, 3, since=2.0)
    assert run.name == "job-0001"


def test_a_command_that_ends_is_not_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="ended with code 3 while waiting until it trains"):
        await_sight("it trains", lambda: False, process)


# --- the real thing


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("unmeasured")
def test_a_job_is_resized_and_its_workers_leave() -> None:
    report = measure(Changes(sizes=(1, 2), step_ms=20), Options(rounds=1))
    assert report.absences == []
    assert [line.row.case for line in report.lines] == [resize_case(1, 2), SIGTERM]
    assert [len(line.remarks) for line in report.lines] == [5, 5]
    assert {line.row.details["lost_workers"] for line in report.lines} == {0.0}
    validate("bench", json.loads(json.dumps(report.to_document())))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("unmeasured")
def test_workers_are_killed_in_a_second_round_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    kill = os.kill

    def noted(process: int, number: int) -> None:
        kill(process, number)
        if number == signal.SIGKILL:
            killed.append(process)

    monkeypatch.setattr("benchmarks.own.recovery.os.kill", noted)
    order = {"system": "quorate", "processes": 2, "step_ms": 20, "kills": 1, "folder": str(tmp_path)}
    monkeypatch.setattr(sys, "argv", ["script", json.dumps(order)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for _ in range(2):
            own_recovery.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert len(set(killed)) == 2
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [len(answer["readings"][0]["ms"]) for answer in answers] == [1, 1]


def test_whoever_left_on_request_is_not_lost(tmp_path: Path) -> None:
    run = WatchedRun(str(tmp_path), {"name": "job"})
    steps = [event("step", moment, step=step) for step, moment in enumerate(moments(*[0.2] * 20), 1)]
    told(run, *steps, event("lost", 101.9, worker=1), event("lost", 103.9, worker=1))
    change = own_changes.Change(SIGTERM, 3, began=101.5, ended=103.5)
    found = own_changes._reading(run, [change])
    assert found["details"]["lost_workers"] == 1
    assert found["ms"] == pytest.approx([0.0], abs=1e-3)
