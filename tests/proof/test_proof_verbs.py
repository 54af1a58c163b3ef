"""`quorate checkpoints recreate`, `certify`, `key` and `replay`, as a person gives them."""

import os
import subprocess
import sys

import pytest

from command import Workplace
from proof.proven_runs import edit_loss
from quorate.storage.run_folder import RunFolder
from schemas import validate

FAILING = """
import torch
from torch import nn
import quorate

class Failing(quorate.Task):
    def model(self):
        return nn.Linear(1, 1)

    def datasets(self):
        return [torch.tensor([float(number)]) for number in range(32)]

    def loss(self, model, batch):
        numbers = batch.flatten().tolist()
        if 19.0 in numbers:
            raise ValueError("this sample is not for me")
        return model(batch / 32).square().mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_recreated_step_is_a_run_that_can_be_exported_and_evaluated(used_workplace: Workplace) -> None:
    done = used_workplace.run("checkpoints", "recreate", "last", "--step", "3", "--workers", "1", "--json")
    assert done.code == 0, done.stderr
    validate("checkpoints-recreate", done.document)
    assert (done.document["from_step"], done.document["compared"], done.document["difference"]) == (0, 3, None)
    assert used_workplace.run("show", "last", "--json").document["run"] == "tiny-0001", "the newest is still the run"
    exported = used_workplace.run("checkpoints", "export", "tiny-0001-step-3", "-o", "model.pt", "--json")
    assert exported.document["step"] == 3
    assert used_workplace.run("eval", "tiny-0001-step-3", "--json").document["step"] == 3

    edit_loss(RunFolder(used_workplace.folder / "runs" / "tiny-0001"), 2)
    differs = used_workplace.run("checkpoints", "recreate", "tiny-0001", "--step", "3", "-o", "again")
    assert differs.code == 1
    assert "step 2 differs: loss " in differs.stdout


def test_a_run_is_certified_and_the_certificate_verified(used_workplace: Workplace) -> None:
    made = used_workplace.run("key", "new", "lab.key", "--json")
    validate("key-new", made.document)
    certify = ("certify", "last", "--key", "lab.key", "--segments", "1", "--json")
    done = used_workplace.run(*certify)
    assert done.code == 0, done.stderr
    validate("certify", done.document)
    assert done.document["public_key"] == made.document["public_key"]
    checked = used_workplace.run("certify", "last", "--verify", "certificate.json", "--json")
    assert (checked.code, checked.document["problems"]) == (0, [])
    assert "1 of 3 segments of tiny-0001" in used_workplace.run("certify", "--verify", "certificate.json").stdout
    assert used_workplace.run("certify", "--verify", "certificate.json", "--signer", "0" * 64).code == 1
    assert used_workplace.run("certify", "--verify", "certificate.json", "--all").code == 2
    assert "is already there" in used_workplace.run(*certify).stderr

    edit_loss(RunFolder(used_workplace.folder / "runs" / "tiny-0001"), 2)
    changed = used_workplace.run("certify", "last", "--verify", "certificate.json", "--json")
    assert (changed.code, len(changed.document["problems"])) == (1, 1)
    (used_workplace.folder / "certificate.json").unlink()
    assert used_workplace.run(*certify, "--all").code == 1
    assert not (used_workplace.folder / "certificate.json").exists()


def replayed(place: Workplace, step: int, typed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quorate", "replay", "last", "--step", str(step), "--pdb"]
    environment = os.environ | {"TMPDIR": str(place.temporary)}
    return subprocess.run(command, cwd=place.folder, env=environment, input=typed, text=True, capture_output=True)


def test_the_debugger_stops_where_a_step_failed(workplace: Workplace) -> None:
    (workplace.folder / "task.py").write_text(FAILING)
    workplace.write_job(task="task.py:Failing", steps=8, epochs=None)
    assert workplace.train().code == 1
    step = max(event["step"] for event in workplace.events() if event["kind"] == "step") + 1
    assert step > 1, "otherwise there is nothing to recreate before it"
    done = replayed(workplace, step, "p 19.0 in numbers\nq\n")
    assert done.returncode == 1
    assert "(Pdb) True" in done.stdout
    assert "this sample is not for me" in done.stderr
    assert list(workplace.temporary.glob("quorate-*")) == []


@pytest.mark.long
def test_where_a_step_does_not_fail_the_debugger_stops_in_each_lane(used_workplace: Workplace) -> None:
    done = replayed(used_workplace, 4, "p [each.shape for each in batch]\n" + "c\n" * 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(Pdb)") == 5
    assert "(Pdb) [torch.Size([2, 3]), torch.Size([2])]" in done.stdout
    assert [f"lane {lane}: loss " in done.stdout for lane in range(5)] == [True] * 4 + [False]
    assert "step 4: as recorded" in done.stdout
