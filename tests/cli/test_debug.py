"""`quorate train --debug` at a terminal: breakpoints in every function of a task, to the same bits."""

import re
import subprocess
import sys
from typing import Any

import pytest

from command import Workplace, await_condition
from terminal import TerminalCommand

STOPPING = """
from pathlib import Path
import torch
from torch import nn
import quorate

SEEN = set()

def first(place):
    is_first = place in PLACES and place not in SEEN
    SEEN.add(place)
    return is_first

class Points:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if first("dataset"): breakpoint()
        value = torch.full((3,), float(index))
        return value, value.sum()

class Stopping(quorate.Task):
    def model(self):
        if first("model"): breakpoint()
        return nn.Linear(3, 1)

    def datasets(self):
        if first("datasets"): breakpoint()
        return Points(), Points()

    def loss(self, model, batch):
        inputs, targets = batch
        if first("loss"): breakpoint()
        error = model(inputs * 0.01).squeeze(-1) - targets * 0.01
        return (error ** 2).mean()

    def metrics(self, model, batch):
        if first("metrics"): breakpoint()
        return {"loss": self.loss(model, batch)}

    def optimizer(self, model):
        if first("optimizer"): breakpoint()
        return torch.optim.SGD(model.parameters(), lr=0.1)

def main(run):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    points = Points()
    for epoch in run.epochs():
        for inputs, targets in run.batches(points):
            if first("main"): breakpoint()
            error = model(inputs * 0.01).squeeze(-1) - targets * 0.01
            run.step((error ** 2).mean())
"""
PLACES = ["model", "optimizer", "datasets", "dataset", "loss", "metrics"]


def task_at(workplace: Workplace, *places: str, **job: Any) -> None:
    """A job whose task stops at these places."""
    (workplace.folder / "task.py").write_text(f"PLACES = {list(places)!r}\n{STOPPING}")
    workplace.write_job(task="task.py:Stopping", **job)


def prompts(terminal: TerminalCommand) -> int:
    return len(re.findall(r"\(Pdb\) ", terminal.text))


def answer(terminal: TerminalCommand, *commands: str) -> None:
    """Type each command at the next prompt of pdb."""
    for command in commands:
        seen = prompts(terminal)
        terminal.type(f"{command}\n")
        if command != commands[-1]:
            await_condition("the next prompt", lambda seen=seen: prompts(terminal) > seen)  # type: ignore[misc]


def digest_of(workplace: Workplace) -> str:
    return str(workplace.result()["weights_digest"])


@pytest.mark.parametrize("task", ["Stopping", "main"])
def test_each_place_stops_steps_and_goes_on_to_the_same_bits(workplace: Workplace, task: str) -> None:
    places = ["main"] if task == "main" else PLACES
    task_at(workplace, loader_workers=2, steps=4, failure_timeout=1.0)
    workplace.write_job(task=f"task.py:{task}", loader_workers=2, steps=4, failure_timeout=1.0)
    assert workplace.train("--workers", "2").code == 0
    undisturbed = digest_of(workplace)
    (workplace.folder / "task.py").write_text(f"PLACES = {places!r}\n{STOPPING}")
    with TerminalCommand(workplace.folder, 100, "train", "job.yaml", "--workers", "2", "--debug") as terminal:
        for count in range(len(places)):
            await_condition("a prompt", lambda count=count: prompts(terminal) > 2 * count)  # type: ignore[misc]
            answer(terminal, "n", "c")
        assert terminal.ended() == 0, terminal.text
    for place in places:
        name = {"dataset": "__getitem__"}.get(place, place)
        assert re.search(rf"task\.py\(\d+\){name}\(\)", terminal.text), terminal.text
    assert digest_of(workplace) == undisturbed
    assert "1 worker" in terminal.text


def test_a_long_stop_costs_nothing(workplace: Workplace) -> None:
    """Longer than `failure_timeout` and `step_timeout` allow."""
    task_at(workplace, "loss", steps=2, failure_timeout=0.5, step_timeout=0.5)
    with TerminalCommand(workplace.folder, 100, "train", "job.yaml", "--debug") as terminal:
        await_condition("a prompt", lambda: prompts(terminal))
        answer(terminal, "import time; time.sleep(2.5)", "c")
        assert terminal.ended() == 0, terminal.text
    assert [event["kind"] for event in workplace.events()].count("generation") <= 1
    assert not {"lost", "stall"} & {event["kind"] for event in workplace.events()}


