import json
import os
import shutil
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from history.run_builder import COMPLETE, CREATED, Story, build_run, complete_run, whole_story
from quorate.checkpoint.retention import BestEvaluation, Watched
from quorate.core.errors import RequestError, RunError
from quorate.core.failure import Failure
from quorate.history.run_record import RunRecord, Status, decide_status
from quorate.spec.load import load_recorded
from quorate.storage.fencing import Holder
from quorate.storage.run_folder import RunFolder

FAILURE = Failure("WorkerLost", "worker 1 was killed", worker=1, step=5)


class TestStatus:
    @pytest.mark.parametrize("said", ["complete", "interrupted", "terminated", "failed"])
    def test_is_what_the_result_says(self, said: str) -> None:
        assert decide_status(False, {"status": said}, ()) == (Status(said), "")

    def test_a_run_that_is_held_is_running_whatever_its_files_say(self) -> None:
        assert decide_status(True, {"status": "complete"}, ()) == (Status.RUNNING, "")
        assert decide_status(True, None, ("no job",)) == (Status.RUNNING, "no job")

    def test_without_holder_and_result_it_is_lost(self) -> None:
        status, reason = decide_status(False, None, ())
        assert status is Status.LOST
        assert "killed together with its launcher" in reason

    def test_what_cannot_be_read_is_damage(self) -> None:
        assert decide_status(False, None, ("this", "that")) == (Status.DAMAGED, "this; that")

    @pytest.mark.parametrize("said", ["running", "lost", "damaged", "fine", None, 3, []])
    def test_a_result_that_no_run_can_have_is_damage(self, said: Any) -> None:
        status, reason = decide_status(False, {"status": said}, ())
        assert status is Status.DAMAGED
        assert repr(said) in reason


