"""Many recoveries, and whoever has lived through all of them is as it was: nothing is left of the dead."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from command import Running, Workplace, await_condition

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(900)]

BEFORE = 5  # what is made once, at the first few, is no leak


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    threads: int
    descriptors: Counter[str]
    kilobytes: int

    @classmethod
    def of(cls, pid: int) -> "Holdings":
        descriptors: Counter[str] = Counter()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except OSError:
                continue
            if "/.writing-" not in target:  # a checkpoint that is just being saved
                # Numbers differ from one to the next; kinds do not: socket, pipe, memfd, file.
                descriptors[target.partition(":")[0].partition(" ")[0]] += 1
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return cls(int(fields["Threads"]), descriptors, int(fields["VmRSS"].split()[0]))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path / "job")
    yield workplace
    workplace.clean_up()
    workplace.assert_nobody_left()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()


def pid_of(place: Workplace, worker: int) -> int:
    """The process in a place, by the log of who starts them."""
    lines = [line for line in place.log("fork_server").splitlines() if f"worker {worker} is process" in line]
    return int(lines[-1].partition("process ")[2].partition(",")[0])


def is_of_another_job(path: Path) -> bool:
    """Whether shared memory belongs to a process that is there: those of the job that is looked at are gone."""
    pids = [word for word in path.name.split("_") if word.isdigit()]
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def lose_one(place: Workplace, running: Running, worker: int) -> None:
    """Kill a worker, and wait until it has been replaced and the job has gone on."""
    os.kill(pid_of(place, worker), signal.SIGKILL)
    known = len([event for event in place.events() if event["kind"] == "generation"])

    def is_whole_again() -> bool:
        assert running.process.poll() is None, running.process.communicate()
        events = place.events()
        generations = [number for number, event in enumerate(events) if event["kind"] == "generation"]
        # With a step of its own: while a generation forms, its members hold nothing of the last and little of the next.
        has_stepped = any(event["kind"] == "step" for event in events[generations[-1] :])
        return has_stepped and len(generations) > known and len(events[generations[-1]]["members"]) == 3

    await_condition("a step of all three", is_whole_again)


@pytest.mark.parametrize(("strategy", "recoveries"), [("ring", 50), ("ddp", 20)])
def test_recoveries_leave_nothing_behind(place: Workplace, strategy: str, recoveries: int) -> None:
    place.write_job(steps=100_000, workers=3, checkpoint={"every": 1000, "keep": 2}, strategy=strategy)
    shared = set(Path("/dev/shm").iterdir())
    running = place.start("train", "job.yaml", "--json", PAUSE="0.005")
    running.await_event("step", at_least=5)
    survivor = pid_of(place, 0)
    keepers = {"worker 0": survivor, "launcher": running.process.pid}
    modules = {"coordinator": "quorate.coordinator", "fork_server": "quorate.engines.fork_server"}
    keepers |= {name: place.pids(module)[0] for name, module in modules.items()}
    for turn in range(BEFORE):
        lose_one(place, running, 1 + turn % 2)
    before = {name: Holdings.of(pid) for name, pid in keepers.items()}
    processes = len(place.pids())
    for turn in range(BEFORE, recoveries):
        lose_one(place, running, 1 + turn % 2)
    after = {name: Holdings.of(pid) for name, pid in keepers.items()}
    assert len(place.pids()) == processes
    for name in keepers:
        # gRPC's own come and go; one for each recovery would be many.
        assert after[name].threads <= before[name].threads + 2, name
        assert after[name].descriptors == before[name].descriptors, name
        assert after[name].kilobytes <= before[name].kilobytes * 1.05, name
    assert {path for path in Path("/dev/shm").iterdir() if not is_of_another_job(path)} <= shared
    running.process.send_signal(signal.SIGTERM)
    done = running.done()
    assert done.code == 143
    losses = [json.loads(line) for line in (place.last / "events.jsonl").read_text().splitlines()]
    assert sum(event["kind"] == "lost" for event in losses) == recoveries
