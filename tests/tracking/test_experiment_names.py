from typing import Any

import pytest

from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.tracking.mlflow_client import experiment_of


def test_the_experiment_is_the_jobs_own_the_variables_or_of_the_jobs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    job: dict[str, Any] = {"task": "task.py:T", "name": "tiny", "batch_size": 8, "steps": 3}
    assert experiment_of(JobSpec(**job)) == "tiny"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "shared")
    assert experiment_of(JobSpec(**job)) == experiment_of(JobSpec(**job, track=TrackSpec(mlflow=True))) == "shared"
    assert experiment_of(JobSpec(**job, track=TrackSpec(mlflow=True, experiment="own"))) == "own"
