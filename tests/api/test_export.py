"""Models with ties, buffers and state of their own, as files that plain PyTorch takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from checkpoint.split_save import split
from checkpoint.whole_save import save_whole
from quorate.api.checkpoints import Format, export_model, verify_run
from quorate.api.result import Result
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tree import tensor_forms
from quorate.core.errors import JobError, RunError
from quorate.replica.replica import Replica
from quorate.spec.load import resolve_mapping
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder
from quorate.task.source import load_task_type
from quorate.task.task import configure

MODEL = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


class Stateful(Tied):
    def get_extra_state(self):
        return {"word": "kept"}

    def set_extra_state(self, state):
        assert state == {"word": "kept"}
"""
TASK = (
    MODEL
    + """
import quorate


class Words(quorate.Task):
    kind: str = "Tied"

    def model(self):
        return globals()[self.kind]()

    def datasets(self):
        return [0, 1, 2, 3], None

    def loss(self, model, batch):
        return model(batch).sum()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
LOAD = """
import sys

sys.path.insert(0, sys.argv[1])
from plain_model import *

if sys.argv[2].endswith(".pt"):
    state = torch.load(sys.argv[2], weights_only=True)
else:
    from safetensors.torch import load_file
    state = load_file(sys.argv[2])
model = globals()[sys.argv[3]]()
model.load_state_dict(state)
assert model.head.weight is model.embedding.weight
assert "quorate" not in sys.modules
import json
print(json.dumps({name: value.tolist() for name, value in model.state_dict().items() if hasattr(value, "tolist")}))
"""


def run_of(tmp_path: Path, kind: str, **more: Any) -> tuple[RunFolder, dict[str, Any]]:
    """A run with a checkpoint of a model, and what its state_dict held then."""
    (tmp_path / "words.py").write_text(TASK)
    keys = {"task": f"{tmp_path}/words.py:Words", "batch_size": 8, "steps": 1, "params": {"kind": kind}, **more}
    resolved = resolve_mapping(keys, "test", {}, [])
    run = RunFolder.create(tmp_path / "runs", "words")
    run.write_job(dump_job(resolved))
    task = configure(load_task_type(resolved.spec.task, 0), resolved.spec.params, "test", 0)
    replica = Replica(task, resolved.spec)
    replica.model.embedding.weight.data += 1.5  # type: ignore[operator, union-attr]
    save_whole(
        CheckpointFolder(run.checkpoints),
        {"replica": replica.state()},
        step=3,
        phase=0,
        weights_digest=replica.weights_digest(),
        job=resolved.spec.model_dump(),
        environment={},
        metrics={},
    )
    state = replica.model.state_dict()
    return run, {name: value.tolist() for name, value in state.items() if hasattr(value, "tolist")}


def loaded(tmp_path: Path, file: Path, kind: str) -> dict[str, Any]:
    (tmp_path / "plain_model.py").write_text(MODEL)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(file), kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


@pytest.mark.long
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_ties_and_buffers_are_what_the_model_itself_loads(tmp_path: Path, name: str) -> None:
    run, expected = run_of(tmp_path, "Tied")
    done = export_model(run, tmp_path / "new folder" / name, "last", None, force=False)
    assert (done.step, done.tensors) == (3, 7)
    assert loaded(tmp_path, done.file, "Tied") == expected
    assert [entry.name for entry in done.file.parent.iterdir()] == [name], "no temporary is left"


def test_a_model_that_lies_in_pieces_is_exported_whole(tmp_path: Path) -> None:
    run, expected = run_of(tmp_path, "Tied", average={"decay": 0.9})
    folder = CheckpointFolder(run.checkpoints)
    whole = folder.load(folder.list()[0]).state["replica"]["tensors"]
    info = split(folder, folder.list()[0])
    assert sum("pieces" in form for _, form in tensor_forms(info.manifest.skeleton)) >= 4
    assert [examined.problem for examined in verify_run(run).examined] == [""]
    done = export_model(run, tmp_path / "model.safetensors", "last", None, force=False, averaged=False)
    assert loaded(tmp_path, done.file, "Tied") == expected
    averaged = Result.of(run, {"status": "complete"}).load_model(averaged=True)
    assert torch.equal(averaged.embedding.weight, whole["embedding.weight (averaged)"])


def test_the_averages_are_exported_on_request_and_only_where_there_are_any(tmp_path: Path) -> None:
    run, trained = run_of(tmp_path, "Tied", average={"decay": 0.9})
    exported = [export_model(run, tmp_path / f"{a}.pt", "last", None, force=False, averaged=a) for a in (False, True)]
    plain, averaged = (torch.load(done.file, weights_only=True) for done in exported)
    assert plain["embedding.weight"].tolist() == trained["embedding.weight"]
    # The average was not moved in the run, so it is what the model was built with.
    assert torch.allclose(averaged["embedding.weight"], plain["embedding.weight"] - 1.5)
    assert averaged["head.weight"].data_ptr() == averaged["embedding.weight"].data_ptr()
    model = Result.of(run, {"status": "complete"}).load_model(averaged=True)
    assert torch.equal(model.embedding.weight, averaged["embedding.weight"])
    (tmp_path / "without").mkdir()
    without, _ = run_of(tmp_path / "without", "Tied")
    with pytest.raises(RunError, match=r"words-0001 keeps no average of its weights: its job has no `average`"):
        export_model(without, tmp_path / "x.pt", "last", None, force=False, averaged=True)


@pytest.mark.parametrize("evaluates", [False, True])
def test_by_default_a_model_is_given_as_the_run_evaluates(tmp_path: Path, evaluates: bool) -> None:
    run, trained = run_of(tmp_path, "Tied", average={"decay": 0.9, "evaluate": evaluates})
    done = export_model(run, tmp_path / "model.safetensors", "last", None, force=False)
    assert done.averaged is evaluates
    with safetensors.safe_open(done.file, "pt") as file:
        assert file.metadata()["averaged"] == str(evaluates).lower()
        exported = file.get_tensor("embedding.weight")
    assert (exported.tolist() != trained["embedding.weight"]) is evaluates
    opened = Result.of(run, {"status": "complete"})
    assert torch.equal(opened.load_model().embedding.weight, exported)
    assert opened.load_model(averaged=False).embedding.weight.tolist() == trained["embedding.weight"]


@pytest.mark.long
def test_what_is_no_tensor_goes_into_a_torch_file_only(tmp_path: Path) -> None:
    run, expected = run_of(tmp_path, "Stateful")
    with pytest.raises(RunError, match=r"'_extra_state' .* holds tensors only. Export with --format torch"):
        export_model(run, tmp_path / "out", "last", None, force=False)
    done = export_model(run, tmp_path / "out.pt", "3", None, force=False)
    assert loaded(tmp_path, done.file, "Stateful") == expected


def test_a_file_is_replaced_only_by_force_and_whole(tmp_path: Path) -> None:
    run, expected = run_of(tmp_path, "Tied")
    out = tmp_path / "out"
    out.mkdir()
    file = out / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(RunError, match="already exists"):
        export_model(run, out, "last", Format.SAFETENSORS, force=False)
    assert file.read_text() == "mine"
    export_model(run, out, "last", Format.SAFETENSORS, force=True)
    assert loaded(tmp_path, file, "Tied") == expected


@pytest.mark.parametrize("kind", list(Format))
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, kind: Format) -> None:
    run, _ = run_of(tmp_path, "Tied")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(RunError, match=r"cannot write .*words\.py/model: .*words\.py is a file, not a folder"):
        export_model(run, tmp_path / "words.py" / "model", "last", kind, force=False)
    with pytest.raises(JobError, match=r"cannot write .*out/xxx"):
        export_model(run, out / ("x" * 250), "last", kind, force=False)
    assert not list(out.iterdir())
