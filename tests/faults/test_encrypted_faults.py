"""A job whose links are encrypted ends with the bits of one whose links are not, whoever is killed meanwhile."""

import json
from pathlib import Path
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from trial import REFERENCE, recovered, told, undisturbed_in, undisturbed_job

pytestmark = pytest.mark.faults

ENCRYPTED = ("encrypt=true",)
SERVED = """

class Served(Tiny):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate)
"""


place = undisturbed_job(workers=2, lanes=4)


def assert_encrypted(place: Workplace, document: dict[str, Any], member: str) -> None:
    """Its links were encrypted, and no key is left of it."""
    run = place.folder / "runs" / document["run"]
    assert "over TLS" in (run / "logs" / f"{member}.jsonl").read_text()
    for file in [file for file in run.rglob("*") if file.is_file()]:
        assert b"PRIVATE KEY" not in file.read_bytes(), f"a key is in {file}"


def test_a_worker_of_an_encrypted_job_is_killed(place: Workplace) -> None:
    document = recovered(place, "kill worker 1 at step 3", settings=ENCRYPTED)
    assert_encrypted(place, document, "worker-0")


@pytest.mark.long
def test_an_encrypted_job_ends_with_the_same_bits(place: Workplace) -> None:
    undisturbed = json.loads((place.folder / "runs" / REFERENCE / "result.json").read_text())
    document = place.train("--json", "--set", *ENCRYPTED).document
    assert document["weights_digest"] == undisturbed["weights_digest"]
    assert_encrypted(place, document, "worker-0")


@pytest.mark.long
def test_the_coordinator_of_an_encrypted_job_is_replaced_and_then_a_worker(place: Workplace) -> None:
    """The new coordinator has a certificate of its own, and the worker that comes later trusts it."""
    document = recovered(place, "kill coordinator at step 3", "kill worker 1 at step 5", settings=ENCRYPTED)
    assert_encrypted(place, document, "worker-0")


@pytest.mark.long
def test_servers_and_workers_of_an_encrypted_job_are_killed(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "task": "task.py:Served",
        "steps": 60,
        "workers": 2,
        "strategy": {"kind": "parameter-server", "servers": 2, "replicas": 2},
    }
    with undisturbed_in(tmp_path, TASK_SOURCE + SERVED, **keys) as place:
        script = ["kill server 1 at step 10 in apply", "kill worker 0 at step 30"]
        document = recovered(place, *script, settings=ENCRYPTED, PAUSE="0.03")
        assert not told(place, document, "rollback")
        assert_encrypted(place, document, "worker-1")
