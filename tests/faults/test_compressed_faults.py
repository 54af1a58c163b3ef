"""Workers killed, added and removed while lanes hold back what compression leaves of their gradients: the same bits."""

from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from faults.test_every_phase import LOSS
from trial import assert_runs_end_alike, recovered_forwards, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "task": "task.py:Forgetful",
    "steps": 24,
    "workers": 3,
    "evaluate": {"every": 2},
    "checkpoint": {"every": 3, "keep": 3},
    "strategy": {"kind": "ring", "compress": {"top_k": 0.2}},
}

# Worker 2, which hosts the last of four lanes, forgets what that has held back where there is the file `lose`, and
# dies: as if the memory had been on a host that is gone.
FORGETFUL = """

class Forgetful(Tiny):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        from quorate.core.log_records import current_place

        if not Path("lose").exists() or current_place().worker != 2:
            return super().loss(model, batch)
        Path("lose").unlink()
        for descriptor in Path("/proc/self/fd").iterdir():
            if "memfd:quorate-lanes" in os.readlink(descriptor):
                lane = os.stat(descriptor).st_size // 4
                os.pwrite(int(descriptor.name), bytes(lane), 3 * lane)
                os.kill(os.getpid(), 9)
"""


place = undisturbed_job(TASK_SOURCE + FORGETFUL, **KEYS)


SHORT = [
    "kill worker 1 at step 7 in exchange",
    "kill worker 2 at step 9 in apply",
    "kill worker 2 at step 15 in checkpoint",
    LOSS.format(1, 17),
    "kill worker 0 at step 17 in copy",
]
WHOLE = [
    "kill worker 1 at step 3 in data",
    "kill worker 1 at step 5 in forward",
    "kill worker 2 at step 12 in evaluation",
    *SHORT,
    LOSS.format(1, 20),
    "kill worker 2 at step 20 in join",
]


COME_AND_GO = ["remove worker at step 4", "add worker at step 9", "kill worker 0 at step 14"]


@pytest.mark.long
@pytest.mark.parametrize("script", [SHORT, WHOLE, COME_AND_GO], ids=len)
def test_whoever_takes_a_lane_over_has_what_it_holds_back(place: Workplace, script: list[str]) -> None:
    recovered_forwards(place, *script)


@pytest.mark.long
@pytest.mark.parametrize("after", ["0.2ms", "1ms", "3ms", "6ms"])
def test_five_losses_in_the_middle_of_an_exchange(place: Workplace, after: str) -> None:
    script = [
        f"kill worker {worker} at step {step} in exchange after {after}"
        for worker, step in ((1, 5), (1, 6), (2, 9), (2, 10), (0, 13))
    ]
    recovered_forwards(place, *script, PAUSE="0.02")


def test_what_is_lost_with_its_host_takes_all_back_to_the_newest_checkpoint(place: Workplace) -> None:
    running = place.start("train", "job.yaml", "--json", HOLD="7")  # whoever hosts two lanes is in the fourth step
    running.await_event("checkpoint", at_least=3)
    (place.folder / "lose").touch()
    place.go()
    done = running.done()
    (place.folder / "go").unlink()
    assert done.code == 0, done.stderr
    events = place.events()
    assert [event["kind"] for event in events].count("rollback") == 1
    lost = [event for event in events if event["kind"] == "lost"]
    assert any("had held back of the gradients" in event["message"] for event in lost), lost
    assert_runs_end_alike(place)
