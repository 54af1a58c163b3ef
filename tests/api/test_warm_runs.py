"""Runs that find imported what the run before them has: they come to the same, and leave as little behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api.test_training_from_python import run_python
from command import PATIENCE, Workplace, await_condition, command_line, in_step, parent_of

pytestmark = pytest.mark.usefixtures("unmeasured")

PRELUDE = """
import json, os, sys, threading, time
from pathlib import Path
from quorate.api import session
from quorate.api.run_part import run_on_engine
from quorate.api.prints import NoDisplay
from quorate.api.warm import WarmRunner
from quorate.core.errors import QuorateError
from quorate.core.processes import children_of
from quorate.spec.load import load_job
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder


def train(runner=run_on_engine, **keys):
    job = load_job(Path("job.yaml"), {}, [Override(key, value, "test") for key, value in keys.items()])
    return session.start(job, lambda _: NoDisplay(), runner).fields


def family():
    children = sorted(children_of(os.getpid()))
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid in children if b"quorate.engines" in words[pid] or b"quorate: " in words[pid]]


def events(run):
    file = Path(run, "events.jsonl")
    return [json.loads(line)["kind"] for line in file.read_text().splitlines()] if file.exists() else []


def told(run):
    launcher = Path(run["folder"], "logs", "launcher.jsonl").read_text().splitlines()
    return [json.loads(line)["message"] for line in launcher]


if __name__ == "__main__":
"""


def outcome(workplace: Workplace, body: str) -> Any:
    """What a script prints last, as JSON, when nothing that it has started is left."""
    script = workplace.folder / "script.py"
    script.write_text(PRELUDE + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    done = run_python(workplace, str(script))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def shape(run: Path) -> tuple[list[str], list[str]]:
    """The files of a run, and what its events are of."""
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return files, sorted(json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines())


def test_a_warm_run_is_as_a_cold_one_and_needs_no_new_process_of_its_own(
    workplace: Workplace, undisturbed: str, finished: Path
) -> None:
    workplace.write_job(workers=2)
    body = """
with WarmRunner() as runner:
    runs, families = [], []
    for _ in range(2):
        runs.append(train(runner))
        families.append(family())
print(json.dumps([runs, families, [told(run) for run in runs], family()]))
"""
    runs, families, logs, after = outcome(workplace, body)
    assert [run["weights_digest"] for run in runs] == [undisturbed] * 2
    assert families[0] == families[1]
    assert len(families[0]) == 1
    assert after == []
    known = [[message for message in log if "is imported already" in message] for log in logs]
    assert [len(found) for found in known] == [0, 1]
    cold = shape(finished / "runs" / "tiny-0001")
    assert [shape(Path(run["folder"])) for run in runs] == [cold, cold]
    for run in runs:
        assert "a word from the task" in (Path(run["folder"]) / "logs" / "worker-1.jsonl").read_text()


@pytest.mark.long
def test_an_edited_task_is_imported_again_and_one_that_draws_with_another_seed(workplace: Workplace) -> None:
    workplace.write_job(workers=2)
    body = """
with WarmRunner() as runner:
    runs = [train(runner), train(runner)]
    task = Path("task.py")
    task.write_text(task.read_text().replace("momentum=0.9", "momentum=0.5"))
    runs += [train(runner), train(runner), train(runner, seed=5)]
    task.write_text(task.read_text() + "DRAWN = torch.rand(1)")
    runs += [train(runner), train(runner, seed=5)]
    logs = [told(run) for run in runs]
cold = [train(), train(seed=5)]
print(json.dumps([[run["weights_digest"] for run in runs + cold], logs]))
"""
    (first, again, edited, twice, seeded, drawn, drawn_seeded, cold, seeded_cold), logs = outcome(workplace, body)
    assert first == again != edited
    assert edited == twice == drawn == cold
    assert seeded == drawn_seeded == seeded_cold != edited
    said = [[message for message in log if "imported a" in message] for log in logs]
    assert [len(found) for found in said] == [0, 1, 1, 1, 1, 1, 1]
    assert said[2][0].endswith("task.py has changed")
    assert "is imported already" in said[4][0], "no number was drawn, so that any seed will do"
    assert "draws numbers when it is imported, and the seed was" in said[6][0]


@pytest.mark.long
def test_a_run_that_fails_or_is_stopped_leaves_the_next_as_good(workplace: Workplace, undisturbed: str) -> None:
    workplace.write_job(workers=2)
    workplace.task.write_text(
        workplace.task.read_text().replace(
            "        calls = next(CALLS)\n",
            "        calls = next(CALLS)\n"
            "        while Path('slow').exists(): time.sleep(0.01)\n"
            "        if Path('fail').exists(): raise ValueError('as asked')\n",
        )
    )
    body = """
