"""Workers killed, added and removed while lanes hold back what compression leaves of their gradients: the same bits."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from faults.test_every_phase import LOSS
from trial import assert_recovered, chaos, told, undisturbed_in

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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with undisturbed_in(tmp_path_factory.mktemp("compressed"), TASK_SOURCE + FORGETFUL, **KEYS) as place:
        yield place


def assert_nobody_went_back(place: Workplace, document: dict[str, Any]) -> None:
    """Whoever takes a lane over has what it holds back: no checkpoint is needed, and nothing is done again but the step
    that only somebody had completed who died before it could give it to the others."""
    begun = [event["from_step"] for event in told(place, document, "generation")]
    assert all(later >= earlier - 1 for earlier, later in pairwise(begun)), begun
    assert not told(place, document, "rollback")


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


@pytest.mark.long
@pytest.mark.parametrize("script", [SHORT, pytest.param(WHOLE, marks=pytest.mark.long)], ids=len)
def test_one_loss_in_each_phase_of_one_run(place: Workplace, script: list[str]) -> None:
    document = chaos(place, *script)
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)


@pytest.mark.long
def test_workers_that_come_and_go_take_lanes_over_with_what_they_hold_back(place: Workplace) -> None:
    document = chaos(place, "remove worker at step 4", "add worker at step 9", "kill worker 0 at step 14")
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)


@pytest.mark.long
@pytest.mark.parametrize("after", ["0.2ms", "1ms", "3ms", "6ms"])
def test_five_losses_in_the_middle_of_an_exchange(place: Workplace, after: str) -> None:
    script = [
        f"kill worker {worker} at step {step} in exchange after {after}"
        for worker, step in ((1, 5), (1, 6), (2, 9), (2, 10), (0, 13))
    ]
    document = chaos(place, *script, PAUSE="0.02")
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)


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
    digests = {json.loads((run / "result.json").read_text())["weights_digest"] for run in (place.runs()[0], place.last)}
    assert len(digests) == 1
