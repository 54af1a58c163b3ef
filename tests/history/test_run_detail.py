"""Why the checkpoints of a run are kept."""

import shutil
from pathlib import Path

import pytest

from checkpoint.saved_run import make_run
from history.run_builder import add_checkpoint, build_run, complete_run, whole_story
from made_events import fields_of
from quorate.checkpoint.listing import CheckpointInfo, Skipped, survey
from quorate.checkpoint.retention import Reason
from quorate.core.generation import Phase
from quorate.history import run_detail
from quorate.history.run_detail import CheckpointList, RunDetail, job_values, read_checkpoints
from quorate.history.run_record import Status
from quorate.observe.events import CheckpointSaved
from quorate.observe.jsonl import JsonlSink
from quorate.spec.override import Override


def test_everything_about_a_run(tmp_path: Path) -> None:
    detail = RunDetail.read(complete_run(tmp_path, overrides=[Override("workers", 2, "--workers")]))
    assert (detail.record.status, detail.problems) == (Status.COMPLETE, ())
    assert detail.timing is not None
    assert detail.timing.failure_timeout == 5.0
    assert [each.name for each in detail.checkpoints] == ["step-00000008-evaluated"]
    assert detail.environment == {
        "torch": "2.13.0",
        "canary": "ef" * 16,
        "dataset": "01" * 16,
        "python": "3.11.7",
        "task source": "code-1:" + "cd" * 32,
    }
    assert fields_of(detail.timeline.steps[2]).keys() == {"loss", "samples", "samples_per_second", "compute_s"}


def test_every_value_of_a_job_has_its_origin_and_mark(tmp_path: Path) -> None:
    job = {"params": {"rate": 0.1, "sizes": [1, 2]}, "schedule": {"kind": "cosine"}}
    run = build_run(tmp_path, job=job, overrides=[Override("workers", 2, "--workers")])
    detail = RunDetail.read(run)
    assert detail.job is not None
    values = {each.key: each for each in job_values(detail.job)}
    assert (values["workers"].value, values["workers"].origin, values["workers"].mark) == (
        2,
        "--workers",
        "runtime only",
    )
    assert (values["lanes"].origin, values["lanes"].mark, values["lanes"].is_default) == (
        "job.yaml line 1",
        "affects results",
        False,
    )
    assert (values["params.sizes"].value, values["schedule.kind"].value) == ([1, 2], "cosine")
    assert values["seed"].is_default
    assert values["schedule.warmup"].is_default
    assert (values["early_stop"].value, values["name"].mark) == (None, "name only")
    assert "params" not in values


def test_a_job_of_another_version_leaves_the_rest(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    run.job_file.write_text(run.job_file.read_text() + "from_the_future: 1\n")
    detail = RunDetail.read(run)
    assert (detail.record.status, detail.job, detail.timing) == (Status.COMPLETE, None, None)
    (problem,) = detail.problems
    assert "from_the_future: there is no such key" in problem


def test_what_the_record_says_is_not_said_twice(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    run.job_file.write_text("[")
    run.environment_file.write_text("[]")
    run.events_file.unlink()
    run.events_file.mkdir()
    detail = RunDetail.read(run)
    assert detail.record.status is Status.DAMAGED
    assert "job.yaml" in detail.record.reason
    assert "events.jsonl" in detail.record.reason
    (problem,) = detail.problems
    assert "environment.json" in problem
    assert "canary" in detail.environment


class TestCheckpoints:
    def test_are_listed_oldest_first_with_what_is_wrong(self, tmp_path: Path) -> None:
        run = build_run(tmp_path, story=whole_story())
        add_checkpoint(run, 2, Phase.TRAINED)
        (add_checkpoint(run, 4) / "state.safetensors").write_bytes(b"x" * 200)
        (add_checkpoint(run, 6) / "state.safetensors").unlink()
        (add_checkpoint(run, 8) / "manifest.json").write_text("{")
        (run.checkpoints / ".writing-step-00000010-1234").mkdir()
        found = read_checkpoints(run.checkpoints)
        assert [(each.name, each.step, each.evaluated, each.bytes) for each in found] == [
            ("step-00000002", 2, False, 300),
            ("step-00000004-evaluated", 4, True, 300),
            ("step-00000006-evaluated", 6, True, 300),
            ("step-00000008-evaluated", None, False, 0),
        ]
        assert found[0].problem == ""
        assert found[1].problem == "state.safetensors has 200 bytes and the manifest says 300"
        assert found[2].problem == "state.safetensors cannot be read: No such file or directory"
        assert found[3].problem.startswith("the manifest is not JSON")

    def test_one_that_the_job_removes_meanwhile_is_not_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = build_run(tmp_path)
        add_checkpoint(run, 4)

        def survey_with_one_gone(folder: Path) -> tuple[CheckpointInfo | Skipped, ...]:
            return (Skipped(folder / "step-00000002", "cannot read manifest.json"), *survey(folder))

        monkeypatch.setattr(run_detail, "survey", survey_with_one_gone)
        assert [each.name for each in read_checkpoints(run.checkpoints)] == ["step-00000004-evaluated"]

    def test_of_a_folder_that_is_not_there_there_are_none(self, tmp_path: Path) -> None:
        run = build_run(tmp_path)
        shutil.rmtree(run.checkpoints)
        assert read_checkpoints(run.checkpoints) == ()
        run.checkpoints.write_text("")
        assert read_checkpoints(run.checkpoints) == ()


def test_one_that_is_kept_for_audits_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6, keys="checkpoint: {keep: 1}\n")
    sink = JsonlSink(run.events_file)
    sink.handle(CheckpointSaved(step=6, audited=5))
    sink.close()
    listed = CheckpointList.read(run).checkpoints
    assert {each.step: each.because for each in listed} == {2: (), 4: (Reason.AUDITED,), 6: (Reason.LAST,)}
