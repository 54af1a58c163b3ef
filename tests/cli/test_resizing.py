"""Workers that come and go while a job runs, by the real command: nobody fails, and the bits are the same."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from command import Running, Workplace, await_condition
from schemas import validate

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

SLOWLY = "0.2"  # seconds a lane until the file `go`: time for whatever is to happen


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    shared = Workplace(tmp_path_factory.mktemp("resizing"))
    shared.write_job(steps=100, evaluate={"every": "end"}, checkpoint={"every": 50, "keep": 2})
    yield shared
    shared.clean_up()
    shared.assert_nobody_left()


@pytest.fixture(scope="module")
def reference(place: Workplace) -> str:
    done = place.train("--workers", "1", "--json")
    assert done.code == 0, done.stderr
    digest: str = done.document["weights_digest"]
    return digest


def start(place: Workplace, workers: int, *arguments: str) -> Running:
    (place.folder / "go").unlink(missing_ok=True)
    running = place.start("train", "job.yaml", "--workers", str(workers), "--json", *arguments, SLOW=SLOWLY)
    running.await_event("step", at_least=1)
    return running


def members(place: Workplace) -> list[list[int]]:
    """Who belonged to each generation so far."""
    formed = [event for event in place.events() if event["kind"] == "generation"]
    return [[member["worker"] for member in event["members"]] for event in formed]


def await_members(place: Workplace, running: Running, *workers: int) -> None:
    def are_together() -> bool:
        assert running.process.poll() is None, running.process.communicate()
        return members(place)[-1] == list(workers)

    await_condition(f"a generation of {workers}", are_together)


def finish(place: Workplace, running: Running) -> dict[str, Any]:
    place.go()
    done = running.done()
    assert done.code == 0, done.error
    place.assert_nobody_left()
    return done.document


def resize(place: Workplace, workers: int) -> None:
    # Not by `run`, which waits until nobody is left.
    done = place.start("resize", "last", "--workers", str(workers), "--json").done()
    assert done.code == 0, done.stderr
    validate("resize", done.document)
    assert done.document == {"run": place.last.name, "workers": workers}


@pytest.mark.long
def test_a_job_that_is_resized_again_and_again_ends_with_the_same_bits(place: Workplace, reference: str) -> None:
    running = start(place, 2)
    resize(place, 4)
    await_members(place, running, 0, 1, 2, 3)
    resize(place, 1)
    await_members(place, running, 0)
    resize(place, 3)
    await_members(place, running, 0, 1, 2)
    document = finish(place, running)
    assert (document["weights_digest"], document["recoveries"]) == (reference, [])
    steps = [event["step"] for event in place.events() if event["kind"] == "step"]
    assert sorted(steps) == list(range(1, 101)), "no step is done twice"
    resizes = [(event["before"], event["workers"]) for event in place.events() if event["kind"] == "resize"]
    assert resizes == [(2, 4), (4, 1), (1, 3)]


@pytest.mark.long
def test_a_worker_that_is_asked_to_leave_hands_over_and_is_no_failure(place: Workplace, reference: str) -> None:
    running = start(place, 3)
    leaver = place.workers()[1]
    os.kill(leaver, signal.SIGTERM)
    await_condition("a generation without it", lambda: len(members(place)) > 1)
    assert len(members(place)[1]) == 2
    await_condition("the end of its process", lambda: leaver not in place.workers())
    await_members(place, running, 0, 1, 2)
    document = finish(place, running)
    assert (document["weights_digest"], document["recoveries"]) == (reference, [])
    assert not [event for event in place.events() if event["kind"] == "lost"]


def test_the_only_worker_saves_before_it_leaves(place: Workplace, reference: str) -> None:
    running = start(place, 1)
    os.kill(place.workers()[0], signal.SIGTERM)
    saved = running.await_event("checkpoint")
    await_condition("another in its place", lambda: len(members(place)) == 2)
    (_, second) = [event for event in place.events() if event["kind"] == "generation"]
    assert second["from_step"] == saved["step"] < 50, "it was saved for this, before it was due"
    document = finish(place, running)
    assert (document["weights_digest"], document["recoveries"]) == (reference, [])


def test_a_spare_steps_in_for_a_lost_worker(place: Workplace, reference: str) -> None:
    running = start(place, 2, "--set", "spares=1")
    await_condition("three workers", lambda: len(place.workers()) == 3)
    first = members(place)[0]
    await_condition("the spare", lambda: "3 of 3" in place.log("coordinator"))
    victims = {member["worker"]: member["address"] for member in place.events()[0]["members"]}
    assert sorted(victims) == first
    running.await_event("step", at_least=2)
    os.kill(pid_of(place, first[0]), signal.SIGKILL)
    await_condition("the next generation", lambda: len(members(place)) == 2)
    assert len(members(place)[1]) == 2, "nobody had to go on alone"
    document = finish(place, running)
    assert document["weights_digest"] == reference
    assert len(document["recoveries"]) == 1
    assert len(members(place)) == 2, "the replacement stands by"


def pid_of(place: Workplace, worker: int) -> int:
    """The process of a worker, by the log of who starts them."""
    words = f"worker {worker} is process"
    (line,) = await_condition(
        "the log", lambda: [line for line in place.log("fork_server").splitlines() if words in line]
    )
    return int(line.partition("process ")[2].partition(",")[0])


@pytest.mark.long
def test_what_cannot_be_is_refused_and_the_job_goes_on(place: Workplace, reference: str) -> None:
    running = start(place, 1)
    refused = place.start("resize", "last", "--workers", "9").done()
    document = finish(place, running)
    assert refused.code == 2
    assert "the job cannot have 9 workers: it has 4 lanes, so 1 to 4 are possible" in refused.stderr
    assert document["weights_digest"] == reference


def test_a_run_that_does_not_run_cannot_be_resized(place: Workplace, reference: str) -> None:
    assert reference
    refused = place.run("resize", "last", "--workers", "2")
    assert refused.code == 2
    assert f"run {place.last.name} is not running" in refused.error