from quorate.api import control

endings = []
with WarmRunner() as runner:
    train(runner)
    before = family()
    for sign in ("fail", "slow"):
        Path(sign).touch()
        if sign == "slow":
            def stop():
                run = Path("runs/tiny-0003")
                while "generation" not in events(run):
                    time.sleep(0.01)
                stopping = threading.Thread(target=control.stop, args=(RunFolder(run),))
                stopping.start()
                while "stop" not in events(run):
                    time.sleep(0.01)
                Path(sign).unlink()
                stopping.join()
            stopper = threading.Thread(target=stop)
            stopper.start()
        try:
            endings.append(train(runner)["status"])
        except QuorateError as error:
            endings.append(str(error))
        Path(sign).unlink(missing_ok=True)
    last = train(runner)
    print(json.dumps([endings, last["weights_digest"], before == family()]))
"""
    (failed, stopped), digest, is_same = outcome(workplace, body)
    assert "ValueError: as asked" in failed
    assert (stopped, digest, is_same) == ("interrupted", undisturbed, True)


@pytest.mark.long
def test_an_edit_does_not_disturb_a_run_beside_it(workplace: Workplace, undisturbed: str) -> None:
    workplace.write_job(workers=2)
    workplace.task.write_text(
        workplace.task.read_text().replace(
            "        calls = next(CALLS)\n",
            "        calls = next(CALLS)\n        while Path('slow').exists(): time.sleep(0.01)\n",
        )
    )
    body = """
beside = []
with WarmRunner() as runner:
    train(runner)
    Path("slow").touch()
    thread = threading.Thread(target=lambda: beside.append(train(runner)))
    thread.start()
    while "generation" not in events("runs/tiny-0002"):
        time.sleep(0.01)
    task = Path("task.py")
    task.write_text(task.read_text().replace("momentum=0.9", "momentum=0.5").replace("'slow'", "'never'"))
    edited = train(runner)
    Path("slow").unlink()
    thread.join()
    stay = len(family())
    print(json.dumps([beside[0]["weights_digest"], beside[0]["recoveries"], edited["weights_digest"], stay]))
"""
    digest, recoveries, edited, stay = outcome(workplace, body)
    assert (digest, recoveries) == (undisturbed, [])
    assert edited != undisturbed
    assert stay == 2


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("who", ["worker", "fork server", "both"])
def test_what_is_killed_during_a_warm_run_is_replaced(workplace: Workplace, undisturbed: str, who: str) -> None:
    workplace.write_job(workers=2)
    (workplace.folder / "go").touch()
    script = workplace.folder / "script.py"
    body = """
with WarmRunner() as runner:
    train(runner)
    Path("go").unlink()
    run = train(runner)
    print(json.dumps([run["weights_digest"], len(run["recoveries"]), train(runner)["weights_digest"]]))
