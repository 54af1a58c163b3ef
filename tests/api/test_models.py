"""What a model's tags tell, and which runs have a model to register. The registry itself: tests/services."""

import json

import pytest

from command import Workplace
from quorate.api.model_artifact import JOB, WEIGHTS, Lineage, job_digest
from quorate.api.models import ModelRegistry, registry_uri
from quorate.core.errors import RequestError
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


def test_the_registry_is_where_one_asks_or_the_job_is_tracked_or_in_the_folder_of_runs(workplace: Workplace) -> None:
    runs = workplace.folder / "runs"
    assert registry_uri(runs, "http://a:1") == "http://a:1"
    assert registry_uri(runs, None) == f"sqlite:///{runs}/mlflow.db"
    assert workplace.train("--set", "track.trace.every=5").code == 0
    assert registry_uri(runs, None, RunFolder(workplace.last)) == f"sqlite:///{runs}/mlflow.db"


def test_without_mlflow_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'quorate\[mlflow\]'"):
        ModelRegistry("http://127.0.0.1:1")
