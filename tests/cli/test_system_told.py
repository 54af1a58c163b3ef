"""What workers and their machine use is among the events of a tracked job, each sample once, and nowhere else."""

import os
import signal

import pytest

from command import Workplace, await_condition, in_step

SAMPLED = ("--set", "track.prometheus=0", "--set", "track.system=0.05")


@pytest.mark.faults
def test_every_worker_tells_once_what_it_uses_though_the_coordinator_is_killed(
    workplace: Workplace, undisturbed: str
) -> None:
    training = workplace.start("train", "job.yaml", "--workers", "2", "--json", *SAMPLED, HOLD=in_step(3, workers=2))

    def tellers() -> set[int]:
        return {event["worker"] for event in workplace.events() if event["kind"] == "system"}

    training.await_event("step", 2)
    await_condition("samples of both workers", lambda: tellers() == {0, 1})
    (coordinator,) = workplace.pids("quorate.coordinator")
    os.kill(coordinator, signal.SIGKILL)
    replaced = training.await_event("coordinator")
    await_condition(
        "a sample after that",
        lambda: [each for each in workplace.events() if each["kind"] == "system" and each["time"] > replaced["time"]],
    )
    workplace.go()
    done = training.done()
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    lines = (workplace.last / "events.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines)
    samples = [event for event in workplace.events() if event["kind"] == "system"]
    told = {(each["worker"], "machine" in each) for each in samples}
    # The first of them may be of the time before there was a generation.
    assert told - {(0, False)} == {(0, True), (1, False)}
    assert all(each["memory_bytes"] > 2**20 and each["host"] for each in samples)
    assert "system" not in done.stderr


def test_nothing_is_sampled_where_nothing_is_tracked(workplace: Workplace) -> None:
    assert workplace.train("--set", "track.system=0.01", SLOW="0.05").code == 0
    assert not [event for event in workplace.events() if event["kind"] == "system"]
