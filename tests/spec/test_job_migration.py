"""Jobs of version 1 in all that reads a job. Runs of version 1 are in `tests/cli/test_version_1.py`."""

from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.core.errors import JobFileError
from quorate.spec.load import load_job, resolve_mapping
from quorate.spec.override import Override, migrate, parse_set

JOB: dict[str, Any] = {"task": "task.py:Task", "batch_size": 8, "steps": 2}


@pytest.mark.parametrize(
    ("job", "migrated"),
    [
        ({"version": 1, "on_poison": "skip"}, {"version": 2, "on_nonfinite_loss": "skip"}),
        ({"on_poison": "skip", "seed": 1}, {"on_nonfinite_loss": "skip", "seed": 1}),
        ({"seed": 1}, {"seed": 1}),
        ({"version": 2, "on_poison": "skip"}, {"version": 2, "on_poison": "skip"}),
        ({"version": 3, "on_poison": "skip"}, {"version": 3, "on_poison": "skip"}),
        ({"version": True, "on_poison": "skip"}, {"version": True, "on_poison": "skip"}),
        ({"version": [1]}, {"version": [1]}),
        ({"params": {"on_poison": 1}}, {"params": {"on_poison": 1}}),
        ({"strategy": {"compress": {"bits": 8, "random_k": None}}}, {"strategy": {"compress": {"bits": 8}}}),
        ({"strategy": {"compress": {"momentum": 0.9}}}, {"strategy": {"compress": {"momentum": 0.9}}}),
        ({"strategy": "ring"}, {"strategy": "ring"}),
    ],
)
def test_a_job_is_migrated_by_its_version(job: dict[str, Any], migrated: dict[str, Any]) -> None:
    before = dict(job)
    assert migrate(job) == migrated
    assert list(migrate(job)) == list(migrated) and migrate(migrate(job)) == migrated
    assert job == before, "what was given stays as it is"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("version: 1\non_nonfinite_loss: skip\n", r"on_nonfinite_loss: it is a key of version 2 \(job.yaml line 5\)"),
        ("version: 2\non_poison: skip\n", r"on_poison: there is no such key \(job.yaml line 5\). It is called on_nonf"),
        ("version: 3\n", r"version: 3 is not 1 or 2, .* written for a newer Quorate; `quorate --version` shows"),
        ("version: 0\n", r"version: 0 is not 1 or 2, .* Write version: 2\."),
        (
            "on_poison: skip\non_nonfinite_loss: skip\n",
            r"on_poison: it is now called on_nonfinite_loss, which is given",
        ),
    ],
)
def test_keys_of_another_version_are_refused_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: str, told: str
) -> None:
    (tmp_path / "task.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text(f"task: task.py:Task\nbatch_size: 8\nsteps: 1\n{keys}")
    with pytest.raises(JobFileError, match=told) as refused:
        load_job(file, {}, [])
    assert len(refused.value.problems) == 1
    assert caplog.messages == [], "one message says it all"


@pytest.mark.parametrize(
    ("environment", "overrides", "told"),
    [
        ({}, [parse_set("on_poison=skip")], "--set on_poison: the key is now called on_nonfinite_loss"),
        ({"QUORATE_ON_POISON": "skip"}, [], "environment QUORATE_ON_POISON: the key is now called on_nonfinite_loss"),
    ],
)
def test_what_goes_over_a_job_may_use_the_old_name(
    caplog: pytest.LogCaptureFixture, environment: dict[str, str], overrides: list[Override], told: str
) -> None:
    job = resolve_mapping({**JOB, "version": 2}, "job.yaml", environment, overrides)
    assert job.spec.on_nonfinite_loss == "skip"
    assert caplog.messages == [told]


def test_python_may_use_the_old_name(caplog: pytest.LogCaptureFixture) -> None:
    old: dict[str, Any] = {"on_poison": "skip"}
    job = quorate.Job(**JOB, **old)
    assert job.spec.on_nonfinite_loss == "skip"
    assert caplog.messages == [
        "Job(...) uses old names of keys. Write on_nonfinite_loss instead of on_poison (Job(...))."
    ]
    assert job.replace(on_poison="fail").spec.on_nonfinite_loss == "fail"
    assert quorate.Job(**JOB, on_nonfinite_loss="skip") == job
