import os
import re
import signal

import pytest

from command import Workplace, await_condition
from schemas import validate


@pytest.fixture
def two_runs(used_workplace: Workplace) -> Workplace:
    # Of the second only the state of its end is kept: a replay needs two, however few the run itself keeps.
    changed = ("--set", "params.learning_rate=0.02", "--set", "checkpoint.keep=1", "--workers", "1")
    done = used_workplace.train(*changed)
    assert done.code == 0, done.stderr
    return used_workplace


def test_the_step_at_which_two_runs_part_and_the_tensors_in_which_they_do(two_runs: Workplace) -> None:
    done = two_runs.run("diff", "tiny-0001", "last", "--tensor", "--json")
    assert (done.code, done.stderr) == (0, "")
    document = done.document
    validate("diff", document)
    assert {change["key"]: (change["left"], change["right"]) for change in document["keys"]} == {
        "params.learning_rate": (None, 0.02),  # the first run has the default of the task
        "workers": (2, 1),
        "checkpoint.keep": (3, 1),
    }
    # The rate acts for the first time when step 1 is applied, so step 2 is the first with another loss.
    assert document["divergence"]["step"] == 2
    assert document["replay"]["moment"] == "before"
    assert document["replay"]["unfaithful"] == []
    assert [tensor["name"] for tensor in document["replay"]["tensors"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not document["same_weights"]

    told = two_runs.run("diff", "tiny-0001", "tiny-0002", COLUMNS="40").stdout
    assert "They diverge at step 2" in told
    assert "0.02" in told
    assert max(len(line.rstrip()) for line in told.splitlines()) <= 40

    # A replay by other code would explain nothing.
    two_runs.task.write_text(two_runs.task.read_text() + "\nCHANGED = True\n")
    refused = two_runs.run("diff", "tiny-0001", "last", "--tensor")
    assert refused.code == 2
    assert "run tiny-0001 cannot be replayed: the task's code has changed since run tiny-0001 began" in refused.error


def test_a_run_and_itself_do_not_part(used_workplace: Workplace) -> None:
    told = used_workplace.run("diff", "last", "tiny-0001").stdout
    assert "They do not diverge" in told
    assert "the same weights" in told
    assert "All keys of their jobs are equal." in told


def test_weights_that_are_not_promised_to_be_the_same_are_no_fault(used_workplace: Workplace) -> None:
    mode = ("strategy.kind=parameter-server", "strategy.mode=asynchronous")
    by_itself = "class TroubledSgd(torch.optim.SGD):\n    per_parameter = True\n"
    source = used_workplace.task.read_text()
    used_workplace.task.write_text(source.replace("class TroubledSgd(torch.optim.SGD):\n", by_itself))
    done = used_workplace.train(*(word for each in mode for word in ("--set", each)))
    assert done.code == 0, done.stderr
    told = used_workplace.run("diff", "tiny-0001", "last", COLUMNS="200").stdout
    assert "In mode asynchronous weights depend on which update came first" in told
    shown = used_workplace.run("show", "last", COLUMNS="200").stdout
    assert re.search(r"\d+ staleness reports?\b", shown), shown


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_an_interrupted_replay_leaves_nothing_behind(two_runs: Workplace) -> None:
    scratch = two_runs.folder / "scratch"
    scratch.mkdir()
    running = two_runs.start("diff", "tiny-0001", "last", "--tensor", PAUSE="5", TMPDIR=str(scratch))
    await_condition("a scratch run that trains", lambda: list(scratch.glob("*/0/*/logs/worker-0.status")))
    os.kill(running.process.pid, signal.SIGINT)
    done = running.done()
    assert done.code == 130
    assert done.error == "interrupted; the run is as it was."
    assert list(scratch.glob("quorate-*")) == []
