"""`quorate.launch` from a script, and what other verbs make of such a run."""

import functools  # noqa: F401  # by a text below
import json
import subprocess
import sys
from typing import Any

import pytest

from command import PATIENCE, Workplace

SCRIPT = """
import json
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate


def main(run, width: int = 4):
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1))
    run.evaluate(data, lambda batch: {"loss": F.mse_loss(model(batch[0]).squeeze(-1), batch[1])})
    for epoch in run.epochs():
        for inputs, targets in run.batches(data):
            run.step(F.mse_loss(model(inputs).squeeze(-1), targets))


if __name__ == "__main__":
    keys = {"lanes": 4, "batch_size": 8, "params": {"width": 5}}
    short = quorate.launch(main, progress=False, epochs=2, workers=1, **keys)
    long = quorate.launch(main, progress=False, epochs=3, workers=2, **keys)
    resumed = quorate.resume(short.run, {"epochs": 3, "workers": 2}, progress=False)
    again = quorate.evaluate(long.run)
    widths = [len(model[0].weight) for model in (long.load_model(), quorate.open_run(short.run).load_model())]
    digests = [each.weights_digest for each in (long, resumed, again)]
    print(json.dumps([*digests, widths, long.run, again.metrics == long.metrics]))
"""


@pytest.mark.long
def test_a_script_launches_its_loop_and_the_run_is_one_like_any_other(workplace: Workplace) -> None:
    script = workplace.folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=workplace.folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    long, resumed, evaluated, widths, name, is_same = json.loads(done.stdout.splitlines()[-1])
    assert long == resumed == evaluated
    assert (widths, name, is_same) == ([5, 5], "script-0002", True)
    workplace.write_job(task="script.py:main", steps=None, epochs=3, params={"width": 5})
    assert workplace.train("--json").document["weights_digest"] == long
    planned = workplace.run("plan", "job.yaml")
    assert planned.code == 2
    assert "`quorate plan` takes a quorate.Task" in " ".join(planned.error.split())
    workplace.assert_nobody_left()


class Trainer:
    def fit(self, run: Any) -> None: ...


@pytest.mark.parametrize(
    ("main", "answer"),
    [
        ("lambda run: None", "a lambda has no name"),
        ("None", "takes the function itself and was given nothing"),
        ("Trainer().fit", "a method or an object, is nothing that workers could find"),
        ("Trainer.fit", "a method or an object"),
        ("functools.partial(Trainer.fit, None)", "at the top of a module, which calls it; `params` sets"),
    ],
)
def test_what_workers_could_not_find_is_refused(main: str, answer: str) -> None:
    import quorate

    with pytest.raises(quorate.TaskError, match=answer):
        quorate.launch(eval(main), batch_size=8, epochs=1)


WRONG_SHAPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def main(run):
    model = nn.Linear(4, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.ones(16, 4), torch.ones(16))
    for epoch in run.epochs():
        for inputs, targets in run.batches(data):
            run.step((model(inputs + torch.zeros(3)).squeeze(1) - targets).square().mean())
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_torch_in_the_loop_is_shown_and_kills_no_process(workplace: Workplace, workers: int) -> None:
    """For its message torch walks the stack to its end."""
    (workplace.folder / "script.py").write_text(WRONG_SHAPE)
    workplace.write_job(task="script.py:main", batch_size=8, lanes=2, workers=workers)
    done = workplace.train()
    assert done.code == 1
    assert "The size of tensor a (4) must match the size of tensor b (3)" in " ".join(done.error.split())
    assert not [event for event in workplace.events() if event["kind"] == "lost"]


LOGGING = """
import logging
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset

log = logging.getLogger("mine")


def main(run):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("told: %(message)s"))
    log.addHandler(handler)
    log.warning("top")
    model = nn.Linear(4, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        log.warning("epoch %d", epoch)
        data = TensorDataset(torch.ones(16, 4), torch.ones(16))
        for inputs, targets in run.batches(data):
            result = run.step((model(inputs).squeeze(1) - targets).square().mean())
            if result is not None and run.is_main and result.step == 3:
                raise ValueError("mine")
"""


def test_what_the_leading_worker_raises_alone_ends_the_job_and_rehearsals_log_nothing(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(LOGGING)
    workplace.write_job(task="script.py:main", batch_size=8, lanes=2, workers=2, audit={"every": 1})
    done = workplace.train()
    assert (done.code, done.error) == (1, "worker 0, step 3: ValueError: mine (in main())")
    assert 'raise ValueError("mine")' in done.traceback
    assert not [event for event in workplace.events() if event["kind"] == "lost"]
    records = [json.loads(line) for line in (workplace.last / "logs" / "worker-0.jsonl").read_text().splitlines()]
    printed = [each["message"] for each in records if each.get("source") == "stdout"]
    assert printed == ["told: top", "told: epoch 0", "told: epoch 1"]
    assert [each["message"] for each in records if each.get("logger") == "mine"] == ["top", "epoch 0", "epoch 1"]


def test_an_error_of_launch_that_nobody_catches_is_shown_without_frames_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import quorate

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(quorate.TaskError) as raised:
        quorate.launch(3)  # type: ignore[arg-type]
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err
    assert "quorate.launch(3)" in shown
    assert "was given the int 3" in shown
    assert "src/quorate" not in shown
    sys.excepthook(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "ValueError: another\n"
