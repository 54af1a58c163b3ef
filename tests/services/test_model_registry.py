"""A run's model in a real MLflow: registered, promoted, pulled, and the same bytes at the end of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quorate
import schemas
from command import Workplace
from quorate.api.model_artifact import JOB, WEIGHTS, sha256_of
from services.servers import MlflowServer

pytestmark = pytest.mark.services

LOADED_ELSEWHERE = """
import sys
import mlflow, torch

mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(sys.argv[2])
assert not [name for name in sys.modules if name.partition(".")[0] in ("quorate", "task")]
print(model(torch.arange(15, dtype=torch.float32).reshape(5, 3) / 10).tolist())
"""


def answer(workplace: Workplace, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a verb prints, held against its schema."""
    done = workplace.run(*arguments, "--json", **environment)
    assert done.code == 0, done.stderr
    if arguments[0] == "models":
        schemas.validate(f"models-{arguments[1]}", done.document)
    return done.document


def trained(workplace: Workplace, **keys: Any) -> dict[str, Any]:
    workplace.write_job(**keys)
    return answer(workplace, "train", "job.yaml")


def logged_file(server: MlflowServer, name: str) -> Path:
    """The newest file of this name that the server keeps."""
    return max(server.artifacts.rglob(name), key=lambda file: file.stat().st_mtime_ns)


def test_from_a_run_to_a_pulled_model_over_a_server(workplace: Workplace, mlflow_server: MlflowServer) -> None:
    at = ("--mlflow", mlflow_server.uri)
    result = trained(workplace, name="through")
    registered = answer(workplace, "models", "register", "last", *at)
    assert (registered["name"], registered["version"], registered["new"]) == ("through", 1, True)
    assert answer(workplace, "models", "register", "last", *at) == {**registered, "new": False}, "once"
    promoted = answer(workplace, "models", "promote", "through", "1", "champion", *at)
    assert promoted == {"name": "through", "alias": "champion", "version": 1, "before": None}
    pulled = answer(workplace, "models", "pull", "through@champion", *at)
    assert pulled["folder"] == str(workplace.folder / "through-1")
    assert pulled["files"] == [JOB, WEIGHTS]

    exported = answer(workplace, "checkpoints", "export", "last", "exported.safetensors")
    weights = workplace.folder / "through-1" / WEIGHTS
    assert weights.read_bytes() == (workplace.folder / "exported.safetensors").read_bytes()
    lineage = pulled["lineage"]
    assert lineage["weights_digest"] == result["weights_digest"] == exported["weights_digest"]
    assert lineage["digests"][WEIGHTS] == sha256_of(weights)
    assert lineage["digests"][JOB] == sha256_of(workplace.folder / "through-1" / JOB)


def test_the_graph_needs_neither_the_task_nor_quorate(workplace: Workplace, mlflow_server: MlflowServer) -> None:
    trained(workplace, name="graph")
    answer(workplace, "models", "register", "last", "--mlflow", mlflow_server.uri)
    elsewhere = subprocess.run(
        [sys.executable, "-c", LOADED_ELSEWHERE, mlflow_server.uri, "models:/graph/1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=mlflow_server.folder,
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    model = quorate.open_run(workplace.last).load_model()
    with torch.no_grad():
        here = model.eval()(torch.arange(15, dtype=torch.float32).reshape(5, 3) / 10)
    assert torch.tensor(json.loads(elsewhere.stdout.splitlines()[-1])).equal(here), "for another number of samples"


def test_the_signature_is_that_of_the_model_on_the_validation_set(
    workplace: Workplace, mlflow_server: MlflowServer
) -> None:
    trained(workplace, name="signed")
    answer(workplace, "models", "register", "last", "--mlflow", mlflow_server.uri)
    from mlflow.models import Model

    signature = Model.load(str(logged_file(mlflow_server, "MLmodel"))).signature
    assert signature.inputs.to_dict() == [
        {"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": (-1, 3)}},
    ]
    assert signature.outputs.to_dict() == [
        {"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": (-1, 1)}},
    ]


@pytest.mark.parametrize("name", [WEIGHTS, JOB])
def test_a_changed_file_is_refused_by_name_and_nothing_is_pulled(
    workplace: Workplace, own_mlflow_server: MlflowServer, name: str
) -> None:
    own_mlflow_server.start()
    at = ("--mlflow", own_mlflow_server.uri)
    trained(workplace)
    answer(workplace, "models", "register", "last", *at)
    (kept,) = own_mlflow_server.artifacts.rglob(name)
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    refused = workplace.run("models", "pull", "tiny/1", "here", *at)
    assert refused.code == 1
    assert refused.error.startswith(f"{name} of tiny/1 was changed since it was registered: its sha-256 is ")
    assert not (workplace.folder / "here").exists()
    content[-1] ^= 1
    kept.write_bytes(content)
    answer(workplace, "models", "pull", "tiny/1", "here", *at)


