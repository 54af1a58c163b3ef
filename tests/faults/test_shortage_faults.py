"""Memory runs out in the middle of a job, and then somebody dies: same cuts, same bits."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from trial import recovered, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "task": "task.py:Scarce",
    "batch_size": 16,
    "steps": 10,
    "workers": 2,
    "on_out_of_memory": "shrink",
    "evaluate": {"every": "end"},
    "checkpoint": {"every": 2, "keep": 9},
}

# From the sixth step on, and as long as there is the file `scarce`, there is no room for four samples at a time.
SCARCE = """

class Scarce(Tiny):
    buffer_rules = {"steps": "lane 0"}

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("steps", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        steps = model.get_buffer("steps")
        steps += len(batch[0]) / 4
        if steps > 5 and len(batch[0]) == 4 and Path("scarce").exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return super().loss(model, batch)
"""
SHORTAGES = [{"step": 6, "micro_batches": 2, "samples": 2}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("scarce")
    (folder / "scarce").touch()
    with undisturbed_in(folder, TASK_SOURCE + SCARCE, **KEYS) as place:
        yield place


def shortages(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: event[key] for key in SHORTAGES[0]} for event in events if event["kind"] == "out_of_memory"]


def test_it_is_told_once_and_kept(place: Workplace) -> None:
    run = place.folder / "runs" / "tiny-0001"
    assert shortages(place.events(run)) == SHORTAGES
    assert json.loads((run / "micro_batches.json").read_text()) == {"since": [[6, 2]]}
    assert json.loads((run / "result.json").read_text())["micro_batches"] == [[6, 2]]
    shown = place.run("show", "tiny-0001").stdout
    assert "memory ran out at step 6 in lane 0 (OutOfMemoryError: CUDA out of memory." in shown


@pytest.mark.parametrize(
    "fault",
    [
        "kill worker 1 at step 6",
        pytest.param("kill worker 0 at step 8", marks=pytest.mark.long),
        pytest.param("kill all at step 7", marks=pytest.mark.long),
    ],
)
def test_kills_around_a_step_that_ran_out_leave_the_same_bits(place: Workplace, fault: str) -> None:
    document = recovered(place, fault)
    assert shortages(told(place, document, "out_of_memory")) == SHORTAGES


@pytest.mark.long
def test_an_older_checkpoint_leads_to_the_same_bits_where_memory_would_not_run_out_again(place: Workplace) -> None:
    done = place.run("train", "job.yaml", "--steps", "8", "--json")
    assert done.code == 0, done.stderr
    run = place.last
    for newer in sorted((run / "checkpoints").iterdir())[2:]:
        shutil.rmtree(newer)
    (place.folder / "scarce").unlink()
    try:
        resumed = place.run("resume", run.name, "--steps", "10", "--json")
    finally:
        (place.folder / "scarce").touch()
    assert resumed.code == 0, resumed.stderr
    reference = json.loads((place.folder / "runs" / "tiny-0001" / "result.json").read_text())
    assert resumed.document["from_step"] == 4
    assert resumed.document["weights_digest"] == reference["weights_digest"]
    assert resumed.document["micro_batches"] == [[6, 2]]
