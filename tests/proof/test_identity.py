"""The identity of a run changes exactly when its results can: a table of edits of a job, its code and its data."""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once: otherwise each child imports it for its first optimizer step

from quorate.core.processes import ask_child
from quorate.history.identity import Identity
from quorate.spec.load import resolve_mapping
from quorate.spec.meaning import plain_params
from quorate.task.source import load_task_type
from quorate.worker.identify import identity_in_child

TASK = '''
"""A task of two files and some data beside them."""
import pathlib
import torch
from torch.utils.data import TensorDataset
import nets
import quorate


class Small(quorate.Task):
    rate: float = 0.1  # of the optimizer

    def model(self):
        model = nets.net()
        if (start := pathlib.Path(__file__).with_name("start.pt")).exists():
            model.load_state_dict(torch.load(start))
        return model

    def datasets(self):
        sets = torch.load(pathlib.Path(__file__).with_name("data.pt"))
        return tuple(TensorDataset(*sets[name]) for name in ("training", "validation"))

    def loss(self, model, batch):
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.rate)


class Other(Small):
    pass
'''
NETS = """
from torch import nn


def net():
    return nn.Linear(3, 1)
"""
JOB = {"task": "task.py:Small", "lanes": 2, "batch_size": 4, "steps": 6, "device": "auto"}


def data() -> dict[str, list[torch.Tensor]]:
    numbers = torch.arange(36.0).reshape(12, 3)
    return {"training": [numbers, numbers.sum(1)], "validation": [numbers[:4] + 1, numbers[:4].sum(1)]}


@dataclass
class Project:
    """A folder with a task, its data and its job."""

    folder: Path
    files: dict[str, str] = field(default_factory=lambda: {"task.py": TASK, "nets.py": NETS})
    data: dict[str, list[torch.Tensor]] = field(default_factory=data)
    keys: dict[str, Any] = field(default_factory=lambda: dict(JOB))

    def identity(self) -> Identity:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (self.folder / name).write_text(text)
        torch.save(self.data, self.folder / "data.pt")
        spec = resolve_mapping({**self.keys, "task": f"{self.folder}/{self.keys['task']}"}, "job", {}, []).spec

        def find() -> str:
            sys.path.insert(0, str(self.folder))
            return json.dumps(identity_in_child(load_task_type(spec.task, spec.seed), spec.model_dump(), "job"))

        found = Identity.of_record(json.loads(ask_child(find).text))
        assert found is not None
        return found


def keys(**changed: Any) -> Any:
    return lambda project: project.keys.update(changed)


def text(file: str, before: str, after: str) -> Any:
    def edit(project: Project) -> None:
        assert before in project.files[file]
        project.files[file] = project.files[file].replace(before, after)

    return edit


def renamed(project: Project) -> None:
    project.files["another.py"] = project.files.pop("task.py")
    project.keys["task"] = "another.py:Small"


def moved(project: Project) -> None:
    project.folder = project.folder / "deeper" / "elsewhere"


