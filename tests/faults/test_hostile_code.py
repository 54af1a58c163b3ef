"""Tasks that hang, exit, fork, print without end or upset everything: the job ends and says why, or goes on."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from schemas import validate

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

SAMPLES, FATAL_SAMPLE, STEPS = 32, 17, 8
POISONED = {40, 41, 42}

TASK = f"""
import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import quorate

TROUBLE, _, PLACE = os.environ.get("TROUBLE", "").partition(" in ")
HERE = Path.cwd()


def get_into_trouble(place):
    if place != PLACE:
        return
    if TROUBLE == "sys.exit":
        sys.exit(0)
    if TROUBLE == "interrupt":
        raise KeyboardInterrupt
    if TROUBLE == "os._exit":
        os._exit(0)
    if TROUBLE == "abort":
        os.abort()
    if TROUBLE == "segfault":
        ctypes.string_at(0)
    if TROUBLE == "lose the GPU":
        with contextlib.suppress(FileExistsError), (HERE / "lost").open("x"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nCUDA kernel errors might be ...")
    if TROUBLE == "slow":
        time.sleep(0.5)
    if TROUBLE == "hang":
        while not (HERE / "go").exists():
            time.sleep(0.01)


def is_trial():
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "sanity_check_evaluation":
        frame = frame.f_back
    return frame is not None


sync = os.fsync


def sync_on_a_bad_disk(descriptor):
    get_into_trouble("fsync")
    sync(descriptor)


os.fsync = sync_on_a_bad_disk
def leave_children():
    # One as it is, one in a session of its own; then die. Whoever comes next waits for the end of the first.
    forked = HERE / "forked"
    if forked.exists():
        first = Path("/proc", forked.read_text().split()[0])
        over = time.monotonic() + 60
        while first.exists() and time.monotonic() < over:
            time.sleep(0.01)
        (HERE / "seen").write_text("there" if first.exists() else "gone")
        return
    pids = []
    for begins_session in (False, True):
        pid = os.fork()
        if pid == 0:
            if begins_session:
                os.setsid()
            time.sleep(600)
            os._exit(0)
        pids.append(str(pid))
    forked.write_text(" ".join(pids))
    os._exit(1)


def turn_upside_down():
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    os.chdir("/")
    torch.set_num_threads(3)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


class Points:
    def __init__(self, samples={SAMPLES}):
        self.inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if index == {FATAL_SAMPLE}:
            get_into_trouble("sample")
        factor = float("nan") if TROUBLE == "nan" and index in {POISONED} else 1.0
        return index, factor * self.inputs[index], self.inputs[index].sum()


class Troubled(quorate.Task):
    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1))

    def datasets(self):
        if PLACE == "metrics":
            return Points(), Points(8)
        return Points(48) if TROUBLE == "nan" else Points()

    def loss(self, model, batch):
        indices, inputs, targets = batch
        if {FATAL_SAMPLE} in indices:
            get_into_trouble("loss")
        if TROUBLE == "fork" and {FATAL_SAMPLE} in indices:
            leave_children()
        if TROUBLE == "threads":
            threading.Thread(target=time.sleep, args=(600,)).start()
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        if TROUBLE == "print":
            for _ in range(int(os.environ["MEGABYTES"])):
                print("x" * (2**20 - 1))
        loss = F.mse_loss(model(inputs).squeeze(-1) * float(1 + torch.rand(())), targets)
        if TROUBLE == "upside down":
            turn_upside_down()
        return loss

    def metrics(self, model, batch):
        if not is_trial():  # of a setup, which may take its time
            get_into_trouble("metrics")
        return {{"error": 1.0}}

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""

KEYS: dict[str, Any] = {"task": "task.py:Troubled", "steps": STEPS, "batch_size": 8, "failure_timeout": 6.0}


@pytest.fixture
def troubled(tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path)
    place.task.write_text(TASK)
    place.write_job(**KEYS)
    yield place
    place.clean_up()
    place.assert_nobody_left()


