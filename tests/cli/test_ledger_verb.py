"""`quorate show --ledger` on runs of the real command: on one worker and on two, under faults, killed and resumed."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from schemas import validate

# 32 samples: three steps an epoch, and two samples dropped.
KEYS: dict[str, Any] = {"batch_size": 10, "steps": 11, "checkpoint": {"every": 4, "keep": 3}}

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder in which the job has run on one worker."""
    shared = Workplace(tmp_path_factory.mktemp("ledger"))
    shared.write_job(**KEYS)
    done = shared.train("--workers", "1", "--json")
    assert done.code == 0, done.stderr
    yield shared
    shared.clean_up()
    shared.assert_nobody_left()


def ledger_of(place: Workplace, run: str = "last", code: int = 0) -> dict[str, Any]:
    done = place.run("show", run, "--ledger", "--json")
    assert done.code == code, f"{done.stdout}\n{done.stderr}"
    validate("show", done.document)
    found: dict[str, Any] = done.document["ledger"]
    assert found["whole"] is (code == 0)
    return found


def told(place: Workplace, run: Path) -> dict[int, str]:
    """The ledger of each step; a step that is told twice must tell the same."""
    steps: dict[int, str] = {}
    for event in place.events(run):
        if event["kind"] == "step":
            assert steps.setdefault(event["step"], event["ledger"]) == event["ledger"]
    return steps


def assert_whole(ledger: dict[str, Any]) -> None:
    assert [epoch["status"] for epoch in ledger["epochs"]] == ["whole", "whole", "whole", "incomplete"]
    assert [len(epoch["dropped"]) for epoch in ledger["epochs"]] == [2, 2, 2, 0]
    assert ledger["not_compared"] is None


@pytest.mark.long
def test_on_one_worker_and_on_two_each_step_tells_the_same(place: Workplace) -> None:
    alone = place.runs()[0]
    assert place.train("--workers", "2", "--json").code == 0
    assert_whole(ledger_of(place, alone.name))
    assert ledger_of(place) == ledger_of(place, alone.name)
    assert told(place, place.last) == told(place, alone)
    assert sorted(told(place, alone)) == list(range(1, 12))


@pytest.mark.long
def test_after_a_kill_and_after_the_loss_of_everybody_it_is_whole(place: Workplace) -> None:
    faults = ("kill worker 0 at step 6 in exchange", "kill all at step 10")
    given = [word for fault in faults for word in ("--fault", fault)]
    command = ("chaos", "job.yaml", "--workers", "2", "--against", place.runs()[0].name, "-q", "--json", *given)
    done = place.run(*command)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert [fault["fired"] for fault in done.document["faults"]] == [True, True]
    assert done.document["ledger_whole"]
    assert_whole(ledger_of(place))
    assert told(place, place.last) == told(place, place.runs()[0])


@pytest.mark.long
def test_a_run_that_was_killed_with_its_launcher_and_resumed_is_whole(place: Workplace) -> None:
    # Each worker hosts two lanes: it stays in step 8, at the latest.
    running = place.start("train", "job.yaml", "--workers", "2", "-q", HOLD="15")
    running.await_event("step", at_least=6)
    os.kill(running.process.pid, signal.SIGKILL)
    running.done()
    place.assert_nobody_left()
    assert ledger_of(place)["epochs"][-1]["last_step"] < KEYS["steps"]
    assert place.run("resume", "last", "-q").code == 0
    ledger = ledger_of(place)
    assert_whole(ledger)
    assert ledger["steps_told_again"] >= 1
    assert told(place, place.last) == told(place, place.runs()[0])


def test_people_get_a_table_and_a_verdict(place: Workplace) -> None:
    run = place.runs()[0]
    done = place.run("show", run.name, "--ledger")
    assert (done.code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    dropped = [event["dropped"] for event in place.events(run) if "dropped" in event]
    assert lines[0] == f"{run.name}  ledger whole"
    assert lines[1].split() == ["epoch", "steps", "samples", "status", "dropped"]
    assert lines[2].split(maxsplit=4) == ["0", "1-3", "30", "whole", ", ".join(map(str, dropped[0]))]
    assert lines[5].split() == ["3", "10-11", "20", "incomplete", "-"]
    assert lines[6].startswith("Whole: each of 32 samples was used exactly once in each of 3 epochs, but for those")


def test_a_broken_one_is_told_with_its_place_and_an_exit_code(place: Workplace) -> None:
    run = place.runs()[0]
    events = run / "events.jsonl"
    sound = events.read_text()
    lines = [json.loads(line) for line in sound.splitlines()]
    fifth = next(line for line in lines if line["kind"] == "step" and line["step"] == 5)
    fifth["ledger"] = "0" * 32
    try:
        events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        ledger = ledger_of(place, run.name, code=1)
        assert [epoch["status"] for epoch in ledger["epochs"]] == ["whole", "broken", "whole", "incomplete"]
        done = place.run("show", run.name, "--ledger")
        assert done.code == 1
        assert done.stdout.startswith(f"{run.name}  ledger broken\n")
        assert "Broken in epoch 1: step 5 did not use the samples that the order of the job gives it." in done.stdout
    finally:
        events.write_text(sound)


def test_a_run_without_a_ledger_is_refused(place: Workplace) -> None:
    run = place.runs()[0]
    events = run / "events.jsonl"
    sound = events.read_text()
    lines = [json.loads(line) for line in sound.splitlines()]
    try:
        events.write_text(
            "".join(json.dumps({k: v for k, v in line.items() if k != "ledger"}) + "\n" for line in lines)
        )
        done = place.run("show", run.name, "--ledger", "--json")
        assert done.code == 2
        assert f"run {run.name} has no ledger" in done.error
        validate("error", done.document)
    finally:
        events.write_text(sound)