def test_two_versions_their_lineage_and_an_alias_that_moves(workplace: Workplace) -> None:
    """In the file of SQLite, without a server: what there is by default."""
    nobody = workplace.run("models", "ls")
    assert nobody.code == 2
    assert "nothing has been registered there yet" in nobody.error
    first = trained(workplace)
    second = trained(workplace, seed=5, workers=1)
    third = trained(workplace, seed=5, workers=2, checkpoint={"every": 3})
    for run in (first, second, third):
        answer(workplace, "models", "register", run["run"])
    answer(workplace, "models", "promote", "tiny", "1", "champion")
    moved = answer(workplace, "models", "promote", "tiny", "2", "champion")
    assert moved["before"] == 1
    answer(workplace, "models", "promote", "tiny", "2", "staging")

    listed = answer(workplace, "models", "ls")
    assert listed["registry"] == f"sqlite:///{workplace.folder}/runs/mlflow.db"
    newest, middle, oldest = listed["models"]
    assert [each["version"] for each in (oldest, middle, newest)] == [1, 2, 3]
    assert [each["aliases"] for each in (oldest, middle, newest)] == [[], ["champion", "staging"], []]
    one, two, three = (each["lineage"] for each in (oldest, middle, newest))
    assert [each["run"] for each in (one, two, three)] == ["tiny-0001", "tiny-0002", "tiny-0003"]
    assert [(each["seed"], each["step"], each["total_steps"]) for each in (one, two)] == [(0, 8, 8), (5, 8, 8)]
    environment = json.loads((workplace.folder / "runs/tiny-0001/environment.json").read_text())
    assert (one["data"], one["code"]) == (environment["dataset"], environment["task source"])
    assert (one["data"], one["code"]) == (two["data"], two["code"])
    assert one["job_digest"] != two["job_digest"] == three["job_digest"], "by what it means, not how it ran"
    assert one["weights_digest"] != two["weights_digest"] == three["weights_digest"]

    table = workplace.run("models", "ls").stdout
    assert "tiny/2" in table and "champion, staging" in table and two["code"][:8] in table

    answer(workplace, "models", "pull", "tiny@champion", "here")
    again = answer(workplace, "models", "pull", "tiny@staging", "here")
    assert again["version"] == 2, "what is there already is left as it is"
    other = workplace.run("models", "pull", "tiny/1", "here")
    assert other.code == 2
    assert "is there already, and another" in other.error
    assert load_file(workplace.folder / "here" / WEIGHTS)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("pull", "tiny"), "'tiny' names no model: write NAME@ALIAS or NAME/VERSION"),
        (("pull", "tiny@nobody"), "there is no model tiny@nobody"),
        (("pull", "tiny/7"), "Versions of tiny: 1"),
        (("pull", "other/1"), "Models that there are: tiny"),
        (("promote", "tiny", "7", "champion"), "there is no model tiny/7"),
        (("promote", "tiny", "1", "v7"), "v7"),
    ],
)
def test_a_wrong_word_is_answered_with_what_there_is(registered: Workplace, asked: tuple[str, ...], said: str) -> None:
    refused = registered.run("models", *asked)
    assert refused.code == 2, refused.stderr
    assert said in refused.error


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("registered") / "workplace"
    folder.mkdir()
    place = Workplace(folder)
    trained(place)
    answer(place, "models", "register", "last")
    return place


def test_a_server_that_is_away_is_an_error_that_names_it(
    registered: Workplace, own_mlflow_server: MlflowServer
) -> None:
    away = registered.run("models", "ls", "--mlflow", own_mlflow_server.uri, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert away.code == 1
    assert own_mlflow_server.uri in away.error


def test_a_run_that_failed_is_not_registered(workplace: Workplace) -> None:
    assert workplace.train(TROUBLE="loss").code == 1
    refused = workplace.run("models", "register", "last")
    assert refused.code == 2
    assert refused.error.startswith(
        "run tiny-0001 is not complete: it is failed. Go on with `quorate resume tiny-0001`"
    )


def test_a_run_that_is_running_is_not_registered(workplace: Workplace) -> None:
    training = workplace.start("train", "job.yaml", HOLD="9")
    training.await_event("step", 1)
    refused = workplace.start("models", "register", "last").done()
    workplace.go()
    assert training.done().code == 0
    assert refused.code == 2
    assert refused.error.startswith("run tiny-0001 is still running")


@pytest.mark.parametrize("which", ["last", "8"])
def test_a_damaged_checkpoint_is_not_registered(workplace: Workplace, which: str) -> None:
    trained(workplace)
    (part, *_) = (workplace.last / "checkpoints" / workplace.checkpoints()[-1]).glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    refused = workplace.run("models", "register", "last", "--checkpoint", which)
    assert refused.code != 0
    assert workplace.checkpoints()[-1] in refused.error or "is damaged or gone" in refused.error
    assert not (workplace.folder / "runs" / "mlflow.db").exists(), "nothing was made for what is refused"


def test_a_model_that_cannot_be_exported_is_registered_with_its_weights_and_its_source(workplace: Workplace) -> None:
    workplace.task.write_text(
        workplace.task.read_text().replace(
            "return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))", "return Fickle()"
        )
        + "\n\nclass Fickle(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(3, 1)\n\n"
        "    def forward(self, inputs):\n"
        "        return self.inner(inputs if float(inputs.sum()) > 0 else -inputs)\n"
    )
    trained(workplace)
    done = workplace.run("models", "register", "last")
    assert done.code == 0, done.stderr
    assert "without a graph: torch.export cannot trace it" in done.stderr
    answer(workplace, "models", "pull", "tiny/1", "here")
    assert set(load_file(workplace.folder / "here" / WEIGHTS)) == {"inner.weight", "inner.bias"}
    kept = workplace.folder / "runs" / "mlflow-artifacts"
    assert [file.read_text() for file in kept.rglob("source/task.py")] == [workplace.task.read_text()]
    assert not list(kept.rglob("*.pt2"))
