"""Workers of a mesh killed and stopped: a replica gives its part to a replacement, and without one all go back to the
newest checkpoint, in the processes that they have."""

from typing import Any

import pytest

from command import Workplace
from trial import recovered, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "steps": 18,
    "lanes": 4,
    "evaluate": {"every": 6},
    "checkpoint": {"every": 5, "keep": 3},
}


replicated = undisturbed_job(**(KEYS | {"workers": 2, "strategy": {"kind": "fsdp", "replicate": 2, "shard": 1}}))


sharded = undisturbed_job(**(KEYS | {"workers": 2, "strategy": {"kind": "fsdp", "shard": 2}}))


def test_a_part_that_has_a_replica_is_copied_from_it(replicated: Workplace) -> None:
    document = recovered(replicated, "kill worker 1 at step 3 in forward", "kill worker 0 at step 9 in apply")
    assert not told(replicated, document, "rollback")


def test_a_part_that_nobody_holds_takes_all_back_to_the_newest_checkpoint(sharded: Workplace) -> None:
    document = recovered(sharded, "kill worker 1 at step 9 in forward", "kill worker 0 at step 14 in apply")
    saved = {event["step"] for event in told(sharded, document, "checkpoint")}
    first, second = (event["step"] for event in told(sharded, document, "rollback"))
    # The newest may still have been on its way to the disk.
    assert {first, second} <= saved
    assert first < 9
    assert first <= second < 14
    assert [event["worker"] for event in told(sharded, document, "lost")] == [1, 0], "survivors keep process"


@pytest.mark.long
def test_a_worker_that_hangs_in_a_collective_is_replaced(sharded: Workplace) -> None:
    recovered(sharded, "stop worker 1 at step 7 in forward for 60s", settings=("failure_timeout=2",))


def test_the_digest_of_a_run_is_that_of_its_last_checkpoint(sharded: Workplace) -> None:
    listed = sharded.run("checkpoints", "ls", "tiny-0001", "--json").document
    finished = [event for event in sharded.events(sharded.folder / "runs/tiny-0001") if event["kind"] == "finished"]
    assert listed["checkpoints"][-1]["weights_digest"] == finished[0]["result"]["weights_digest"]
