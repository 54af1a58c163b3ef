"""The example that everyone runs first, on any number of workers: in forked workers, and by the command itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gang
from quorate.spec.load import load_job
from quorate.task.source import load_task_type

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.yaml"

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize(
    ("lanes", "numbers"),
    [(4, (1, 3)), *(pytest.param(*more, marks=pytest.mark.long) for more in ((4, (1, 2, 4)), (5, (1, 3, 5))))],
)
def test_one_digest_on_any_number_of_workers(lanes: int, numbers: tuple[int, ...], tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, {}, []).spec
    task = load_task_type(spec.task, spec.seed)
    spec = spec.model_copy(update={"lanes": lanes, "epochs": None, "steps": 12})
    for workers in numbers:
        (tmp_path / str(workers)).mkdir()
    ends = [gang.train(task, spec, workers, tmp_path / str(workers)) for workers in numbers]
    assert len({end.digest for end in ends}) == 1
    assert all(end.progress == ends[0].progress for end in ends), "metrics must be equal too, to the last bit"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "quorate", *arguments, "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.long
def test_the_command_gives_one_digest_and_learns(tmp_path: Path) -> None:
    alone, together = (
        run(tmp_path, "train", str(EXAMPLE), "--workers", workers, "--epochs", "2") for workers in ("1", "4")
    )
    assert alone["final_metrics"]["accuracy"] > 0.9
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["final_metrics"] == alone["final_metrics"]


UNSEEDED = """
import torch
import quorate

class Unseeded(quorate.Task):
    def model(self):
        unseeded = torch.Generator()
        unseeded.seed()
        model = torch.nn.Linear(2, 1)
        torch.nn.init.normal_(model.weight, generator=unseeded)
        return model
    def datasets(self):
        return [torch.ones(2)] * 8
    def loss(self, model, batch):
        return model(batch).mean()
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_built_without_a_seed_ends_the_job_before_its_first_step(workers: int, tmp_path: Path) -> None:
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    (tmp_path / "job.yaml").write_text("task: unseeded.py:Unseeded\nlanes: 2\nbatch_size: 4\nsteps: 2\n")
    done = subprocess.run(
        [sys.executable, "-m", "quorate", "train", "job.yaml", "--workers", str(workers)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "'weight'" in done.stderr
    assert "seed" in done.stderr
    assert not list(tmp_path.glob("runs/*/events.jsonl")), "what is refused leaves no run behind"
