"""What a model's tags tell, and which runs have a model to register. The registry itself: tests/services."""

import json
import re

import pytest

from command import Workplace
from quorate.api.model_artifact import JOB, WEIGHTS, Lineage, job_digest
from quorate.api.models import ModelRegistry, register_model, registry_uri
from quorate.core.errors import QuorateError, RequestError
from quorate.core.installation import install_of
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder

LINEAGE = Lineage(
    run="digits-0001",
    checkpoint="step-00000008-evaluated",
    step=8,
    weights_digest="ab",
    averaged=False,
    job_digest="cd",
    seed=7,
    total_steps=None,
    data="ef",
    code=None,
    git_commit=None,
    digests={WEIGHTS: "01", JOB: "02"},
)


def test_a_lineage_survives_its_tags() -> None:
    tags = LINEAGE.as_tags()
    assert all(isinstance(text, str) for text in tags.values())
    assert Lineage.of_tags({**tags, "somebody": "else's"}) == LINEAGE


@pytest.mark.parametrize(
    "changed",
    [
        {"quorate.digests": None},
        {"quorate.digests": "{"},
        {"quorate.digests": json.dumps({"../../etc/passwd": "01"})},
        {"quorate.step": '"eight"'},
        {"quorate.run": None},
    ],
    ids=str,
)
def test_tags_that_quorate_has_not_written_are_no_lineage(changed: dict[str, str | None]) -> None:
    tags = {name: text for name, text in {**LINEAGE.as_tags(), **changed}.items() if text is not None}
    assert Lineage.of_tags(tags) is None


def spec(**keys: object) -> JobSpec:
    return JobSpec.model_validate({"task": "/here/task.py:Tiny", "batch_size": 8, "steps": 8, **keys})


def test_the_digest_of_a_job_is_of_what_it_means() -> None:
    manner = {"workers": 3, "name": "other", "checkpoint": {"every": 3}, "task": "/there/moved.py:Tiny"}
    assert job_digest(spec()) == job_digest(spec(**manner))
    meaning: list[dict[str, object]] = [{"seed": 1}, {"steps": 9}, {"lanes": 2}, {"params": {"rate": 0.1}}]
    assert len({job_digest(spec(**keys)) for keys in [{}, *meaning]}) == len(meaning) + 1


def test_the_registry_is_where_one_asks_or_the_job_is_tracked_or_in_the_folder_of_runs(
    used_workplace: Workplace,
) -> None:
    runs, run = used_workplace.folder / "runs", RunFolder(used_workplace.last)
    assert registry_uri(runs, None, run) == f"sqlite:///{runs}/mlflow.db"
    run.job_file.write_text(run.job_file.read_text().replace("track: null", "track: {mlflow: http://a:2}"))
    assert registry_uri(runs, None, run) == "http://a:2"
    assert registry_uri(runs, "http://a:1", run) == "http://a:1"
    assert registry_uri(runs, "http://a:1") == "http://a:1"
    assert registry_uri(runs, None) == f"sqlite:///{runs}/mlflow.db"


def test_without_mlflow_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=re.escape(install_of("mlflow"))):
        ModelRegistry("http://127.0.0.1:1")


def refused(run: RunFolder, which: str = "last") -> str:
    """Why a run is not registered; it is known before MLflow is asked for anything."""
    with pytest.raises(QuorateError) as error:
        register_model(run, "http://127.0.0.1:1", None, which)
    return error.value.message


def test_a_run_that_is_not_complete_is_not_registered(used_workplace: Workplace) -> None:
    run = RunFolder(used_workplace.last)
    with run.lock():
        assert refused(run) == "run tiny-0001 is still running: a model is registered when its run is complete"
    run.write_result({**(run.read_result() or {}), "status": "failed"})
    assert refused(run).startswith("run tiny-0001 is not complete: it is failed. Resume it with `quorate resume tiny-")
    (run.path / "result.json").unlink()
    assert refused(run).startswith("run tiny-0001 is not complete: it was killed.")


@pytest.mark.parametrize("which", ["last", "8"])
def test_a_run_whose_checkpoint_is_damaged_is_not_registered(used_workplace: Workplace, which: str) -> None:
    run = RunFolder(used_workplace.last)
    for part in (run.checkpoints / used_workplace.checkpoints()[-1]).glob("*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    assert "step-00000008-evaluated" in refused(run, which) or "is damaged or gone" in refused(run, which)
