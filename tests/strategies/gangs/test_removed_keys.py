"""Keys of gangs that are no more: new jobs are told what to use, and runs that were recorded with them are shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from quorate.api.recorded_run import refuse_other_meaning
from quorate.core.errors import JobFileError, RunError
from quorate.spec.load import load_recorded, resolve_mapping
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder

PLAIN = {"task": "a.py:A", "batch_size": 8, "steps": 1, "workers": 2, "lanes": 2}
gone = pytest.mark.parametrize(
    ("strategy", "key", "instead"),
    [
        ({"kind": "ddp", "hierarchical": True}, "strategy.hierarchical", "nccl.algorithm"),
        ({"kind": "ddp", "compress": {"dtype": None, "rank": 2}}, "strategy.compress.rank", "{dtype: bf16}"),
        ({"kind": "fsdp", "plan": {"blocks.*.up": "column"}}, "strategy.plan", "parallelize(self, model, mesh)"),
    ],
)


def recorded(strategy: dict[str, Any], folder: Path) -> ResolvedJob:
    path = folder / "job.yaml"
    path.write_text(json.dumps(PLAIN | {"strategy": strategy}))
    return load_recorded(path, {}, [])


@gone
def test_a_new_job_is_told_what_to_use(strategy: dict[str, Any], key: str, instead: str) -> None:
    with pytest.raises(JobFileError) as raised:
        resolve_mapping(PLAIN | {"strategy": strategy}, "a call", {}, [])
    assert instead in {problem.path: problem.hint for problem in raised.value.problems}[key]


@gone
def test_an_old_run_is_shown_and_goes_on_as_a_branch(
    strategy: dict[str, Any], key: str, instead: str, tmp_path: Path
) -> None:
    job = recorded(strategy, tmp_path)
    assert job.spec.strategy.kind == strategy["kind"]
    with pytest.raises(RunError, match="--branch") as raised:
        refuse_other_meaning(RunFolder(tmp_path), job, job)
    assert f"{key}: " in str(raised.value)
    assert instead in str(raised.value)


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp", "hierarchical": False, "compress": {"dtype": "bf16", "rank": None, "start": 1000}},
        {"kind": "fsdp", "plan": "auto"},
    ],
)
def test_what_an_old_run_did_not_use_changes_nothing(strategy: dict[str, Any], tmp_path: Path) -> None:
    job = recorded(strategy, tmp_path)
    assert not job.removed
    refuse_other_meaning(RunFolder(tmp_path), job, job)
