"""Callbacks hear of each step once, change nothing, and end no job."""

import json
import logging
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import quorate
from command import TASK_SOURCE, Workplace
from quorate.api import callbacks as module
from quorate.api.callbacks import Callback, CallbackServer, Checkpoint, End, EvaluationEnd, Start, StepEnd
from quorate.core.errors import RequestError
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved, EvaluationDone, RunBegan, StepCompleted
from quorate.observe.jsonl import JsonlSink
from quorate.storage.run_folder import RunFolder

TELL = """
import json, os
import quorate

class Tell(quorate.Callback):
    def _write(self, *told):
        with open(os.path.join(os.path.dirname(__file__), "told.jsonl"), "a") as file:
            file.write(json.dumps(told) + "\\n")

    def on_start(self, start):
        self._write("start", start.from_step)

    def on_step_end(self, step):
        self._write("step", step.step, step.loss)
        if step.step == 2:
            raise ValueError("no step for me")

    def on_evaluation(self, evaluation):
        self._write("evaluation", evaluation.step, dict(evaluation.metrics))

    def on_checkpoint(self, checkpoint):
        self._write("checkpoint", checkpoint.step, checkpoint.path.is_dir())

    def on_end(self, end):
        self._write("end", end.status, end.steps, end.weights_digest)
"""


class Heard(Callback):
    def __init__(self) -> None:
        self.records: list[Any] = []

    def on_start(self, start: Start) -> None:
        self.records.append(start)

    def on_step_end(self, step: StepEnd) -> None:
        self.records.append(step)

    def on_evaluation(self, evaluation: EvaluationEnd) -> None:
        self.records.append(evaluation)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.records.append(checkpoint)

    def on_end(self, end: End) -> None:
        self.records.append(end)

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.records if isinstance(each, StepEnd)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "made")


def serve(run: RunFolder, *callbacks: Callback, events: list[Event]) -> None:
    server, file = CallbackServer(run, callbacks), JsonlSink(run.events_file)
    for event in events:
        file.handle(event)
        server.handle(event)
    server.close()
    file.close()


def steps(*numbers: int) -> list[Event]:
    return [StepCompleted(step=step, epoch=0, losses={"": 1 / step}, log={"own": 0.5}) for step in numbers]


def told(place: Workplace) -> list[list[Any]]:
    return [json.loads(line) for line in (place.folder / "told.jsonl").read_text().splitlines()]


def test_each_is_told_once_though_the_file_tells_it_again(run: RunFolder) -> None:
    saved = CheckpointSaved(step=2, path="step-00000002", bytes=9)
    evaluated = EvaluationDone(step=2, metrics={"accuracy": 0.5}, best=True)
    heard = Heard()
    events = [RunBegan(from_step=0, total_steps=3), *steps(1, 2), evaluated, saved]
    serve(run, heard, events=[*events, *events, *steps(2, 3)])
    assert heard.steps == [1, 2, 3]
    start, first, *_ = heard.records
    assert (start.run, start.total_steps, first.loss, dict(first.log)) == (run.name, 3, 1.0, {"own": 0.5})
    assert [type(each) for each in heard.records[3:5]] == [EvaluationEnd, Checkpoint]
    assert heard.records[4].path == run.checkpoints / "step-00000002"
    assert isinstance(heard.records[-1], End)
    with pytest.raises(TypeError):
        first.log["own"] = 1.0


def test_whoever_resumes_hears_what_was_not_heard_and_nothing_twice(run: RunFolder) -> None:
    serve(run, Heard(), events=[RunBegan(), *steps(1, 2, 3)])
    file = JsonlSink(run.events_file)
    for event in steps(4):  # the launcher was killed before it was told
        file.handle(event)
    again = Heard()
    serve(run, again, events=[RunBegan(from_step=2), *steps(3, 4, 5)])
    assert isinstance(again.records[0], Start)
    assert again.steps == [4, 5]


def test_callbacks_that_are_new_in_a_resumed_run_hear_of_what_is_to_come(run: RunFolder) -> None:
    file = JsonlSink(run.events_file)
    for event in [RunBegan(), *steps(1, 2)]:
        file.handle(event)
    heard = Heard()
    serve(run, heard, events=[RunBegan(from_step=2), *steps(2, 3)])
    assert heard.steps == [2, 3]


def test_what_a_callback_raises_is_named_and_the_others_are_called(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Callback):
        def on_step_end(self, step: StepEnd) -> None:
            raise SystemExit("no more")

    heard = Heard()
    with caplog.at_level(logging.WARNING):
        serve(run, Fails(), heard, events=[RunBegan(), *steps(1, 2, 3)])
    assert heard.steps == [1, 2, 3]
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("callback Fails: on_step_end at step 1 raised SystemExit: no more. Training continues")
    assert last == "callback Fails: on_step_end raised 3 times in all"


