"""What is known of a run whose files are gone or cut, and of checkpoints that are not its own."""

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from history.run_builder import Story, add_checkpoint, build_run
from quorate.api.checkpoints import remove_from_run, verify_run
from quorate.api.recorded_run import (
    newest_checkpoint,
    recorded_and_asked,
    recorded_environment,
    recorded_job,
    set_foreign_aside,
)
from quorate.api.result import open_run
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.selection import why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.cli.checkpoints import print_list, print_verified
from quorate.cli.layout import Page
from quorate.core.errors import DamagedFileError, RunError
from quorate.history.run_detail import CheckpointList
from quorate.spec.job import JobSpec
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder


def spec_of(run: RunFolder) -> JobSpec:
    return recorded_job(run).spec


def save(run: RunFolder, step: int, **changes: Any) -> CheckpointInfo:
    """A checkpoint of the run's job, or of another; with `format`, of another version."""
    kind = {"format": changes.pop("format")} if "format" in changes else {}
    file = add_checkpoint(run, step) / "manifest.json"
    job = {**spec_of(run).model_dump(mode="json"), **changes}
    manifest = replace(Manifest.from_json(file.read_text()), job=job, **kind)
    file.write_text(manifest.to_json())
    return CheckpointInfo(file.parent, manifest)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return build_run(tmp_path)


def test_a_lost_job_is_taken_from_the_newest_checkpoint_of_a_job_of_that_name(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    before = spec_of(run)
    with_job = save(run, 4)
    save(run, 100, name="another", seed=7)
    damaged = save(run, 6)
    next(damaged.path.glob("*.safetensors")).unlink()
    run.job_file.unlink()
    assert spec_of(run) == before
    assert f"job.yaml is gone: the job in checkpoint {with_job.path.name} is used" in caplog.text
    recorded, asked = recorded_and_asked(run, {}, [Override("workers", 3, "--workers")])
    assert (recorded.spec, asked.spec) == (before, before.model_copy(update={"workers": 3}))
    assert not run.job_file.exists(), "whoever reads a run writes nothing: that is for resume, which holds the lock"


def test_a_lost_job_that_no_checkpoint_holds_is_told(run: RunFolder) -> None:
    run.job_file.unlink()
    with pytest.raises(RunError, match=r"job\.yaml is gone, and run .* has no checkpoint that has the job"):
        recorded_job(run)
    add_checkpoint(run, 8)  # of a job without keys
    with pytest.raises(RunError, match="the job in checkpoint step-00000008-evaluated cannot be read by this version"):
        recorded_job(run)


def test_a_cut_environment_is_taken_from_the_checkpoint(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    info = save(run, 8)
    run.environment_file.write_text('{"torch": "2.1')
    assert recorded_environment(run, info) == info.manifest.environment
    assert "It says what the run's bits depend on besides its job" in caplog.text
    with pytest.raises(DamagedFileError, match=r"quorate resume takes that from the newest checkpoint"):
        recorded_environment(run, None)


def test_a_newer_checkpoint_of_another_job_is_passed_over_and_moved_aside(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(run)
    save(run, 8)
    other = save(run, 100, seed=7, lanes=2)
    longer = save(run, 12, steps=spec.steps)
    assert why_foreign(longer, spec) == ""
    assert why_foreign(other, spec) == "its job has lanes 2 where the run has 4, seed 7 where the run has 0"
    assert newest_checkpoint(run, spec, spec.checkpoint).path == longer.path
    assert "checkpoint step-00000100-evaluated is not of this run, so step-00000012-evaluated is used" in caplog.text
    set_foreign_aside(run, spec)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [8, 12]
    assert (run.path / "checkpoints-of-other-runs" / other.path.name / "manifest.json").is_file()


def test_whoever_looks_for_the_last_passes_over_one_of_another_job(run: RunFolder) -> None:
    own, other = save(run, 8), save(run, 100, seed=7)
    assert open_run(run.path).steps == 8
    assert [each.path for each in verify_run(run, "last").examined] == [own.path]
    with pytest.raises(RunError, match="has no valid checkpoint left"):
        remove_from_run(run, ["last"], force=False)
    assert [each.path for each in remove_from_run(run, ["last"], force=True)] == [own.path]
    assert [each.path for each in verify_run(run, "last").examined] == [other.path]


def test_where_no_checkpoint_agrees_it_is_the_job_that_was_changed(run: RunFolder) -> None:
    spec = spec_of(run)
    newest = save(run, 8, seed=7)
    assert newest_checkpoint(run, spec, spec.checkpoint).path == newest.path, "and `refuse_edited_job` says so"


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(run: RunFolder) -> None:
    spec = spec_of(run)
    save(run, 8)
    save(run, 12, format=99)
    with pytest.raises(
        RunError, match=r"step-00000012-.* written by a newer Quorate \(format 99; .* resume from step-00000008"
    ):
        newest_checkpoint(run, spec, spec.checkpoint)


def test_checkpoints_that_the_events_tell_of_and_that_are_gone(tmp_path: Path) -> None:
    run = build_run(tmp_path, story=Story().begin().tell("checkpoint", 4).tell("checkpoint", 6))
    with pytest.raises(RunError, match=r"its events record a checkpoint at step 6, and .* has none any longer"):
        newest_checkpoint(run, spec_of(run), spec_of(run).checkpoint)


def test_one_of_another_job_is_marked_in_the_list_and_where_it_is_verified(run: RunFolder) -> None:
    save(run, 8)
    save(run, 100, seed=7)
    why = "its job has seed 7 where the run has 0"
    examined = verify_run(run).examined
    assert [(each.cursor.step, each.problem, each.foreign) for each in examined] == [(8, "", ""), (100, "", why)]
    found = CheckpointList.read(run)
    assert [(each.step, each.foreign) for each in found.checkpoints] == [(8, ""), (100, why)]
    page = io.StringIO()
    print_list(Page(page, is_terminal=False), found, datetime.now(UTC))
    print_verified(Page(page, is_terminal=False), run.name, verify_run(run))
    assert page.getvalue().count(f"step-00000100-evaluated is not of this run, and is ignored: {why}") == 2
    assert "of another run" in page.getvalue()