def failure_of(place: Workplace, *arguments: str, **environment: str) -> dict[str, Any]:
    done = place.train("--json", *arguments, **environment)
    assert done.code == 1, f"{done.stdout}\n{done.stderr}"
    validate("error", done.document)
    (told,) = place.failures()
    assert told["message"] == done.document["failure"]["message"]
    failure: dict[str, Any] = place.result()["failure"]
    assert failure == done.document["failure"]
    assert failure.get("samples", []) == told.get("samples", [])
    return failure


@pytest.mark.parametrize(
    ("trouble", "death"),
    [
        ("os._exit", "(code 0)"),
        pytest.param("abort", "was killed by SIGABRT", marks=pytest.mark.long),
        pytest.param("segfault", "was killed by SIGSEGV", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("place", "phase"), [("loss", "compute"), pytest.param("sample", "data", marks=pytest.mark.long)]
)
def test_what_kills_every_worker_ends_the_job_and_names_the_samples(
    troubled: Workplace, trouble: str, death: str, place: str, phase: str
) -> None:
    workers = 2 if place == "loss" else 1
    failure = failure_of(troubled, "--workers", str(workers), TROUBLE=f"{trouble} in {place}")
    assert failure["kind"] == "PoisonBatch"
    assert failure["phase"] == phase
    assert FATAL_SAMPLE in failure["samples"]
    assert len(failure["samples"]) == 2  # what a lane reads
    assert failure["message"].count(death) == 3
    named = re.escape(", ".join(map(str, failure["samples"])))
    assert re.search(
        rf"step {failure['step']} \(epoch 0\) .* lane {failure['lane']}:.* samples {named}\.", failure["message"]
    )
    lost = [event for event in troubled.events() if event["kind"] == "lost"]
    assert [(event["step"], event["phase"]) for event in lost] == [(failure["step"], phase)] * 3


def test_a_gpu_that_fails_costs_one_worker_and_no_bit(troubled: Workplace) -> None:
    plain = troubled.train("--json", "--workers", "2").document
    document = troubled.train("--json", "--workers", "2", TROUBLE="lose the GPU in loss").document
    assert (document["status"], document["weights_digest"]) == ("complete", plain["weights_digest"])
    (recovery,) = document["recoveries"]
    (lost,) = (event for event in troubled.events() if event["kind"] == "lost")
    assert lost["worker"] == recovery["worker"]
    assert "gave up" in lost["message"]
    assert "its GPU has failed: an illegal memory access was encountered" in lost["message"]


@pytest.mark.parametrize("place", ["loss", pytest.param("sample", marks=pytest.mark.long)])
@pytest.mark.parametrize("loaders", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_sys_exit_is_an_exception_like_any_other(troubled: Workplace, place: str, loaders: str) -> None:
    settings = ("--workers", "2", "--set", f"loader_workers={loaders}")
    failure = failure_of(troubled, *settings, TROUBLE=f"sys.exit in {place}")
    assert failure["kind"] == "UserCodeError"
    assert "SystemExit: 0" in failure["message"]
    assert ("loss()" if place == "loss" else f"sample {FATAL_SAMPLE} of the training set") in failure["message"]


OWN_LOOP = """
import torch


def main(run):
    model = torch.nn.Linear(3, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs in run.batches(torch.ones(32, 3)):
        result = run.step(model(inputs).mean())
        if result is not None and result.step == 3:
            raise KeyboardInterrupt("enough")
"""


@pytest.mark.parametrize("loop", [pytest.param("a task", marks=pytest.mark.long), "a loop of one's own"])
def test_a_keyboard_interrupt_that_the_task_raises_ends_the_job_at_once(troubled: Workplace, loop: str) -> None:
    if loop != "a task":
        (troubled.folder / "own.py").write_text(OWN_LOOP)
    task = ("--set", "task=own.py:main") if loop != "a task" else ()
    failure = failure_of(troubled, "--workers", "2", *task, TROUBLE="interrupt in loss")
    assert failure["kind"] == "UserCodeError"
    assert failure["message"].count("KeyboardInterrupt") == 1
    assert ("(in loss())" if loop == "a task" else "KeyboardInterrupt: enough (in main())") in failure["message"]
    (run,) = (troubled.folder / "runs").iterdir()
    assert not [event for event in troubled.events(run) if event["kind"] == "lost"]


@pytest.mark.parametrize("trouble", ["os._exit", pytest.param("segfault", marks=pytest.mark.long)])
def test_samples_that_kill_every_loader_end_the_job_and_are_named(troubled: Workplace, trouble: str) -> None:
    failure = failure_of(troubled, "--workers", "1", "--set", "loader_workers=1", TROUBLE=f"{trouble} in sample")
    assert (failure["phase"], failure["kind"]) == ("data", "PoisonBatch")
    assert FATAL_SAMPLE in failure["samples"]
    ending = "exited with code 0" if trouble == "os._exit" else "was killed by SIGSEGV"
    deaths = rf"worker 0 \(pid \d+ on host \S+\) gave up \(its loader process \d+ {ending}\) while its samples were"
    assert len(re.findall(deaths, failure["message"])) == 3
    lost = [event for event in troubled.events() if event["kind"] == "lost"]
    assert [(event["step"], event["phase"]) for event in lost] == [(failure["step"], "data")] * 3
    named = f"It was to read samples {', '.join(map(str, failure['samples']))} of the training set."
    assert all(named in event["message"] for event in lost)


@pytest.mark.long
@pytest.mark.parametrize("place", ["loss", "sample"])
def test_a_task_that_hangs_again_and_again_ends_where_there_is_a_time_limit(troubled: Workplace, place: str) -> None:
    settings = ("--workers", "1", "--set", "step_timeout=1")
    failure = failure_of(troubled, *settings, TROUBLE=f"hang in {place}")
    assert failure["kind"] == "WorkerLost"
    assert "is held up in the task's own code" in failure["message"]
    assert "longer than step_timeout (1.0)" in failure["message"]
    assert "Workers have now hung there 3 times in a row" in failure["message"]


@pytest.mark.long
def test_metrics_that_dead_lock_again_and_again_end_the_job(troubled: Workplace) -> None:
    settings = ("--workers", "1", "--set", "step_timeout=1")
    failure = failure_of(troubled, *settings, TROUBLE="hang in metrics")
    assert (failure["kind"], failure["phase"], failure["step"]) == ("WorkerLost", "evaluation", 4)
    assert failure["message"].startswith("the evaluation of step 4 has made no progress for ")
    assert "worker 0 is held up in the task's own code (evaluating a batch)" in failure["message"]
    assert "Workers have now hung there 3 times in a row, so the job is stopped" in failure["message"]
    lost = [event for event in troubled.events() if event["kind"] == "lost"]
    assert [(event["step"], event["phase"]) for event in lost] == [(4, "evaluation")] * 3


@pytest.mark.long
def test_an_evaluation_that_comes_further_with_each_batch_does_not_count_as_hung(troubled: Workplace) -> None:
    """Eight batches of half a second each, where two seconds without progress are too many."""
    settings = ("step_timeout=2", "evaluate.batch_size=1", "evaluate.every=end")
    changed = [word for setting in settings for word in ("--set", setting)]
    done = troubled.train("--json", "--workers", "1", *changed, TROUBLE="slow in metrics")
    assert (done.code, done.document["steps"], done.document["recoveries"]) == (0, STEPS, [])
    assert done.document["wall_seconds"] > 4, "so long the evaluation took"


@pytest.mark.long
def test_a_disk_that_stalls_in_the_last_save_is_named(troubled: Workplace) -> None:
    # Long enough for a step on a busy machine.
    settings = ("--workers", "2", "--set", "step_timeout=4", "--set", "checkpoint.every=null")
    running = troubled.start("train", "job.yaml", "--json", *settings, TROUBLE="hang in fsync")
    loss = running.await_event("lost")
    assert loss["message"].startswith(f"the checkpoint of step {STEPS} has made no progress for ")
    assert re.search(r"is in checkpoint and waits for the disk.* wait for the disk, which does not", loss["message"])
    assert (loss["step"], loss["phase"]) == (STEPS, "checkpoint")
    troubled.go()
    done = running.done()
    assert (done.code, done.document["steps"]) == (0, STEPS), done.stderr


@pytest.mark.long
def test_a_task_that_hangs_is_reported_and_waited_for_where_there_is_none(troubled: Workplace) -> None:
    running = troubled.start("train", "job.yaml", "--workers", "2", "--json", TROUBLE="hang in loss")
    report = running.await_event("log")
    assert "is held up in the task's own code (computing its lanes)" in report["message"]
    assert "It is waited for until step_timeout (not set, so 1800 s without any progress)" in report["message"]
    troubled.go()
    done = running.done()
    assert (done.code, done.document["steps"]) == (0, STEPS)


def test_a_child_that_a_task_leaves_behind_ends_with_its_worker_or_at_the_latest_with_the_job(
    troubled: Workplace,
) -> None:
    done = troubled.start("train", "job.yaml", "--workers", "2", "--json", TROUBLE="fork").done()
    left = [int(pid) for pid in (troubled.folder / "forked").read_text().split()]
    assert len(left) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in left), "before the command has ended"
    assert (troubled.folder / "seen").read_text() == "gone", "before the job has"
    assert done.code == 0, done.stderr
    assert len([event for event in troubled.events() if event["kind"] == "lost"]) == 1


def test_threads_that_a_task_leaves_behind_hold_nothing_up(troubled: Workplace) -> None:
    done = troubled.train("--workers", "2", "--json", TROUBLE="threads")
    assert (done.code, done.document["steps"]) == (0, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("loaders", ["0", "1"])
def test_what_a_task_turns_upside_down_changes_no_bit(troubled: Workplace, loaders: str) -> None:
    """Generators, the working directory, signal handlers and the number of threads: each lane begins with its own."""
    settings = ("--json", "--set", f"loader_workers={loaders}")
    digests = {
        done.document["weights_digest"]
        for trouble in ("", "upside down")
        for workers in ("1", "2")
        if (done := troubled.train("--workers", workers, *settings, TROUBLE=trouble)).code == 0
    }
    assert len(troubled.runs()) == 4
    assert len(digests) == 1


@pytest.mark.long
def test_a_gigabyte_of_prints_leaves_logs_of_bounded_size(troubled: Workplace) -> None:
    megabytes = 32  # 8 steps of 4 lanes: 1 GiB
    running = troubled.start("train", "job.yaml", "--workers", "2", "--json", TROUBLE="print", MEGABYTES=str(megabytes))
    largest, resident = 0, 0
    while running.process.poll() is None:
        for file in (troubled.folder / "runs").glob("*/logs/*.jsonl*"):
            with contextlib.suppress(FileNotFoundError):  # it has another name by now
                largest = max(largest, file.stat().st_size)
        resident = max(resident, resident_bytes(running.process.pid))
        time.sleep(0.02)  # between two looks
    done = running.done()
    assert (done.code, done.document["steps"]) == (0, STEPS), done.stderr
    sizes = {file.name: file.stat().st_size for file in (troubled.last / "logs").glob("*.jsonl*")}
    assert sum(sizes.values()) < 200 * 2**20, sizes
    assert largest < 20 * 2**20  # it is followed by another while it grows
    assert "worker-0.jsonl.1" in sizes
    assert resident < 1 * 2**30


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
