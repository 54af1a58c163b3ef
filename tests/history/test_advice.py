from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from history.run_builder import CREATED
from quorate.core.failure import Failure
from quorate.history.run_detail import CheckpointRecord, advise
from quorate.history.run_record import RunRecord, Status
from quorate.spec.job import JobSpec
from quorate.storage.fencing import Holder

RECORD = RunRecord("tiny-0001", Path("runs/tiny-0001"), Status.LOST, "", CREATED)
SPEC = JobSpec(task="a.b:C", batch_size=8, steps=8)
WHOLE = CheckpointRecord("step-00000004", step=4)
NEWER_BUT_DAMAGED = CheckpointRecord("step-00000006", step=6, problem="it is truncated")


def command(status: Status, *checkpoints: CheckpointRecord, spec: JobSpec | None = SPEC, **fields: Any) -> str | None:
    record = replace(RECORD, status=status, **fields)
    advice = advise(record, spec, checkpoints, "tiny-0001")
    return None if advice is None else advice.command


@pytest.mark.parametrize("status", [Status.LOST, Status.FAILED, Status.INTERRUPTED, Status.TERMINATED])
def test_what_ended_too_early_goes_on_from_its_newest_usable_checkpoint(status: Status) -> None:
    advice = advise(replace(RECORD, status=status), SPEC, (WHOLE, NEWER_BUT_DAMAGED), "tiny-0001")
    assert advice is not None
    assert (advice.command, advice.purpose) == ("quorate resume tiny-0001", "resumes from step 4")


def test_without_a_usable_checkpoint_there_is_nothing_to_go_on_from() -> None:
    for checkpoints in ((), (NEWER_BUT_DAMAGED,)):
        advice = advise(RECORD, SPEC, checkpoints, "tiny-0001")
        assert advice is not None
        assert advice.command is None
        assert "start again with quorate train" in advice.purpose


@pytest.mark.parametrize("kind", ["UserCodeError", "LossError", "MetricError", "UnsupportedModelError"])
def test_what_would_fail_again_in_the_same_way_becomes_another_run(kind: str) -> None:
    assert command(Status.FAILED, WHOLE, failure=Failure(kind, "")) == "quorate resume tiny-0001 --branch"


def test_what_need_not_fail_again_goes_on() -> None:
    assert command(Status.FAILED, WHOLE, failure=Failure("PeerLost", "")) == "quorate resume tiny-0001"


def test_a_complete_run_can_train_longer() -> None:
    assert command(Status.COMPLETE, WHOLE) == "quorate resume tiny-0001 --steps 16"
    by_epochs = JobSpec(task="a.b:C", batch_size=8, epochs=3)
    assert command(Status.COMPLETE, WHOLE, spec=by_epochs) == "quorate resume tiny-0001 --epochs 6"
    assert command(Status.COMPLETE, WHOLE, spec=None) is None


def test_one_that_stopped_early_goes_on_as_a_branch() -> None:
    asked = command(Status.COMPLETE, WHOLE, ending="early stop")
    assert asked == "quorate resume tiny-0001 --branch --set early_stop=null"


def test_a_running_one_can_be_stopped() -> None:
    assert command(Status.RUNNING, WHOLE, launcher=Holder(123)) == "quorate stop tiny-0001"
    assert command(Status.RUNNING, WHOLE, launcher=Holder(None)) == "quorate stop tiny-0001"


def test_nothing_is_known_to_help_a_damaged_one() -> None:
    assert command(Status.DAMAGED, WHOLE) is None
