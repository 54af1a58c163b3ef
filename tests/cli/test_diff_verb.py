import re

import pytest

from command import Workplace
from schemas import validate


@pytest.fixture
def two_runs(used_workplace: Workplace) -> Workplace:
    changed = ("--set", "params.learning_rate=0.02", "--set", "checkpoint.keep=1", "--workers", "1")
    done = used_workplace.train(*changed)
    assert done.code == 0, done.stderr
    return used_workplace


def test_the_step_at_which_two_runs_part(two_runs: Workplace) -> None:
    done = two_runs.run("diff", "tiny-0001", "last", "--json")
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
    assert not document["same_weights"]

    told = two_runs.run("diff", "tiny-0001", "tiny-0002", COLUMNS="40").stdout
    assert "They diverge at step 2" in told
    assert "0.02" in told
    assert max(len(line.rstrip()) for line in told.splitlines()) <= 40


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
