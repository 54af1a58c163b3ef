"""`record` tells in which step, lane and tensor two runs part, whoever hosted that lane and whatever happened to it."""

import pytest

from command import Workplace
from schemas import validate

NUDGE = """
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = self.plain_loss(model, batch)
        nudged = os.environ.get("NUDGED")
        if nudged and torch.default_generator.initial_seed() == derive_seed(0, "lane", *map(int, nudged.split())):
            little = (model[2].weight * 1e-5).sum()
            loss = loss + little - little.detach()
        return loss

    def plain_loss("""


@pytest.fixture
def nudging(workplace: Workplace) -> Workplace:
    source = workplace.task.read_text().replace("\n    def loss(", NUDGE)
    # Servers take only optimizers that say so.
    by_itself = "class TroubledSgd(torch.optim.SGD):\n    per_parameter = True\n"
    source = source.replace("class TroubledSgd(torch.optim.SGD):\n", by_itself)
    workplace.task.write_text(
        source.replace("import quorate\n", "import quorate\nfrom quorate.core.digests import derive_seed\n")
    )
    return workplace


@pytest.mark.parametrize("strategy", ["ring", "parameter-server"])
def test_step_lane_and_tensor_at_which_runs_part(nudging: Workplace, strategy: str) -> None:
    nudging.write_job(record="tensors", seed=0, strategy=strategy)
    assert nudging.train("--workers", "2").code == 0
    assert nudging.train("--workers", "1", NUDGED="3 1").code == 0
    done = nudging.run("diff", "tiny-0001", "tiny-0002", "--json")
    validate("diff", done.document)
    divergence = done.document["divergence"]
    assert (divergence["step"], divergence["lane"], divergence["tensor"]) == (3, 1, "2.weight")
    told = nudging.run("diff", "tiny-0001", "tiny-0002", COLUMNS="400").stdout
    assert "They diverge at step 3: the gradient of lane 1, first in that of '2.weight'" in told


def test_lanes_alone_and_steps_that_were_done_again(nudging: Workplace) -> None:
    nudging.write_job(record="lanes", seed=0)
    assert nudging.train("--workers", "2").code == 0
    killed = nudging.run(
        "chaos", "job.yaml", "--against", "tiny-0001", "--quiet", "--json", "--fault", "kill all at step 4"
    )
    assert killed.document["same"]
    again = nudging.run("diff", "tiny-0001", "last", "--json").document
    assert again["divergence"] is None
    assert again["common_steps"] == 8
    steps = [event for event in nudging.events() if event["kind"] == "step"]
    assert all(len(set(event["lanes"])) == len(event["lanes"]) for event in steps)
    assert all("tensors" not in event for event in steps)
    assert nudging.train("--workers", "2", NUDGED="5 2").code == 0
    divergence = nudging.run("diff", "tiny-0001", "last", "--json").document["divergence"]
    assert (divergence["step"], divergence["lane"], divergence["tensor"]) == (5, 2, None)


def test_a_strategy_without_a_fixed_order_of_lanes_records_none(workplace: Workplace) -> None:
    workplace.write_job(record="lanes", strategy="ddp")
    done = workplace.train()
    assert done.code == 2
    assert "compares runs by their lanes, whose order of summation is not fixed" in done.error
