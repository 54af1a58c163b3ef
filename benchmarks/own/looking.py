"""A run of very many steps, and what the commands take that look at it.

The run folder is as a tracked job of so many steps would have left it: evaluations and checkpoints every thousand
steps, loads of its workers, a few lost workers and two resumes. Each command runs as a person would give it.
"""

import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.told import answer, read_order, reading
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
from quorate.observe.seldom_events import SystemSampled
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
            if step % 200 == 0:
                loads = (SystemSampled(step=step, time=now, worker=each, host="a", threads=9) for each in range(4))
                told += [load.to_json() for load in loads]
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


def measure(folder: Path, *arguments: str) -> tuple[float, dict[str, float]]:
    """Milliseconds of one command; with seconds of processor time and megabytes."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "quorate", *arguments], cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"quorate {' '.join(arguments)} has ended with {process.returncode}")
    return 1000 * taken, {"busy_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1000}


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    folder = Path(order["folder"])
    run = write_run(folder / "runs", order["steps"])
    read_timeline(run.events_file)
    sizes = {"events_mb": run.events_file.stat().st_size / 1e6}
    if index_of_events(run.events_file).exists():
        sizes["index_mb"] = index_of_events(run.events_file).stat().st_size / 1e6
    readings = []
    for command in COMMANDS:
        ms, details = measure(folder, *(run.name if word == "RUN" else word for word in command))
        readings.append(reading(" ".join(command), 1, [ms], details=details | sizes))
    answer(*readings)


if __name__ == "__main__":
    main()
