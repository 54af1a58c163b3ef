"""What a task prints, on its way from the logs to whoever looks on."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, finished, undisturbed, used_workplace, workplace  # noqa: F401 (fixtures)
from quorate.api.prints import MOST_LINES, WithPrints
from quorate.core.log_records import STDERR, STDOUT
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, HostedLanes, RunFinished
from quorate.observe.sinks import Printed, Round
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder

TASK = """
import logging
import os
import sys
import warnings
from command_task import *

print("imported")

class Mine(Tiny):
    def model(self):
        print("built")
        print("beside it", file=sys.stderr)
        warnings.warn("mind")
        logging.getLogger("mine").info("built it")
        print("x" * 300_000)
        sys.stdout.buffer.write(b"\\xff\\x00\\n")
        return super().model()

    def loss(self, model, batch):
        print("a step")
        return super().loss(model, batch)
"""


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        if not isinstance(event, Round):
            self.events.append(event)

    def close(self) -> None: ...

    @property
    def lines(self) -> list[tuple[str, bool]]:
        printed = [event for event in self.events if isinstance(event, Printed)]
        return [(line, event.is_first) for event in printed for line in event.lines]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "job")


def say(
    run: RunFolder, worker: int, *messages: str, time: float = 0.0, source: str | None = STDOUT, **more: Any
) -> None:
    fields: dict[str, Any] = {"time": time, "process": f"worker {worker}", "worker": worker, **more}
    fields |= {} if source is None else {"source": source}
    log = LogFile(run.logs / f"worker-{worker}.jsonl")
    log.append(*(json.dumps({**fields, "message": message}) for message in messages))
    log.close()


def formed(time: float, *hosts: int) -> GenerationFormed:
    members = tuple(HostedLanes(worker, lanes=(lane,)) for lane, worker in enumerate(hosts))
    return GenerationFormed(time=time, members=members)


def test_what_the_task_prints_and_logs_from_now_on_is_told_and_nothing_of_quorate(run: RunFolder) -> None:
    say(run, 0, "before the resume")
    seen = Seen()
    shown = WithPrints(seen, run)
    say(run, 0, "printed")
    say(run, 0, "a warning of a library", source=STDERR)
    say(run, 0, "logged", source=None, logger="quorate.worker", level="warning")
    say(run, 0, "of the task", source=None, logger="mine", level="warning", exception="Traceback\nError")
    say(run, 0, "too much", source=None, logger="mine", level="debug")
    say(run, 0, "printed already", source=None, logger="mine", level="info", printed=True)
    shown.handle(Round())
    told = ["printed", "a warning of a library", "WARNING mine: of the task", "Traceback", "Error"]
    assert seen.lines == [(line, True) for line in told]


def test_of_lanes_the_first_is_told_and_of_a_progress_bar_its_end(run: RunFolder) -> None:
    seen = Seen()
    shown = WithPrints(seen, run, clock=itertools.count().__next__)
    for lane in range(2):
        say(run, 0, f"lane {lane}", lane=lane)
    say(run, 0, "a warning, once in a process", lane=1, source=None, logger="py.warnings", level="warning")
    for second, state in enumerate(range(0, 100, 5)):
        say(run, 0, f"{state}%", time=float(second), source=STDERR, overwritten=True)
        shown.handle(Round())
    say(run, 0, "100%", time=20.0, source=STDERR)
    say(run, 0, "another: 3%", time=21.0, source=STDERR, overwritten=True)
    shown.handle(Round(is_last=True))
    assert [line for line, is_first in seen.lines if not is_first] == ["lane 1"]
    told = ["lane 0", "a warning, once in a process", "50%", "100%", "another: 3%"]
    assert [line for line, is_first in seen.lines if is_first] == told


def test_what_a_worker_has_printed_before_it_was_lost_counts_as_of_the_first_lane(run: RunFolder) -> None:
    seen = Seen()
    shown = WithPrints(seen, run)
    shown.handle(formed(10.0, 0, 1))
    say(run, 0, "my last words", time=11.0)
    say(run, 1, "beside it", time=11.5)
    shown.handle(formed(12.0, 1))
    say(run, 1, "in its place", time=13.0)
    shown.handle(Round())
    assert seen.lines == [("my last words", True), ("beside it", False), ("in its place", True)]


def test_the_end_is_told_after_what_was_printed_before_it(run: RunFolder) -> None:
    seen = Seen()
    shown = WithPrints(seen, run, clock=lambda: 0.0)
    shown.handle(Round())
    shown.handle(RunFinished(weights_digest=""))
    say(run, 0, "the last line")
    shown.handle(Round())  # not due yet
    shown.handle(Round(is_last=True))
    assert [type(event) for event in seen.events] == [Printed, RunFinished]


def test_of_a_flood_the_last_lines_are_told(run: RunFolder) -> None:
    seen = Seen()
    shown = WithPrints(seen, run)
    say(run, 0, *(f"line {number}" for number in range(5000)))
    shown.handle(Round())
    (printed,) = seen.events
    assert isinstance(printed, Printed)
    assert (printed.left_out, len(printed.lines), printed.lines[-1]) == (5000 - MOST_LINES, MOST_LINES, "line 4999")


def test_prints_of_a_real_job_are_on_the_terminal_and_do_not_change_its_result(workplace: Workplace) -> None:  # noqa: F811
    (workplace.folder / "command_task.py").write_text(workplace.task.read_text())
    silent = workplace.run("train", "job.yaml", "--workers", "1", "--json")
    workplace.task.write_text(TASK)
    workplace.write_job(task="task.py:Mine")
    done = workplace.run("train", "job.yaml", "--workers", "2", "--print", "all", "--json")
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == silent.document["weights_digest"]
    lines = done.stderr.splitlines()
    assert lines.count("[fork server] imported") == 1
    for worker in range(2):
        assert lines.count(f"[worker {worker}] built") >= 1
        assert lines.count(f"[worker {worker}] a step") == 16, "two lanes in each of eight steps"
        assert f"[worker {worker}] beside it" in lines
        assert f"[worker {worker}] INFO mine: built it" in lines
        assert any(line.startswith(f"[worker {worker}] ") and line.endswith("UserWarning: mind") for line in lines)
        assert "[worker 0] \\xff\\x00" in lines
    records = [each for worker in range(2) for each in workplace.log_records(f"worker-{worker}")]
    printed = Counter(each["lane"] for each in records if each["message"] == "a step")
    assert printed == dict.fromkeys(range(4), 8)
    assert max(map(len, lines)) < 1200
    assert lines.index("finished after 8 steps") > max(at for at, line in enumerate(lines) if "] a step" in line)