@pytest.mark.parametrize("keys", ["q\n", *(pytest.param(keys, marks=pytest.mark.long) for keys in ("\x04", "CTRL-C"))])
def test_quitting_ends_in_words_and_the_run_can_be_resumed(workplace: Workplace, keys: str) -> None:
    task_at(workplace, steps=4, checkpoint={"every": 1})
    assert workplace.train().code == 0
    undisturbed = digest_of(workplace)
    source = (workplace.folder / "task.py").read_text()
    stop_late = 'if any(Path("runs/tiny-0002/checkpoints").glob("step-*")): breakpoint()'
    (workplace.folder / "task.py").write_text(source.replace('if first("loss"): breakpoint()', stop_late))
    with TerminalCommand(workplace.folder, 100, "train", "job.yaml", "--debug") as terminal:
        await_condition("a prompt", lambda: prompts(terminal))
        if keys == "CTRL-C":
            terminal.interrupt()
            await_condition("the first to be heard", lambda: "interrupted" in terminal.text or "stop" in terminal.text)
            terminal.interrupt()
        else:
            terminal.type(keys)
        assert terminal.ended() == 130, terminal.text
    told = " ".join(terminal.text.split())
    assert "Traceback" not in told
    assert told.count("the debugger was quit") <= 1
    if keys != "CTRL-C":
        # Where that is depends on when the first checkpoint is there.
        where = re.search(r"the debugger was quit in (\w+\(\)), and the job with it; any checkpoint so far is", told)
        assert where is not None and where[1] in ("loss()", "metrics()"), told
    assert "quorate resume tiny-0002" in told
    assert workplace.result()["status"] == "interrupted"
    (workplace.folder / "task.py").write_text(source)
    # Without the breakpoint it is other code: the bits are compared with those of a branch.
    assert workplace.run("resume", "tiny-0002", "--branch", "--workers", "2").code == 0
    assert digest_of(workplace) == undisturbed


@pytest.mark.parametrize(
    ("place", "call"), [("loss", "breakpoint()"), ("loss", "import pdb; pdb.set_trace()"), ("dataset", "breakpoint()")]
)
def test_without_debug_a_breakpoint_says_what_to_type(workplace: Workplace, place: str, call: str) -> None:
    task_at(workplace, place, loader_workers=1)
    task = workplace.folder / "task.py"
    task.write_text(task.read_text().replace(f'if first("{place}"): breakpoint()', call))
    done = workplace.train()
    assert done.code != 0
    assert "`quorate train job.yaml --debug`" in " ".join(done.error.split())
    assert f"in {'loss' if place == 'loss' else '__getitem__'}" in done.traceback


def test_what_needs_more_processes_is_refused(workplace: Workplace) -> None:
    task_at(workplace)
    for settings, told in (
        (["--set", "strategy=ddp"], "--set strategy=ring"),
        (["--set", "strategy.kind=parameter-server"], "--set strategy=ring"),
        (["--set", "engine=ray"], "--set engine=local"),
        (["--set", "batch_size=auto"], "--set batch_size=32"),
        (["--json"], "--debug needs this terminal"),
    ):
        done = workplace.run("train", "job.yaml", "--debug", *settings)
        assert (done.code, told in done.stderr + done.stdout) == (2, True), done.stderr
    assert not workplace.runs()


def test_from_python(workplace: Workplace) -> None:
    """With a notice that the environment is another; and what is called without a guard is refused."""
    task_at(workplace)
    script = workplace.folder / "script.py"
    script.write_text(
        "import quorate, task\n"
        "def go(debug):\n"
        "    job = quorate.Job(task=task.Stopping, lanes=4, batch_size=8, steps=3, name='tiny')\n"
        "    return quorate.train(job, debug=debug).weights_digest\n"
        "if __name__ == '__main__':\n"
        "    print(go(True) == go(False))\n"
    )
    done = subprocess.run(
        [sys.executable, script.name], cwd=workplace.folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines()[-1] == "True", done.stderr
    assert "PYTHONHASHSEED" in done.stderr
