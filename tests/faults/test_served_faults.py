"""Servers of a synchronous job killed, asked to leave, added and removed, also while others are: the same bits."""

from pathlib import Path
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from trial import assert_replicas_sufficed, chaos, recovered, told, undisturbed_in, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]

PLAIN = """

class Plain(Tiny):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate)
"""
AWAY = """

from quorate.replica.device import Device


class Memory:
    zeros_on_host = staticmethod(lambda size, dtype: torch.zeros(size, dtype=dtype))
    pin = staticmethod(lambda region: lambda: None)
    wait = staticmethod(lambda: None)


def tune(device: Device, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"] = True


Device.is_host, Device.tune, Device.shareable = False, tune, Memory()
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


place = undisturbed_job(TASK_SOURCE + PLAIN, **KEYS)


def test_others_are_killed_while_a_server_hands_over(place: Workplace) -> None:
    script = [
        "term server 2 at step 10",
        "kill coordinator at step 11",
        "kill server 0 at step 30 in apply",
        "remove server at step 50",
        "kill worker 0 at step 51",
    ]
    document = recovered(place, *script, PAUSE="0.03")
    assert_replicas_sufficed(place, document)


def test_everybody_who_is_asked_to_leave_saves_and_nothing_is_trained_again(place: Workplace) -> None:
    document = chaos(place, *(f"term {one} at step 20" for one in EVERYBODY), PAUSE="0.03")
    assert document["same"]
    assert document["ledger_whole"]
    assert not told(place, document, "rollback")


def test_servers_on_a_device_are_killed_and_the_job_ends_with_the_bits_of_the_ring(tmp_path: Path) -> None:
    """The device is the CPU, as one whose memory is not the host's."""
    with undisturbed_in(tmp_path, TASK_SOURCE + PLAIN + AWAY, **KEYS) as place:
        script = ["kill server 1 at step 10 in apply", "kill worker 0 at step 30", "kill server 0 at step 50"]
        document = recovered(place, *script, PAUSE="0.03")
        assert_replicas_sufficed(place, document)
        ring = place.train("--json", "--set", "strategy=ring").document
        assert ring["weights_digest"] == document["digest"]
