"""Workers and servers killed in a job whose gradients and answers are compressed: the same bits, and no way back."""

from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from faults.test_every_phase import LOSS
from schemas import validate
from trial import assert_replicas_sufficed, assert_runs_end_alike, recovered, recovered_forwards, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "task": "task.py:Fragile",
    "steps": 24,
    "workers": 3,
    "evaluate": {"every": 2},
    "checkpoint": {"every": 3, "keep": 3},
    "strategy": {"kind": "parameter-server", "servers": 2, "replicas": 2, "compress": {"top_k": 0.2}},
}

# A server dies in the middle of an update, where there is a file with its name.
FRAGILE = """

class Fragile(Tiny):
    def optimizer(self, model: nn.Module) -> Any:
        return FragileSgd(model.parameters(), lr=self.learning_rate, momentum=0.9)


class FragileSgd(torch.optim.SGD):
    per_parameter = True

    def step(self, closure: Any = None) -> Any:
        from quorate.core.generation import file_name_of
        from quorate.core.log_records import current_place

        place = current_place()
        death = Path("nobody" if place is None or place.worker is None else file_name_of(place.worker))
        if death.exists():
            death.unlink()
            os.kill(os.getpid(), 9)
        return super().step(closure)
"""


place = undisturbed_job(TASK_SOURCE + FRAGILE, **KEYS)


def test_bytes_are_told_both_ways(place: Workplace) -> None:
    shown = place.run("show", "last", "--json").document
    validate("show", shown)
    sizes = shown["compression"]
    assert 0 < sizes["lane_bytes"] < sizes["lane_bytes_dense"] + 64
    assert sizes["received_bytes_dense"] == sizes["lane_bytes_dense"]
    assert sizes["sent_bytes_dense"] % (2 * sizes["lane_bytes_dense"]) == 0, "to both holders"
    assert "gradients" in place.run("show", "last").stdout


@pytest.mark.long
def test_workers_are_lost_in_each_phase(place: Workplace) -> None:
    script = [
        "kill worker 1 at step 5 in forward",
        "kill worker 1 at step 7 in exchange",
        "kill worker 2 at step 9 in apply",
        "kill worker 2 at step 15 in checkpoint",
        LOSS.format(1, 17),
        "kill worker 0 at step 17 in copy",
    ]
    recovered_forwards(place, *script)


@pytest.mark.long
def test_servers_are_lost_between_and_beside_workers(place: Workplace) -> None:
    script = [
        "kill server 0 at step 5 in exchange",
        "kill worker 1 at step 9",
        "kill server 1 at step 13",
        "kill server 0 at step 18 in checkpoint",
    ]
    document = recovered(place, *script)
    assert_replicas_sufficed(place, document)


@pytest.mark.long
@pytest.mark.parametrize("server", ["server-0", "server-1"])
def test_a_server_that_dies_in_an_update_leaves_all_to_its_replica(place: Workplace, server: str) -> None:
    running = place.start("train", "job.yaml", "--json", HOLD="7")  # whoever hosts two lanes is in the fourth step
    running.await_event("checkpoint", at_least=3)
    (place.folder / server).touch()
    place.go()
    done = running.done()
    (place.folder / "go").unlink()
    assert done.code == 0, done.stderr
    events = place.events()
    assert not [event for event in events if event["kind"] == "rollback"]
    assert [event for event in events if event["kind"] == "lost"]
    assert_runs_end_alike(place)