"""
    script.write_text(PRELUDE + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=workplace.folder,
        env=os.environ | {"HOLD": in_step(4, 2)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    await_condition(
        "step 3 of the second run",
        lambda: len(workplace.runs()) == 2 and any(each.get("step") == 3 for each in workplace.events()),
    )
    # The process that stays has forked a fork server, which has forked workers.
    family = workplace.pids("quorate: ")
    family = [pid for pid in family if "coordinator" not in command_line(pid)]
    (stays,) = [pid for pid in family if parent_of(pid) not in family]
    (forked,) = [pid for pid in family if parent_of(pid) == stays]
    workers = [pid for pid in family if parent_of(pid) == forked]
    assert len(workers) == 2
    os.kill({"worker": workers[1], "fork server": forked, "both": stays}[who], signal.SIGKILL)
    await_condition("its loss", lambda: any(each["kind"] == "lost" for each in workplace.events()))
    workplace.go()
    stdout, _ = process.communicate(timeout=PATIENCE)
    workplace.assert_nobody_left()
    digest, recoveries, next_digest = json.loads(stdout)
    assert (digest, next_digest) == (undisturbed, undisturbed)
    assert recoveries >= 1


@pytest.mark.long
def test_two_tasks_in_turn_are_imported_once_each_and_one_with_a_thread_every_time(workplace: Workplace) -> None:
    workplace.write_job(workers=1)
    text = workplace.task.read_text()
    (workplace.folder / "other.py").write_text(text.replace("momentum=0.9", "momentum=0.1"))
    (workplace.folder / "threaded.py").write_text(
        text + "\n\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    body = """
names = ["task", "other", "task", "other", "threaded", "threaded", "task"]
with WarmRunner() as runner:
    runs = [train(runner, task=f"{name}.py:Tiny") for name in names]
    known = [any("is imported already" in message for message in told(run)) for run in runs]
    print(json.dumps([[run["weights_digest"] for run in runs], known]))
"""
    digests, known = outcome(workplace, body)
    assert digests[0] == digests[2] == digests[4] == digests[5] == digests[6]
    assert digests[1] == digests[3] != digests[0]
    # Two are kept; the one that cannot be has taken the place of the one that was not used for longest.
    assert known == [False, False, True, True, False, False, False]


@pytest.mark.long
def test_twenty_runs_leave_no_process_descriptor_or_shared_memory(workplace: Workplace) -> None:
    workplace.write_job(workers=2, steps=2, checkpoint=None)
    body = """
def held():
    processes = [os.getpid(), *family()]
    return [
        [len(os.listdir(f"/proc/{pid}/fd")) for pid in processes],
        [len(os.listdir(f"/proc/{pid}/task")) for pid in processes[1:]],
        [len(children_of(pid)) for pid in processes],
        sorted(name for name in os.listdir("/dev/shm") if "quorate" in name),
        threading.active_count(),
    ]

with WarmRunner() as runner:
    for _ in range(2):
        train(runner)
    before = held()
    for _ in range(18):
        train(runner)
    print(json.dumps([before, held()]))
"""
    before, after = outcome(workplace, body)
    assert after == before


@pytest.mark.long
@pytest.mark.faults
def test_all_that_stays_ends_with_its_owner(workplace: Workplace) -> None:
    workplace.write_job(workers=2)
    script = workplace.folder / "script.py"
    script.write_text(
        PRELUDE
        + "    runner = WarmRunner()\n"
        + "    for _ in range(2):\n"
        # What stays must not end with the thread that has started it.
        + "        thread = threading.Thread(target=train, args=(runner,))\n"
        + "        thread.start(), thread.join()\n"
        + "        stay = family()\n"
        + "    assert stay == family() and len(stay) == 1\n"
        + "    Path('trained').touch()\n"
        + "    train(runner, steps=10_000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=workplace.folder, env=os.environ | {"PAUSE": "0.01"}, start_new_session=True
    )
    await_condition("two runs", (workplace.folder / "trained").exists)
    await_condition("a third", lambda: len(workplace.runs()) == 3 and len(workplace.workers()) >= 2)
    process.kill()
    process.wait()
    workplace.assert_nobody_left()


@pytest.mark.long
def test_train_and_resume_in_a_warm_block_are_warm_and_the_block_leaves_nothing(
    workplace: Workplace, undisturbed: str
) -> None:
    workplace.write_job(workers=2)
    body = """
import quorate

job = quorate.Job.from_file("job.yaml")
with quorate.warm():
    first = quorate.train(job.replace(steps=4), progress=False)
    inside = family()
    second = quorate.resume(first.run, {"steps": 8}, progress=False)
print(json.dumps([second.weights_digest, len(inside), family(), told(second.fields)]))
"""
    digest, inside, after, log = outcome(workplace, body)
    assert (digest, inside, after) == (undisturbed, 1, [])
    assert any("is imported already" in message for message in log)