def weights_given(project: Project) -> None:
    project.folder.mkdir(parents=True)
    torch.save({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, project.folder / "start.pt")


def values(source: str, column: int, edit: Any) -> Any:
    def change(project: Project) -> None:
        project.data[source][column] = edit(project.data[source][column].clone())

    return change


def with_value(index: int, value: float) -> Any:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return edit


SAME = {
    "the name of the job": keys(name="another"),
    "the number of workers": keys(workers=1, min_workers=1),
    "spares": keys(spares=1),
    "timeouts": keys(failure_timeout=9.0, step_timeout=60.0, setup_timeout=60.0),
    "when to save": keys(checkpoint={"every": 1, "keep": 9, "digest": "sha-256"}),
    "where runs are": keys(runs="/tmp/others"),
    "tracking": keys(track={"prometheus": 9100}),
    "who is told": keys(notify={"command": "true"}),
    "what is logged": keys(log_level="debug", record="lanes"),
    "loaders": keys(loader_workers=2, loader_prefetch=3),
    "links": keys(links="tcp", overlap=False, encrypt=False, port=0),
    "audits": keys(audit={"every": 3}, check_gradients={"every": 2}),
    "whether results are reused": keys(reuse=True),
    "the default of a parameter, written out": keys(params={"rate": 0.1}),
    "the default of a key, written out": keys(seed=0, accumulate=1),
    "what auto comes to": keys(device="cpu", precision="fp32"),
    "another way to the same sums": keys(strategy="parameter-server"),
    "a comment": text("task.py", "# of the optimizer", "# how fast"),
    "a docstring": text("task.py", "A task of two files and some data beside them.", "Else."),
    "formatting": text("task.py", "nets.net()", "(nets\n            .net( ))"),
    "blank lines and a comment elsewhere": text("nets.py", "\n\n\n", "\n\n# a net\n\n\n\n"),
    "the name of the task's file": renamed,
    "the place of the project": moved,
}
OTHER = {
    "seed": keys(seed=1),
    "lanes": keys(lanes=4),
    "batch size": keys(batch_size=6),
    "steps": keys(steps=7),
    "epochs": keys(steps=None, epochs=2),
    "a parameter": keys(params={"rate": 0.2}),
    "clipping": keys(clip_norm=1.0),
    "schedule": keys(schedule={"kind": "cosine"}),
    "average": keys(average={"decay": 0.9}),
    "accumulate": keys(accumulate=2),
    "last batch": keys(last_batch="keep"),
    "evaluations": keys(evaluate={"every": 2}),
    "patience": keys(early_stop={"metric": "loss", "patience": 2}),
    "threads": keys(threads=2),
    "buckets": keys(bucket_mb=1.0),
    "kernels": keys(deterministic=False),
    "precision": keys(precision="bf16"),
    "compression": keys(strategy={"kind": "ring", "compress": {"bits": 8}}),
    "another task in the file": keys(task="task.py:Other"),
    "the loss": text("task.py", "** 2", "** 4"),
    "a default in the code": text("task.py", "rate: float = 0.1", "rate: float = 0.3"),
    "the model, in another file": text("nets.py", "nn.Linear(3, 1)", "nn.Linear(3, 1, bias=False)"),
    "initial weights in a file": weights_given,
    "one sample in the middle": values("training", 0, with_value(17, 99.0)),
    "its sign bit alone": values("training", 0, with_value(0, -0.0)),
    "one target in the middle": values("training", 1, with_value(5, 99.0)),
    "one sample of the validation set": values("validation", 0, with_value(4, 99.0)),
    "the order of two samples": values("training", 0, lambda tensor: tensor[[0, 2, 1, *range(3, 12)]]),
    "their type": values("training", 1, lambda tensor: tensor.double()),
    "their shape": values("validation", 1, lambda tensor: tensor.reshape(4, 1)),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Project(tmp_path_factory.mktemp("usual") / "project").identity()


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_what_cannot_change_results_does_not_change_it(usual: Identity, tmp_path: Path, edit: Any) -> None:
    project = Project(tmp_path / "project")
    edit(project)
    assert project.identity().facts == usual.facts


@pytest.mark.parametrize("edit", OTHER.values(), ids=OTHER)
def test_what_can_change_results_changes_it(usual: Identity, tmp_path: Path, edit: Any) -> None:
    project = Project(tmp_path / "project")
    edit(project)
    assert project.identity().digest != usual.digest


def test_a_person_can_read_what_it_is_made_of(usual: Identity) -> None:
    assert list(usual.facts) == ["job", "task", "versions", "machine", "data"]
    assert usual.facts["task"]["params"] == {"rate": 0.1} and usual.facts["machine"]["device"] == "cpu"
    assert usual.is_proven and usual.data.startswith("proven: sha-256 of all ")


@pytest.mark.parametrize(("edit", "is_prefix"), [("steps", True), ("seed", False), ("one sample in the middle", False)])
def test_only_the_length_is_left_out_of_a_prefix(usual: Identity, tmp_path: Path, edit: str, is_prefix: bool) -> None:
    project = Project(tmp_path / "project")
    OTHER[edit](project)
    assert (project.identity().prefix == usual.prefix) is is_prefix


LONG = """    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.total_steps)"""


@pytest.mark.parametrize(
    "edit",
    [
        keys(schedule={"kind": "linear"}),
        text("task.py", "    def loss", f"{LONG}\n\n    def loss"),
    ],
    ids=["a key", "the task"],
)
def test_a_job_whose_rates_depend_on_its_length_is_no_prefix(usual: Identity, tmp_path: Path, edit: Any) -> None:
    project = Project(tmp_path / "project")
    edit(project)
    assert usual.any_length and not project.identity().any_length


def test_a_secret_parameter_counts_and_is_not_told(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    text("task.py", "rate: float = 0.1", 'password: str = ""\n    rate: float = 0.1')(project)
    told = []
    for secret in ("correct-horse", "battery-staple"):
        project.keys["params"] = {"password": secret}
        told.append(project.identity())
        assert secret not in json.dumps(told[-1].facts)
    assert told[0].digest != told[1].digest


# --- what is read from elsewhere, and kept

READ = """
import json

def read(name):
    return json.loads(pathlib.Path(__file__).with_name("settings.json").read_text())[name]

"""


def settings(value: float) -> Any:
    def edit(project: Project) -> None:
        project.files["settings.json"] = json.dumps({"value": value})

    return edit


def edited(tmp_path: Path, name: str, *edits: Any) -> Identity:
    project = Project(tmp_path / name)
    for edit in edits:
        edit(project)
    return project.identity()


READ_BY = {
    "optimizer": ("lr=self.rate", "lr=read('value')"),
    "model": ("model = nets.net()", "model = torch.nn.Sequential(nets.net(), torch.nn.Dropout(read('value')))"),
    "a schedule": (
        "    def loss",
        "    def schedule(self, optimizer):\n        v = read('value')\n"
        "        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: v ** step)\n\n    def loss",
    ),
    "datasets": ("        sets =", "        self.scale = [read('value')]\n        sets ="),
    "a teacher": ("        sets =", "        self.teacher = torch.nn.Dropout(read('value'))\n        sets ="),
    "the module": ("class Small", "CFG = {'scale': read('value')}\n\n\nclass Small"),
    "the class": ("    rate: float", "    scale = read('value')\n    rate: float"),
}


@pytest.mark.parametrize("edit", READ_BY.values(), ids=READ_BY)
def test_what_is_read_from_a_file_and_kept_counts(tmp_path: Path, edit: tuple[str, str]) -> None:
    edits = text("task.py", "import quorate\n", f"import quorate\n{READ}"), text("task.py", *edit)
    first, other = (edited(tmp_path, name, *edits, settings(value)) for name, value in (("a", 0.5), ("b", 0.25)))
    assert first.is_proven, first.data
    assert other.digest != first.digest


def test_all_that_is_kept_is_the_same_at_another_place(tmp_path: Path) -> None:
    edits = [text("task.py", "import quorate\n", f"import quorate\n{READ}"), settings(0.5)]
    edits += [
        text("task.py", *READ_BY[name]) for name in ("optimizer", "model", "a schedule", "a teacher", "the module")
    ]
    assert edited(tmp_path, "a", *edits).facts == edited(tmp_path, "b", *edits).facts


@pytest.mark.parametrize("kept", ["threading.Lock()", "open(__file__)", "iter([1])"])
def test_what_cannot_be_read_of_a_task_is_not_proven(tmp_path: Path, kept: str) -> None:
    line = f"        import threading\n        self.kept = {kept}\n"
    found = edited(tmp_path, "a", text("task.py", "        sets =", f"{line}        sets ="))
    assert found.data.startswith("unproven: the task keeps ")


TYPES = """
import dataclasses, enum, typing
from pydantic import BaseModel, Field, SecretStr

class Hidden(BaseModel):
    value: float = Field(1.0, repr=False)

@dataclasses.dataclass
class Record:
    value: float = dataclasses.field(default=1.0, repr=False)

"""
COLLIDING: dict[str, tuple[str, Any, Any]] = {
    "a model": ("Hidden = Hidden()", {"value": 1.0}, {"value": 2.0}),
    "a record": ("Record = Record()", {"value": 1.0}, {"value": 2.0}),
    "a secret": ("SecretStr = SecretStr('')", "correct-horse", "battery-staple"),
    "a path": ("pathlib.Path = pathlib.Path('x')", "a", "b"),
}


@pytest.mark.parametrize(("declared", "one", "other"), COLLIDING.values(), ids=COLLIDING)
def test_all_of_a_parameter_counts(tmp_path: Path, declared: str, one: Any, other: Any) -> None:
    edits = (
        text("task.py", "import quorate\n", f"import quorate\n{TYPES}"),
        text("task.py", "    rate: float", f"    given: {declared}\n    rate: float"),
    )
    first, another = (
        edited(tmp_path, name, *edits, keys(params={"given": value})) for name, value in (("a", one), ("b", other))
    )
    assert first.digest != another.digest and first.is_proven
    assert "correct-horse" not in json.dumps(first.facts)


def test_what_is_no_number_equals_itself() -> None:
    assert plain_params({"a": math.nan}) == plain_params({"a": math.nan}) != plain_params({"a": math.inf})


def test_a_parameter_without_a_text_that_says_all_is_not_proven(tmp_path: Path) -> None:
    found = edited(
        tmp_path,
        "a",
        text("task.py", "class Small", "class Odd:\n    pass\n\n\nclass Small"),
        text("task.py", "    rate: float", "    odd: Odd = Odd()\n    rate: float"),
    )
    assert found.data == "unproven: the text of params.odd does not say all of it"


def test_all_files_of_a_task_in_an_installed_package_count(tmp_path: Path) -> None:
    digests = []
    for number, bias in enumerate((True, True, False)):
        files = {f"site-packages/pack/{name}": content for name, content in Project(tmp_path).files.items()}
        files["site-packages/pack/__init__.py"] = ""
        folder = tmp_path / str(number)
        (folder / "site-packages" / "pack").mkdir(parents=True)
        project = Project(folder, files, keys={**JOB, "task": "site-packages/pack/task.py:Small"})
        text("site-packages/pack/task.py", "import nets", "from pack import nets")(project)
        text("site-packages/pack/nets.py", "(3, 1)", f"(3, 1)  # {bias}")(project)
        torch.save(project.data, folder / "site-packages" / "pack" / "data.pt")

        for name, content in project.files.items():
            (folder / name).write_text(content)

        def find(folder: Path = folder) -> str:
            sys.path.insert(0, str(folder / "site-packages"))
            spec = resolve_mapping({**JOB, "task": "pack.task:Small"}, "job", {}, []).spec
            return json.dumps(identity_in_child(load_task_type(spec.task, spec.seed), spec.model_dump(), "job"))

        found = Identity.of_record(json.loads(ask_child(find).text))
        assert found is not None
        digests.append(found.digest)
    assert digests[0] == digests[1] != digests[2]
