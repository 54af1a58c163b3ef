"""`quorate train` with `batch_size: auto`."""

import json

import pytest

from command import TASK_SOURCE, Workplace

pytestmark = pytest.mark.usefixtures("unmeasured")

SCARCE = """

class Scarce(Tiny):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return super().loss(model, batch)
"""


def test_the_largest_batch_that_fits_is_written_into_the_run(workplace: Workplace) -> None:
    workplace.task.write_text(TASK_SOURCE + SCARCE)
    workplace.write_job(task="task.py:Scarce", batch_size="auto", lanes=4, steps=2)
    done = workplace.train("--json")
    assert done.code == 0, done.stderr
    assert "batch_size: auto is 20: 5 samples at a time, in each of 4 lanes" in done.stderr
    assert "batch_size: 20  # auto: the largest that fits" in (workplace.last / "job.yaml").read_text()
    assert [event["samples"] for event in workplace.events() if event["kind"] == "step"] == [20, 20]
    assert [run.name for run in workplace.runs()] == ["tiny-0001"]
    again = workplace.run("resume", "last", "--steps", "3", "--json")
    assert again.code == 0, again.stderr
    assert json.loads(again.stdout)["steps"] == 3


def test_what_fails_while_it_is_looked_for_is_told_and_leaves_no_run(workplace: Workplace) -> None:
    workplace.write_job(batch_size="auto")
    done = workplace.train(TROUBLE="model")
    assert done.code == 2
    assert "trouble in model" in done.stderr
    assert not workplace.runs()
