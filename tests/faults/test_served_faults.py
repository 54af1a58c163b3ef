"""Servers of a synchronous job killed, asked to leave, added and removed, also while others are: the same bits."""

from collections.abc import Iterator
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from trial import assert_recovered, chaos, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]

PLAIN = """

class Plain(Tiny):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate)
"""
KEYS: dict[str, Any] = {
    "task": "task.py:Plain",
    "steps": 90,
    "workers": 2,
    "failure_timeout": 3.0,
    "evaluate": {"every": 16},
    "checkpoint": {"every": 20, "keep": 3},
    "clip_norm": 0.5,
    "strategy": {"kind": "parameter-server", "servers": 3, "replicas": 2},
}
EVERYBODY = ("server 0", "server 1", "server 2", "worker 0", "worker 1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with undisturbed_in(tmp_path_factory.mktemp("served"), TASK_SOURCE + PLAIN, **KEYS) as place:
        yield place


def test_others_are_killed_while_a_server_hands_over(place: Workplace) -> None:
    script = [
        "term server 2 at step 10",
        "kill coordinator at step 11",
        "kill server 0 at step 30 in apply",
        "remove server at step 50",
        "kill worker 0 at step 51",
    ]
    document = chaos(place, *script, PAUSE="0.03")
    assert_recovered(place, document)
    assert not told(place, document, "rollback")


def test_everybody_who_is_asked_to_leave_saves_and_nothing_is_trained_again(place: Workplace) -> None:
    document = chaos(place, *(f"term {one} at step 20" for one in EVERYBODY), PAUSE="0.03")
    assert document["same"]
    assert document["ledger_whole"]
    assert not told(place, document, "rollback")
