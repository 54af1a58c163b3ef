"""Bounded and asynchronous jobs whose processes are killed, stopped and resized: each sample is applied once."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from command import Running, Workplace, await_condition

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

STEPS = 48

SOURCE = """
import os, time
from pathlib import Path
import torch, torch.nn.functional as F
from torch import nn
import quorate

class Slow(quorate.Task):
    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def datasets(self):
        inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        points = [(each, each.sum()) for each in inputs]
        return points, points[:8]

    def loss(self, model, batch):
        if not Path("go").exists():
            time.sleep(float(os.environ.get("SLOW", "0")))
        return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)
"""

BOUNDED = {"mode": "bounded", "staleness": 2}
ASYNCHRONOUS = {"mode": "asynchronous"}


@pytest.fixture
def place(tmp_path: Any) -> Iterator[Workplace]:
    shared = Workplace(tmp_path)
    shared.task.write_text(SOURCE)
    yield shared
    shared.clean_up()
    shared.assert_nobody_left()


def start(place: Workplace, strategy: dict[str, Any], *arguments: str, **keys: Any) -> Running:
    """It dawdles until the file `go`, and has come to the middle of a segment."""
    place.write_job(
        task="task.py:Slow",
        batch_size=16,
        steps=STEPS,
        workers=2,
        strategy={"kind": "parameter-server", "servers": 2, **strategy},
        **{"checkpoint": {"every": 16, "keep": 3}, "evaluate": {"every": 16}} | keys,
    )
    running = place.start("train", "job.yaml", "--json", *arguments, SLOW="0.2")
    running.await_event("step", at_least=3)
    return running


def pid_of(place: Workplace, process: str) -> int:
    return int(place.log_records(process)[-1]["pid"])


def assert_whole(place: Workplace) -> None:
    """Every step is told once, and every sample was applied once an epoch."""
    steps = [event["step"] for event in place.events() if event["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    shown = place.run("show", "last", "--ledger", "--json")
    assert shown.code == 0, shown.stderr
    ledger = shown.document["ledger"]
    assert ledger["whole"], ledger
    assert all(epoch["status"] == "whole" for epoch in ledger["epochs"])


def finish(place: Workplace, running: Running) -> dict[str, Any]:
    place.go()
    done = running.done()
    assert done.code == 0, done.error
    assert_whole(place)
    return done.document


def assert_went_on(place: Workplace, running: Running, victim: str, strategy: dict[str, Any]) -> None:
    told = max(event["step"] for event in place.events() if event["kind"] == "step")
    os.kill(pid_of(place, victim), signal.SIGKILL)
    running.await_event("lost")
    running.await_event("step", at_least=told + 2)
    document = finish(place, running)
    (recovery,) = document["recoveries"]
    assert recovery["steps_lost"] == 0
    if strategy is BOUNDED:
        observed = [event for event in place.events() if event["kind"] == "staleness"]
        assert observed
        assert all(event.get("gap", 0) <= event["bound"] == 2 for event in observed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "strategy"),
    [
        ("worker-0", BOUNDED),
        pytest.param("worker-1", ASYNCHRONOUS, marks=pytest.mark.long),
        ("server-0", ASYNCHRONOUS),
        pytest.param("server-1", BOUNDED, marks=pytest.mark.long),
        pytest.param("server-0", BOUNDED, marks=pytest.mark.long),
        pytest.param("server-1", ASYNCHRONOUS, marks=pytest.mark.long),
    ],
)
def test_whoever_is_killed_in_the_middle_of_a_segment_nothing_is_lost_or_applied_twice(
    place: Workplace, victim: str, strategy: dict[str, Any]
) -> None:
    assert_went_on(place, start(place, strategy), victim, strategy)


@pytest.mark.long
def test_the_coordinator_is_killed_in_the_middle_of_a_segment(place: Workplace) -> None:
    running = start(place, ASYNCHRONOUS)
    os.kill(pid_of(place, "coordinator"), signal.SIGKILL)
    running.await_event("coordinator")
    assert finish(place, running)["recoveries"] == []


@pytest.mark.long
def test_one_after_the_other_is_killed(place: Workplace) -> None:
    running = start(place, ASYNCHRONOUS)
    for victim in ("server-0", "worker-1", "server-1", "server-0"):
        known = pid_of(place, victim)
        lost = len([event for event in place.events() if event["kind"] == "lost"])
        os.kill(known, signal.SIGKILL)

        def is_back(victim: str = victim, known: int = known, lost: int = lost) -> bool:
            assert running.process.poll() is None, running.process.communicate()
            told = place.events()
            number = int(victim[-1]) + (1_000_000 if victim.startswith("server") else 0)
            formed = [event for event in told if event["kind"] == "generation"][-1]
            members = [*(member["worker"] for member in formed["members"]), *formed.get("servers", ())]
            # It has got what it is to hold, if a step was completed with it.
            steps = [event for event in told if event["kind"] == "step" and event["time"] > formed["time"]]
            return (
                len([event for event in told if event["kind"] == "lost"]) > lost
                and number in members
                and pid_of(place, victim) != known
                and bool(steps)
            )

        await_condition(f"{victim} to be back", is_back)
    finish(place, running)


@pytest.mark.long
def test_a_job_that_is_stopped_in_the_middle_of_a_segment_goes_on_where_it_was(place: Workplace) -> None:
    running = start(place, BOUNDED)
    running.interrupt()
    done = running.done()
    assert done.code == 130, done.stderr
    stopped = place.result()["steps"]
    # At the furthest step that was dealt: nobody waits for the next evaluation or save.
    assert 3 <= stopped < 16
    place.go()
    resumed = place.run("resume", "last", "--json")
    assert resumed.code == 0, resumed.stderr
    assert_whole(place)


@pytest.mark.long
def test_a_job_grows_and_is_saved_in_the_middle_of_a_segment(place: Workplace) -> None:
    running = start(place, ASYNCHRONOUS)
    assert place.start("checkpoint", "last").done().code == 0
    saved = running.await_event("checkpoint")
    assert saved["step"] % 16
    assert place.start("resize", "last", "--workers", "3").done().code == 0

    def has_grown() -> bool:
        assert running.process.poll() is None, running.process.communicate()
        formed = [event for event in place.events() if event["kind"] == "generation"]
        return len(formed[-1]["members"]) == 3

    await_condition("three workers", has_grown)
    finish(place, running)


def test_servers_come_and_go_in_the_middle_of_a_segment(place: Workplace) -> None:
    running = start(place, ASYNCHRONOUS)
    for count in (3, 1):
        assert place.start("resize", "last", "--servers", str(count)).done().code == 0

        def are_there(count: int = count) -> bool:
            assert running.process.poll() is None, running.process.communicate()
            formed = [event for event in place.events() if event["kind"] == "generation"]
            return len(formed[-1]["servers"]) == count

        await_condition(f"{count} servers", are_there)
    assert finish(place, running)["recoveries"] == []
    generations = [event for event in place.events() if event["kind"] == "generation"]
    # One to let the third in, one in which two give what they hold, and one without them.
    assert len(generations) <= 5