class TestRecord:
    def test_a_complete_run(self, tmp_path: Path) -> None:
        record = RunRecord.read(complete_run(tmp_path))
        assert (record.name, record.status, record.reason) == ("tiny-0001", Status.COMPLETE, "")
        assert (record.steps, record.total_steps, record.ending) == (8, 8, "complete")
        assert record.best == BestEvaluation(Watched("loss", "min"), 0.5, 8)
        assert (record.metrics, record.weights_digest) == ({"loss": 0.5}, "ab" * 32)
        assert (record.task, record.lanes, record.workers) == ("/code/task.py:Tiny", 4, 2)
        assert (record.created, record.ended) == (CREATED, CREATED + timedelta(seconds=13))
        assert record.age(CREATED + timedelta(seconds=90)) == 90
        assert (record.samples_per_second, record.wall_seconds, record.failure) == (640.0, 3.5, None)

    def test_a_running_one(self, tmp_path: Path) -> None:
        run = build_run(tmp_path, story=Story().begin().train(1, 5).evaluate(4, loss=0.75), result=COMPLETE)
        with run.lock():
            record = RunRecord.read(run)
        assert (record.status, record.steps, record.total_steps, record.ended) == (Status.RUNNING, 5, 8, None)
        assert record.launcher is not None
        assert record.metrics == {"loss": 0.75}
        # The result is that of an earlier part, which this one is about to replace.
        assert (record.weights_digest, record.wall_seconds) == ("", None)

    def test_a_failed_one_is_as_far_as_it_told(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 5).evaluate(4, loss=0.75)
        run = build_run(tmp_path, story=story, result={"status": "failed", "failure": FAILURE.to_dict()})
        record = RunRecord.read(run)
        assert (record.status, record.steps, record.total_steps) == (Status.FAILED, 5, 8)
        assert record.failure == FAILURE
        assert record.best == BestEvaluation(Watched("loss", "min"), 0.75, 4)

    def test_a_lost_one_has_the_failure_that_its_coordinator_told(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 5).tell("failure", 5, cause="LauncherGone", message="the launcher has ended")
        record = RunRecord.read(build_run(tmp_path, story=story))
        assert (record.status, record.steps) == (Status.LOST, 5)
        assert record.failure == Failure("LauncherGone", "the launcher has ended", step=5)

    def test_a_failure_that_was_got_over_is_none(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 5).tell("failure", 5, cause="WorkerLost", message="killed")
        record = RunRecord.read(build_run(tmp_path, story=story.begin(from_step=4).train(5, 6)))
        assert (record.status, record.failure) == (Status.LOST, None)

    def test_a_failure_of_another_version_is_still_told(self, tmp_path: Path) -> None:
        failures: list[dict[str, Any]] = [{"message": "x", "remedy": "y"}, {}]
        told = []
        for failure in failures:
            record = RunRecord.read(build_run(tmp_path, result={"status": "failed", "failure": failure}))
            assert record.failure is not None
            told.append(record.failure.message)
        assert told == ["x", "no reason was written down"]

    def test_one_that_was_stopped_before_its_first_step(self, tmp_path: Path) -> None:
        nothing = {"steps": 0, "weights_digest": "", "samples_per_second": 0.0, "final_metrics": {}}
        run = build_run(tmp_path, result={"status": "interrupted", "ending": "interrupted", **nothing})
        record = RunRecord.read(run)
        assert (record.status, record.steps, record.total_steps, record.best) == (Status.INTERRUPTED, 0, 8, None)
        assert (record.ended, record.workers, record.metrics) == (None, None, {})

    def test_a_launcher_that_takes_it_up_meanwhile_makes_it_running(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = build_run(tmp_path, story=whole_story())
        holders: list[Holder | None] = [None, Holder(12)]
        monkeypatch.setattr(run, "holder", lambda: holders.pop(0))
        assert RunRecord.read(run).status is Status.RUNNING
        assert holders == []

    def test_a_time_that_there_cannot_be_is_none(self, tmp_path: Path) -> None:
        run = build_run(tmp_path, story=Story(time=1e300).begin(), result=COMPLETE)
        assert RunRecord.read(run).ended is None


def spoil(run: RunFolder, file: str, content: bytes | None) -> None:
    path = run.path / file
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


class TestDamage:
    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("result.json", b"{"),
            ("result.json", b"\xff"),
            ("result.json", None),
            ("job.yaml", b"[" * 100_000),
            ("job.yaml", b"a: ["),
            ("job.yaml", b""),
            ("job.yaml", None),
            ("events.jsonl", None),
        ],
    )
    def test_is_told_with_the_file_and_the_rest_is_kept(self, tmp_path: Path, file: str, content: bytes | None) -> None:
        run = complete_run(tmp_path)
        spoil(run, file, content)
        record = RunRecord.read(run)
        assert record.status is Status.DAMAGED
        assert str(run.path / file) in record.reason
        assert (record.name, record.created) == ("tiny-0001", CREATED)
        assert record.steps == 8

    @pytest.mark.timeout(10)
    @pytest.mark.parametrize("file", ["result.json", "job.yaml", "events.jsonl", "lock", "created", "environment.json"])
    def test_a_fifo_holds_nobody_up(self, tmp_path: Path, file: str) -> None:
        run = complete_run(tmp_path)
        (run.path / file).unlink(missing_ok=True)
        os.mkfifo(run.path / file)
        record = RunRecord.read(run)
        assert (record.name, record.steps) == ("tiny-0001", 8)
        if file == "environment.json":
            with pytest.raises(RunError, match="a FIFO is in the place of the file"):
                run.read_environment()
        elif file != "created":
            assert record.status is Status.DAMAGED
            assert "a FIFO is in the place of the file" in record.reason
        with pytest.raises(RequestError, match="a FIFO") if file == "job.yaml" else nullcontext():
            load_recorded(run.job_file, {}, [])

    def test_a_missing_job_is_damage_and_a_missing_result_is_not(self, tmp_path: Path) -> None:
        run = complete_run(tmp_path)
        run.result_file.unlink()
        assert RunRecord.read(run).status is Status.LOST
        run.job_file.unlink()
        assert RunRecord.read(run).status is Status.DAMAGED

    @pytest.mark.parametrize("value", ["x", [], {}, True, -1, None])
    def test_values_of_another_kind_are_passed_over(self, tmp_path: Path, value: Any) -> None:
        run = complete_run(tmp_path)
        odd = dict.fromkeys(("steps", "best", "final_metrics", "wall_seconds", "samples_per_second", "failure"), value)
        run.result_file.write_text(json.dumps({**COMPLETE, **odd, "failure": None}))
        record = RunRecord.read(run)
        assert (record.status, record.steps) == (Status.COMPLETE, 8)
        assert record.best == BestEvaluation(Watched("loss", "min"), 0.5, 8)
        assert record.metrics == {"loss": 0.5}

    def test_a_run_that_is_removed_meanwhile_is_told(self, tmp_path: Path) -> None:
        run = complete_run(tmp_path)
        shutil.rmtree(run.path)
        with pytest.raises(RunError, match="cannot look at run tiny-0001"):
            RunRecord.read(run)
