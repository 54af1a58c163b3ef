"""The stopwatch of the startup benchmark: starts a command, and learns when its first step was complete."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.step_events import read_steps
from benchmarks.told import answer, read_order, reading

Command = tuple[list[str], Callable[[str], float]]
"""What is typed, and how the moment of the first complete step is found in what it prints."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    # The command hears of the end as well, and ends its processes; until then this one waits for it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    command, moment = COMMANDS[order["system"]](order)
    began = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    ended = time.time()
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[1:4])} … ended with code {done.returncode}")
    details = {"command_ms": (ended - began) * 1000}
    case = "no job" if order["system"] in WITHOUT_JOB else "tiny-mlp"
    answer(reading(case, order["processes"], [(moment(done.stdout) - began) * 1000], details=details))


def _quorate(order: dict[str, Any]) -> Command:
    job = {
        "name": "bench-startup",
        "task": "benchmarks.tasks:CaseTask",
        "params": {"case": "tiny-mlp", "samples": 64},
        "lanes": order["processes"],
        "batch_size": 32 * order["processes"],
        "steps": 1,
    }
    file = Path(order["folder"]) / "startup.yaml"
    file.write_text(json.dumps(job))  # JSON is YAML too
    return [
        *(sys.executable, "-m", "quorate", "train", str(file), "--json", "--quiet"),
        *("--workers", str(order["processes"])),
    ], lambda stdout: read_steps(Path(json.loads(stdout)["folder"]) / "events.jsonl")[1].time


def _plain(_: dict[str, Any]) -> Command:
    return [sys.executable, "-m", "benchmarks.peers.plain_first_step"], float


def _torchrun(order: dict[str, Any]) -> Command:
    processes = str(order["processes"])
    module = "benchmarks.peers.torchrun_first_step"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    # Complete is the step when it is so everywhere.
    return [*command, "--module", module], lambda stdout: max(map(float, stdout.split()))


WITHOUT_JOB = {"quorate-help": ["-m", "quorate", "--help"], "quorate-import": ["-c", "import quorate"]}


def _without_job(order: dict[str, Any]) -> Command:
    # There is no step: what counts is when the command has ended, which is when its output is looked at.
    return [sys.executable, *WITHOUT_JOB[order["system"]]], lambda _: time.time()


COMMANDS: dict[str, Callable[[dict[str, Any]], Command]] = {
    "quorate": _quorate,
    "plain-python": _plain,
    "torchrun": _torchrun,
    **dict.fromkeys(WITHOUT_JOB, _without_job),
}


if __name__ == "__main__":
    main()
