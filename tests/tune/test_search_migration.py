"""Searches of version 1, and those of jobs of version 1."""

from pathlib import Path
from typing import Any

import pytest

from quorate.spec.load import resolve_mapping
from quorate.spec.resolved import dump_job
from quorate.tune.loading import dump_search, load_recorded_search, read_mapping, read_search
from quorate.tune.trials import SearchLog

JOB: dict[str, Any] = {"task": "task.py:Task", "batch_size": 8, "steps": 2}


def test_a_search_may_use_the_old_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "task.py").touch()
    (tmp_path / "job.yaml").write_text("version: 1\ntask: task.py:Task\nbatch_size: 8\nsteps: 2\n")
    file = tmp_path / "search.yaml"
    file.write_text(
        "job: job.yaml\nbudget: {trials: 2}\n"
        "space:\n  params.rate: {choice: [1, 2]}\n  on_poison: {choice: [fail, skip]}\n"
    )
    search = read_search(file, {}).accepted()
    assert list(search.spec.space or {}) == ["params.rate", "on_nonfinite_loss"]
    assert "search.yaml line 5: the key is now called space.on_nonfinite_loss" in caplog.messages
    assert search.trial_job({"on_nonfinite_loss": "skip"}, 1).spec.on_nonfinite_loss == "skip"

    space = {"on_poison": {"choice": ["fail", "skip"]}}
    given = read_mapping(
        {"job": {**JOB, "task": "tasks:Task"}, "space": space, "budget": {"trials": 2}}, "Search(...)", {}
    ).accepted()
    assert list(given.spec.space or {}) == ["on_nonfinite_loss"]


def test_a_recorded_search_with_the_old_name_is_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "task.py").touch()
    space = {"on_nonfinite_loss": {"choice": ["fail", "skip"]}}
    job = resolve_mapping(JOB, "job.yaml", {}, [])
    search = read_mapping({"space": space, "budget": {"trials": 2}}, "Search(...)", {}, job).accepted()
    (tmp_path / "job.yaml").write_text(
        dump_job(search.job).replace("version: 2", "version: 1").replace("on_nonfinite_loss", "on_poison")
    )
    (tmp_path / "search.yaml").write_text(dump_search(search).replace("on_nonfinite_loss", "on_poison"))
    read = load_recorded_search(tmp_path)
    assert (read.spec.space, read.job.spec) == (search.spec.space, search.job.spec)
    log = SearchLog()
    log.take({"time": 1.0, "kind": "proposed", "trial": 1, "params": {"on_poison": "skip"}})
    assert log.trials[1].parts[0].params == {"on_nonfinite_loss": "skip"}
    assert caplog.messages == []
