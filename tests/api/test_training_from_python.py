"""Scripts that train: what they get, and how they end."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from command import PATIENCE, TASK_SOURCE, Workplace, await_condition

ARGUMENTS = "lanes=4, batch_size=8, steps=8, failure_timeout=6.0, workers=2, audit={'every': 0}"
GUARDED = f"""
if __name__ == "__main__":
    import json, os, threading
    from quorate.core.digests import weights_digest
    from quorate.replica.device import digests

    result = quorate.train(quorate.Job(task=Tiny, {ARGUMENTS}), progress=False)
    os.chdir("/")
    import random, numpy, torch
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    expected = [torch.rand(1).item(), numpy.random.rand(), random.random()]
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    model = result.load_model()
    assert [torch.rand(1).item(), numpy.random.rand(), random.random()] == expected, "load_model() has reseeded"
    assert isinstance(model, Model), "load_model() has imported the script again"
    again = weights_digest(digests(model.state_dict().items()))
    told = [result.run, result.status, result.steps, result.weights_digest, again, result.metrics]

    def fail_in_a_thread():
        os.environ["TROUBLE"] = "loss"
        try:
            quorate.train(quorate.Job(task=Tiny, {ARGUMENTS}, runs=str(result.folder.parent)), progress=False)
        except quorate.JobFailed as failed:
            told.extend([failed.run, failed.failure.kind, str(failed)])

    thread = threading.Thread(target=fail_in_a_thread)
    thread.start()
    thread.join()
    failed = quorate.open_run("last", runs=result.folder.parent)
    told.extend([failed.status, failed.error])
    print(json.dumps(told))
"""
MODEL_OF_ITS_OWN = """
class Model(nn.Sequential):
    pass


class Tiny(Tiny):
    def model(self):
        return Model(*super().model())
"""


def run_python(workplace: Workplace, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=workplace.folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    workplace.assert_nobody_left()
    return done


def test_a_script_trains_loads_the_model_and_learns_of_a_failure_in_a_thread(
    workplace: Workplace, undisturbed: str
) -> None:
    script = workplace.folder / "script.py"
    script.write_text(TASK_SOURCE + MODEL_OF_ITS_OWN + GUARDED)
    done = run_python(workplace, str(script))
    assert (done.returncode, done.stderr) == (0, "")
    told: list[Any] = json.loads(done.stdout.splitlines()[-1])  # before it, the task's own word: load_model() builds it
    assert told[:5] == ["tiny-0001", "complete", 8, undisturbed, undisturbed]
    assert told[5].keys() == {"loss"}
    assert told[6:8] == ["tiny-0002", "UserCodeError"]
    assert told[8].count("Traceback") == 1
    assert "step 5: ValueError: trouble in loss (in loss())" in told[8]
    assert told[9] == "failed"
    assert "trouble in loss" in told[10]


LOOP = f"""
if __name__ == "__main__":
    job = quorate.Job(task=Tiny, {ARGUMENTS}).replace(steps=10_000)
    for seed in range(3):
        print(quorate.train(job.replace(seed=seed)))
"""


@pytest.mark.usefixtures("unmeasured")
def test_ctrl_c_ends_the_whole_script_after_a_checkpoint(workplace: Workplace) -> None:
    script = workplace.folder / "script.py"
    script.write_text(TASK_SOURCE + LOOP)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=workplace.folder,
        env=os.environ | {"PAUSE": "0.05"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    await_condition("a step", lambda: workplace.runs() and "step" in {event["kind"] for event in workplace.events()})
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    workplace.assert_nobody_left()
    assert (process.returncode, stdout) == (-signal.SIGINT, "")
    assert [run.name for run in workplace.runs()] == ["tiny-0001"]  # the loop did not go on to the next job
    steps = workplace.result()["steps"]
    assert workplace.checkpoints()[-1].startswith(f"step-{steps:08}")
    message = f'run tiny-0001 was interrupted at step {steps}; quorate.resume("tiny-0001") resumes it'
    assert stderr.strip().splitlines()[-1] == f"KeyboardInterrupt: {message}"


def test_a_script_that_trains_when_it_is_imported_gets_the_remedy(workplace: Workplace) -> None:
    script = workplace.folder / "script.py"
    script.write_text(f"{TASK_SOURCE}\nquorate.train(quorate.Job(task=Tiny, {ARGUMENTS}))\n")
    done = run_python(workplace, str(script))
    assert done.returncode == 1
    error = done.stderr.strip().split("\n")[-1]
    assert "RequestError" in error
    assert 'Put the call of quorate.train under `if __name__ == "__main__":`' in error
    assert workplace.runs() == []


@pytest.mark.long
def test_a_class_typed_into_an_interactive_session_is_refused_with_the_remedy(workplace: Workplace) -> None:
    code = "import quorate\nclass Mine(quorate.Task): pass\nquorate.Job(task=Mine, batch_size=8, steps=1)\n"
    done = run_python(workplace, "-", text=code)
    assert done.returncode == 1
    assert "is defined in a notebook or an interactive session" in done.stderr
    assert "%%writefile mine.py" in done.stderr