def test_one_that_hangs_is_given_up_when_the_job_is_over(
    run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    class Hangs(Heard):
        def on_step_end(self, step: StepEnd) -> None:
            super().on_step_end(step)
            go.wait()

    monkeypatch.setattr(module, "PATIENCE", 0.2)
    hangs = Hangs()
    serve(run, hangs, events=[RunBegan(), *steps(1, 2)])
    go.set()
    assert hangs.steps == [1]
    assert (
        "Hangs.on_step_end at step 1 has not returned; events that they have not handled yet are skipped" in caplog.text
    )


def test_a_slow_one_hears_everything_in_the_end(run: RunFolder) -> None:
    class Slow(Heard):
        def on_step_end(self, step: StepEnd) -> None:
            threading.Event().wait(0.02)
            super().on_step_end(step)

    slow = Slow()
    serve(run, slow, events=[RunBegan(), *steps(*range(1, 20))])
    assert slow.steps == list(range(1, 20))
    assert isinstance(slow.records[-1], End)


@pytest.mark.long
def test_with_a_worker_killed_each_step_is_told_once_and_the_digest_is_the_same(
    workplace: Workplace, undisturbed: str
) -> None:
    (workplace.folder / "tell.py").write_text(TELL)
    workplace.write_job(callbacks=["tell.py:Tell"])
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD="9")
    running.await_event("step", at_least=4)
    os.kill(workplace.workers()[0], signal.SIGKILL)
    running.await_event("lost")
    workplace.go()
    done = running.done()
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    assert "callback Tell: on_step_end at step 2 raised ValueError: no step for me" in done.stderr
    heard = told(workplace)
    total = done.document["steps"]
    assert [each[1] for each in heard if each[0] == "step"] == list(range(1, total + 1))
    assert heard[0] == ["start", 0]
    assert heard[-1] == ["end", "complete", total, undisturbed]
    assert heard.count(heard[-1]) == 1
    evaluations = [event for event in workplace.events() if event["kind"] == "evaluation"]
    assert [each[1:] for each in heard if each[0] == "evaluation"] == [[e["step"], e["metrics"]] for e in evaluations]
    assert all(each[2] for each in heard if each[0] == "checkpoint")


@pytest.mark.parametrize(
    ("named", "answer"),
    [
        ('["tell.py:Tell"]', None),
        ('"tell.py:Tell"', 'callbacks is the text "tell.py:Tell". They run in the launcher, so name them'),
        pytest.param(
            '["tell.py"]',
            "callbacks of the task: Name the class after a colon: tell.py:MyTask.",
            marks=pytest.mark.long,
        ),
        ('["none.py:Tell"]', "none.py:Tell cannot be imported"),
    ],
)
def test_a_task_may_name_them(workplace: Workplace, named: str, answer: str | None) -> None:
    (workplace.folder / "tell.py").write_text(TELL)
    with workplace.task.open("a") as file:
        file.write(f"\n\nTiny.callbacks = {named}\n")
    done = workplace.run("train", "job.yaml", "--steps", "3", "--quiet")
    if answer is None:
        assert done.code == 0, done.stderr
        assert [each[1] for each in told(workplace) if each[0] == "step"] == [1, 2, 3]
    else:
        assert done.code == 2
        assert answer in " ".join(done.stderr.split())


SCRIPT = (
    TASK_SOURCE
    + """
if __name__ == "__main__":
    import json

    class Steps(quorate.Callback):
        def __init__(self):
            self.steps = []

        def on_step_end(self, step):
            self.steps.append(step.step)

    first, second = Steps(), Steps()
    job = quorate.Job(task=Tiny, lanes=4, batch_size=8, steps=4, workers=2, checkpoint={"every": 2})
    result = quorate.train(job, progress=False, callbacks=[first])
    quorate.resume(result.run, {"steps": 6}, progress=False, callbacks=[second])
    print(json.dumps([first.steps, second.steps]))
"""
)


@pytest.mark.long
def test_in_python_and_when_a_run_is_resumed(workplace: Workplace) -> None:
    workplace.task.write_text(SCRIPT)
    done = workplace.start_module("task").done()
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("nowhere.py:Tell", "cannot be imported: FileNotFoundError"),
        ("nowhere:Tell", "cannot be imported: ModuleNotFoundError"),
        ("tell.py:Tall", "is not there. Name a class: `class Tall(quorate.Callback):`"),
        ("json:loads", "is a function"),
    ],
)
def test_what_is_no_callback_is_refused_by_name(reference: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    job = quorate.Job(task="task.py:Tiny", batch_size=8, steps=2, callbacks=[reference])
    placed = [each.replace(str(Path.cwd()), str(tmp_path)) for each in job.spec.callbacks]
    with pytest.raises(RequestError, match=f"callbacks: .*{text.split('(')[0]}"):
        module.load_callbacks(placed)


@pytest.mark.parametrize(
    ("callbacks", "told"),
    [
        ([Heard], "the class Heard is no callback. Give Heard()."),
        ([Path()], "Write `class PosixPath(quorate.Callback):`."),
        ([len], "Write `class Tell(quorate.Callback):`."),
        (["tell.py:Tell"], "By name it is a key: quorate.Job(..., callbacks=['tell.py:Tell'])."),
        (Heard, "the class Heard is no list of callbacks. Write callbacks=[Tell()]."),
        ("tell.py:Tell", "is no list of callbacks"),
    ],
)
def test_an_object_that_is_no_callback_is_refused(callbacks: Any, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        module.with_callbacks(lambda begun: None, callbacks)  # type: ignore[arg-type,return-value]
