"""How long the commands that look at runs take with a very long one: seconds and peak memory of each.

    python -m benchmarks.long_run 1000000

It writes a run folder as a job of so many steps would have left it (evaluations and checkpoints every thousand steps, a
few lost workers and two resumes), and runs each command as a person would.
"""

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quorate.history.event_index import index_of_events, read_timeline
from quorate.observe.events import (
    CheckpointSaved,
    EvaluationDone,
    GenerationFormed,
    HostedLanes,
    RunBegan,
    RunFinished,
    StepCompleted,
    WorkerLost,
)
from quorate.observe.jsonl import JsonlSink
from quorate.spec.load import resolve_mapping
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder

JOB = {"name": "long", "task": "/code/task.py:Long", "lanes": 4, "workers": 4, "batch_size": 64, "steps": 1}
COMMANDS = (("show", "RUN"), ("show", "RUN", "--json"), ("runs",), ("report", "RUN"), ("top", "RUN", "--once"))


def write_run(runs: Path, steps: int, seed: int = 1) -> RunFolder:
    """A run of so many steps."""
    run = RunFolder.create(runs, "long")
    run.write_job(dump_job(resolve_mapping(JOB | {"steps": steps}, "job.yaml", {}, [])))
    chance, now = random.Random(seed), time.time() - steps * 0.05
    sink = JsonlSink(run.events_file)
    everybody = tuple(HostedLanes(worker, f"127.0.0.1:{4000 + worker}", (worker,)) for worker in range(4))
    sink.handle(GenerationFormed(time=now, generation="1.1", lanes=4, members=everybody, from_step=0))
    sink.handle(RunBegan(time=now, from_step=0, total_steps=steps, steps_per_epoch=1000, lanes=4))
    with run.events_file.open("ab") as file:
        step, generation, resumed = 0, 1, 0
        while step < steps:
            step += 1
            seconds = 0.045 + 0.01 * chance.random()
            now += seconds
            told = [
                StepCompleted(
                    step=step,
                    time=now,
                    epoch=step // 1000,
                    losses={"": 2.3 * math.exp(-3 * step / steps) + 0.05 * chance.gauss(0, 1) ** 2},
                    learning_rates={"": 0.1 * (1 + math.cos(math.pi * step / steps)) / 2},
                    gradient_norms={"": 1 + abs(chance.gauss(0, 0.3))},
                    samples=64,
                    samples_per_second=64 / seconds,
                    data_s=0.002 * chance.random(),
                    compute_s=seconds * 0.7,
                    exchange_s=seconds * 0.2,
                    apply_s=seconds * 0.05,
                    ledger=f"{chance.getrandbits(128):032x}",
                ).to_json()
            ]
            if step % 1000 == 0:
                metrics = {"loss": 2 * math.exp(-3 * step / steps), "accuracy": 1 - math.exp(-5 * step / steps)}
                told.append(EvaluationDone(step=step, time=now, metrics=metrics, best=True).to_json())
                saved = CheckpointSaved(step=step, time=now, path=f"step-{step:08d}", bytes=10**8, seconds=0.4)
                told.append(saved.to_json())
            if step % max(1, steps // 10) == 7:
                generation += 1
                lost = WorkerLost(step=step, time=now, worker=2, message="worker 2 was killed", detect_s=0.01)
                left = tuple(each for each in everybody if each.worker != 2)
                fewer = GenerationFormed(time=now + 0.1, generation=f"1.{generation}", members=left, from_step=step)
                generation += 1
                again = GenerationFormed(time=now + 3, generation=f"1.{generation}", members=everybody, from_step=step)
                told += [lost.to_json(), fewer.to_json(), again.to_json()]
            if resumed < 2 and step == (resumed + 1) * steps // 3:
                resumed += 1
                step -= 500
                told.append(RunBegan(time=now, from_step=step, total_steps=steps, steps_per_epoch=1000).to_json())
            file.write("".join(f"{line}\n" for line in told).encode())
    sink.handle(RunFinished(time=now, weights_digest="ab" * 32, result={}))
    sink.close()
    run.write_result({"status": "complete", "ending": "complete", "steps": steps, "final_metrics": {"loss": 0.1}})
    return run


def measure(folder: Path, *arguments: str) -> tuple[float, float, float, int]:
    """Seconds, seconds of processor time, megabytes and exit code of one command."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "quorate", *arguments], cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    taken = time.perf_counter() - began
    return taken, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, process.returncode


def main() -> None:
    """Write a run, and measure each command with and without its index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to write; it is kept")
    parser.add_argument("--only", help="only commands that begin with this word")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        found = sorted((folder / "runs").glob("long-*")) if given.folder else []
        run = RunFolder(found[0]) if found else write_run(folder / "runs", given.steps)
        sizes = {"events_mb": run.events_file.stat().st_size / 1e6}
        began = time.perf_counter()
        read_timeline(run.events_file)
        sizes["build_or_load_s"] = time.perf_counter() - began
        if index_of_events(run.events_file).exists():
            sizes["index_mb"] = index_of_events(run.events_file).stat().st_size / 1e6
        sizes["own_peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(json.dumps({name: round(value, 2) for name, value in sizes.items()}))
        for command in COMMANDS:
            if not given.only or command[0] == given.only:
                arguments = [run.name if word == "RUN" else word for word in command]
                taken, busy, megabytes, code = measure(folder, *arguments)
                times = f"{taken:6.2f} s ({busy:.2f} s of processor time)"
                print(f"quorate {' '.join(arguments):28} {times} {megabytes:6.0f} MB   exit code {code}")


if __name__ == "__main__":
    main()
