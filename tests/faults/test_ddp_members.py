"""Gangs whose number changes, and one that waits. Two lanes have the same bits on one worker and on two, even here."""

from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from faults.test_fewest_workers import crowds
from trial import recovered_forwards, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "task": "task.py:Dawdling",
    "lanes": 2,
    "steps": 24,
    "workers": 2,
    "checkpoint": {"every": 6, "keep": 3},
    "strategy": "ddp",
}

# Worker 1 takes its time once, where there is the file `dawdle`: longer than one that is not heard of has. And whoever
# takes a killed worker's place waits for the next generation, which is then without it, if it is told to.
DAWDLING = """

class Dawdling(Tiny):
    def model(self) -> nn.Module:
        newest = max(Path("runs").glob("*-[0-9]*"))
        if any(newest.glob("logs/*.fired")):
            events = newest / "events.jsonl"
            while "REPLACEMENTS" in os.environ and events.read_text().count('"kind":"generation"') < 2:
                time.sleep(0.01)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        from quorate.core.log_records import current_place

        if Path("dawdle").exists() and current_place().worker == 1:
            Path("dawdle").rename("dawdled")
            time.sleep(6.0)
        return super().loss(model, batch)
"""


place = undisturbed_job(TASK_SOURCE + DAWDLING, **KEYS)


def test_from_min_workers_on_survivors_go_on_with_fewer(place: Workplace) -> None:
    document = recovered_forwards(place, "kill worker 1 at step 6 in exchange", REPLACEMENTS="late")
    assert crowds(place, document)[:2] == [2, 1]
    (recovery,) = document["recoveries"]
    assert recovery["steps_lost"] == 0


@pytest.mark.long
def test_workers_come_and_go_and_a_spare_takes_a_place(place: Workplace) -> None:
    script = ["remove worker at step 4", "add worker at step 9", "kill worker 0 at step 16 in exchange"]
    document = recovered_forwards(place, *script, settings=("spares=1",), PAUSE="0.03")
    assert [(event["before"], event["workers"]) for event in told(place, document, "resize")] == [(2, 1), (1, 2)]
    assert 1 in crowds(place, document)
    assert crowds(place, document)[-1] == 2


@pytest.mark.long
def test_a_slow_member_is_waited_for_longer_than_one_that_is_not_heard_of(place: Workplace) -> None:
    (place.folder / "dawdle").touch()
    done = place.train("--json", "--set", "failure_timeout=4")
    assert done.code == 0, done.stderr
    assert (place.folder / "dawdled").exists()
    kinds = [event["kind"] for event in place.events()]
    assert kinds.count("generation") == 1
    assert "lost" not in kinds
    reference = place.run("show", "tiny-0001", "--json").document["weights_digest"]
    assert done.document["weights_digest"] == reference
