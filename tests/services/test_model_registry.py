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
from quorate.api.checkpoints import export_model
from quorate.api.model_artifact import JOB, WEIGHTS, Lineage, sha256_of
from quorate.api.models import ModelRegistry, ModelVersion, register_model, registry_uri
from quorate.core.errors import JobError, RequestError
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import kept_ids
from services.servers import MlflowServer
from services.tracked import train_tracked

pytestmark = pytest.mark.services

LOADED_ELSEWHERE = """
import sys
import mlflow, torch

mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(sys.argv[2])
assert not [name for name in sys.modules if name.partition(".")[0] in ("quorate", "task")]
print(model(torch.arange(15, dtype=torch.float32).reshape(5, 3) / 10).tolist())
"""


def answer(workplace: Workplace, *arguments: str) -> dict[str, Any]:
    """What a verb prints, held against its schema."""
    done = workplace.run("models", *arguments, "--json")
    assert done.code == 0, done.stderr
    schemas.validate(f"models-{arguments[0]}", done.document)
    return done.document


def lineage_of(version: ModelVersion) -> Lineage:
    assert version.lineage is not None
    return version.lineage


def test_the_verbs_take_a_run_to_a_pulled_model(used_workplace: Workplace, mlflow_server: MlflowServer) -> None:
    at = ("--mlflow", mlflow_server.uri)
    registered = answer(used_workplace, "register", "last", "--name", "verbs", *at)
    assert (registered["name"], registered["version"], registered["new"]) == ("verbs", 1, True)
    promoted = answer(used_workplace, "promote", "verbs", "1", "champion", *at)
    assert promoted == {"name": "verbs", "alias": "champion", "version": 1, "before": None}
    pulled = answer(used_workplace, "pull", "verbs@champion", *at)
    assert pulled["folder"] == str(used_workplace.folder / "verbs-1")
    assert pulled["files"] == [JOB, WEIGHTS]
    (listed,) = [each for each in answer(used_workplace, "ls", *at)["models"] if each["name"] == "verbs"]
    assert listed == {**{key: registered[key] for key in listed}, "aliases": ["champion"]}

    weights = used_workplace.folder / "verbs-1" / WEIGHTS
    exported = export_model(
        RunFolder(used_workplace.last), used_workplace.folder / "exported", "last", None, force=False
    )
    pulled_tensors, tensors = load_file(weights), load_file(exported.file)
    assert {name: tensor.tolist() for name, tensor in pulled_tensors.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    lineage = pulled["lineage"]
    assert lineage["weights_digest"] == used_workplace.result()["weights_digest"]
    assert lineage["digests"] == {name: sha256_of(weights.with_name(name)) for name in (WEIGHTS, JOB)}


def test_the_graph_needs_neither_the_task_nor_quorate(used_workplace: Workplace, mlflow_server: MlflowServer) -> None:
    register_model(RunFolder(used_workplace.last), mlflow_server.uri, "graph", "last")
    elsewhere = subprocess.run(
        [sys.executable, "-c", LOADED_ELSEWHERE, mlflow_server.uri, "models:/graph/1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=mlflow_server.folder,
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    model = quorate.open_run(used_workplace.last).load_model()
    with torch.no_grad():
        here = model.eval()(torch.arange(15, dtype=torch.float32).reshape(5, 3) / 10)
    assert torch.tensor(json.loads(elsewhere.stdout.splitlines()[-1])).equal(here), "for another number of samples"


def test_a_changed_file_is_refused_by_name_and_nothing_is_pulled(
    used_workplace: Workplace, mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    register_model(RunFolder(used_workplace.last), mlflow_server.uri, "tampered", "last")
    registry = ModelRegistry(mlflow_server.uri)
    place = registry._client.get_model_version_download_uri("tampered", "1").removeprefix("mlflow-artifacts:/")
    described = mlflow_server.artifacts / place / "MLmodel"
    for name in (WEIGHTS, JOB):
        kept = described.with_name(name)
        whole = kept.read_bytes()
        kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(
            JobError, match=f"^{name} of tampered/1 was changed since it was registered: its sha-256 is"
        ):
            registry.pull("tampered/1", tmp_path / "here")
        assert not (tmp_path / "here").exists()
        kept.write_bytes(whole)
    registry.pull("tampered/1", tmp_path / "here")

    from mlflow.models import Model

    signature = Model.load(str(described)).signature
    shapes = [[column["tensor-spec"] for column in side.to_dict()] for side in (signature.inputs, signature.outputs)]
    assert shapes == [[{"dtype": "float32", "shape": (-1, 3)}], [{"dtype": "float32", "shape": (-1, 1)}]]
    example = json.loads(described.with_name("input_example.json").read_text())
    assert example == [[0.0, 0.0, 0.0]] * 2, "none of the data"


@pytest.fixture(scope="module")
def two_runs(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """The usual one, and one with another seed, on one worker."""
    folder = tmp_path_factory.mktemp("two-runs") / "workplace"
    folder.mkdir()
    place = Workplace(folder)
    assert place.train("--seed", "5", "--workers", "1").code == 0
    return RunFolder(finished / "runs" / "tiny-0001"), RunFolder(place.last)


@pytest.fixture(scope="module")
def registry(two_runs: tuple[RunFolder, RunFolder], tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    """A file of SQLite, without a server: what there is by default; with two versions."""
    runs = tmp_path_factory.mktemp("registry")
    with pytest.raises(RequestError, match="nothing has been registered there yet"):
        ModelRegistry(registry_uri(runs, None))
    for number, run in enumerate(two_runs, 1):
        version, is_new = register_model(run, registry_uri(runs, None, run), None, "last")
        assert (str(version), is_new) == (f"tiny/{number}", True)
    return ModelRegistry(registry_uri(runs, None))


def test_two_versions_have_the_lineage_of_their_runs(
    registry: ModelRegistry, two_runs: tuple[RunFolder, RunFolder]
) -> None:
    newer, older = registry.versions()
    assert (str(older), str(newer)) == ("tiny/1", "tiny/2")
    one, two = lineage_of(older), lineage_of(newer)
    assert [(each.run, each.seed, each.step, each.total_steps) for each in (one, two)] == [
        ("tiny-0001", 0, 8, 8),
        ("tiny-0001", 5, 8, 8),
    ]
    manifest = json.loads((two_runs[0].checkpoints / one.checkpoint / "manifest.json").read_text())
    assert (one.data, one.code) == (manifest["environment"]["dataset"], manifest["environment"]["task source"])
    assert (one.data, one.code) == (two.data, two.code)
    assert one.job_digest != two.job_digest
    assert one.weights_digest != two.weights_digest


def test_the_same_checkpoint_is_registered_once_and_another_is_another_version(
    registry: ModelRegistry, two_runs: tuple[RunFolder, RunFolder]
) -> None:
    again, is_new = register_model(two_runs[1], registry.uri, None, "last")
    assert (str(again), is_new) == ("tiny/2", False)
    earlier, is_new = register_model(two_runs[1], registry.uri, "earlier", "6")
    assert (str(earlier), is_new, lineage_of(earlier).step) == ("earlier/1", True, 6)


def test_a_tracked_run_has_its_model_logged_at_its_end_and_registers_that(workplace: Workplace) -> None:
    for command in (("init", "-q"), ("add", "task.py"), ("commit", "-qm", "a task")):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *command], cwd=workplace.folder, check=True
        )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=workplace.folder, check=True, capture_output=True, text=True
    ).stdout.strip()
    workplace.write_job(track={"mlflow": True, "system": 0.2})
    done = train_tracked(workplace, "--workers", "1", SLOW="0.02")
    run = RunFolder(workplace.last)
    kept = workplace.folder / "runs" / "mlflow-artifacts"
    (logged,) = kept.rglob("model.pt2")
    version, is_new = register_model(run, registry_uri(run.path.parent, None, run), None, "last")
    assert (str(version), is_new) == ("tiny/1", True)
    assert lineage_of(version).git_commit == commit
    assert list(kept.rglob("model.pt2")) == [logged], "the one that was logged is registered"
    samples = [event for event in workplace.events() if event["kind"] == "system"]
    assert samples and all(each["machine"]["disk_free_bytes"] > 0 for each in samples)
    assert "system" not in done.stderr


def test_an_alias_moves_and_what_was_pulled_is_left_as_it_is(registry: ModelRegistry, tmp_path: Path) -> None:
    assert registry.promote("tiny", 1, "champion") is None
    assert registry.promote("tiny", 2, "champion") == 1
    version, folder = registry.pull("tiny@champion", tmp_path / "here")
    assert (version.version, version.aliases) == (2, ("champion",))
    assert set(load_file(folder / WEIGHTS)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    registry.pull("tiny/2", folder)
    with pytest.raises(RequestError, match="already exists with other content"):
        registry.pull("tiny/1", folder)
    assert sha256_of(folder / WEIGHTS) == lineage_of(version).digests[WEIGHTS]


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("tiny", "'tiny' names no model: write NAME@ALIAS or NAME/VERSION"),
        ("tiny@nobody", "there is no model tiny@nobody"),
        ("tiny/7", "Versions of tiny: 2"),
        ("other/1", "Models that there are: "),
    ],
)
def test_a_wrong_word_is_answered_with_what_there_is(registry: ModelRegistry, reference: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        registry.pull(reference, None)


def test_an_alias_that_mlflow_does_not_take_is_refused(registry: ModelRegistry) -> None:
    with pytest.raises(RequestError, match=r"refuses: .*v7"):
        registry.promote("tiny", 1, "v7")


def test_a_version_that_somebody_else_has_registered_is_listed_and_not_pulled(registry: ModelRegistry) -> None:
    registry._client.create_registered_model("foreign")
    registry._client.create_model_version("foreign", "file:///somewhere", run_id=None)
    assert [(str(each), each.lineage) for each in registry.versions() if each.name == "foreign"] == [
        ("foreign/1", None)
    ]
    with pytest.raises(RequestError, match="was not registered by Quorate"):
        registry.pull("foreign/1", None)


def test_a_server_that_is_away_is_named(own_mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(JobError, match=f"the registry at {own_mlflow_server.uri} cannot be used"):
        ModelRegistry(own_mlflow_server.uri).versions()


def test_a_model_that_cannot_be_exported_has_its_weights_and_its_source(
    workplace: Workplace, registry: ModelRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    fickle = """

class Fickle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, inputs):
        return self.inner(inputs if float(inputs.sum()) > 0 else -inputs)
"""
    usual = "return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))"
    workplace.task.write_text(workplace.task.read_text().replace(usual, "return Fickle()") + fickle)
    assert workplace.train("--workers", "1").code == 0
    run = RunFolder(workplace.last)
    version, _ = register_model(run, registry.uri, "fickle", "last")
    assert "without a graph: torch.export cannot trace it" in caplog.text
    _, folder = registry.pull(str(version), workplace.folder / "here")
    assert set(load_file(folder / WEIGHTS)) == {"inner.weight", "inner.bias"}
    kept = Path(registry.uri.removeprefix("sqlite:///")).parent
    assert workplace.task.read_bytes() in [file.read_bytes() for file in kept.rglob("source/task.py")]


def test_clean_spares_a_registered_run_and_takes_the_tracked_copies_with_a_run(workplace: Workplace) -> None:
    for _ in range(2):
        assert workplace.train("--set", "track.mlflow=true", "--steps", "2").code == 0
    second = RunFolder(workplace.last)
    uri = registry_uri(second.path.parent, None)
    version, _ = register_model(second, uri, "kept", "last")
    told = workplace.run("clean", "--keep", "0", "--yes", "--json").document
    assert [each["run"] for each in told["kept"]] == ["tiny-0002", "tiny-0001"]
    assert told["kept"][0]["why"] == "its model is registered as kept/1"
    assert second.path.is_dir()

    registry = ModelRegistry(uri)
    registry._client.delete_model_version(version.name, str(version.version))
    (run_id,) = kept_ids(second).values()
    folders = registry.folders(run_id)
    assert len(folders) == 2, "its artifacts and its model"
    assert all(folder.is_dir() for folder in folders)
    told = workplace.run("clean", "--keep", "0", "--yes", "--json").document
    assert [each["run"] for each in told["runs"]] == ["tiny-0002"]
    assert not any(path.exists() for path in (second.path, *folders))
    assert registry._client.get_run(run_id).info.lifecycle_stage == "deleted"
