"""With parameter servers a job gives the digest of the ring, on any number of workers and servers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, one_digest, trained
from bits.test_bits import CASES, Case, alone
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Role, server_id
from quorate.strategies.servers.align import plan_transfers

pytestmark = pytest.mark.usefixtures("unmeasured")

REFUSED = {tasks.NoisyOptimizer, tasks.AveragesInside}
"""Optimizers of which nobody can say that they update each parameter by itself: of one's own, or with hooks."""
SERVED = [number for number, case in enumerate(CASES) if case.task not in REFUSED and case.keys.get("threads", 1) == 1]

SHAPES = [Shape(2, 2, 2), Shape(2, 3, 2), Shape(4, 3, 2)]
LINKS = [
    Shape(2, 2, 2, links="tcp"),
    Shape(2, 2, 2, hosts="AABB"),
    Shape(2, 2, 2, hosts="ABAB"),
    Shape(2, 3, 2, hosts="AABBC"),
]
SOME = [SERVED[1], SERVED[4], SERVED[12]]


def of(case: Case, folder: Path, shape: Shape, **keys: Any) -> gang.Ended:
    return trained(case.task, folder, shape, **case.keys, **keys)


@pytest.mark.parametrize(
    ("number", "shape"),
    [
        # Every fourth case on one of the small ones by turns; the others, and on the others, among the long tests.
        pytest.param(number, shape, id=f"{CASES[number].name}-{shape}", marks=() if is_next else pytest.mark.long)
        for at, number in enumerate(SERVED)
        for shape, is_next in zip(SHAPES, (at % 8 == 0, at % 8 == 4, False), strict=True)
    ],
)
def test_servers_give_the_digest_of_the_ring(number: int, shape: Shape, tmp_path: Path) -> None:
    served, ring = of(CASES[number], tmp_path / "served", shape), alone(number)
    assert served.digest == ring.digest
    assert (served.losses, served.norms) == (ring.losses, ring.norms)


class ChannelsLast(tasks.Momentum):
    """Autograd leaves gradients that lie as the weights do, and a norm adds up as they lie."""

    def model(self) -> nn.Module:
        pictures = nn.Sequential(nn.Unflatten(1, (tasks.FEATURES, 1, 1)), nn.Upsample(scale_factor=5))
        seen = nn.Sequential(nn.Conv2d(tasks.FEATURES, 40, 3), nn.Tanh(), nn.Conv2d(40, 9, 3), nn.Flatten())
        model = nn.Sequential(pictures, seen, nn.Linear(9, 1))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("keys", [{}, {"clip_norm": 1e-3}], ids=str)
def test_the_norm_of_a_single_lane_is_that_of_the_ring_as_gradients_lie(keys: dict[str, Any], tmp_path: Path) -> None:
    ring, served = (trained(ChannelsLast, tmp_path / str(s), s, lanes=1, **keys) for s in (Shape(1), Shape(1, 2)))
    assert (served.digest, served.norms) == (ring.digest, ring.norms)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("number", SOME, ids=lambda number: CASES[number].name)
def test_every_shape_gives_the_digest_of_the_ring(
    number: int, workers: int, servers: int, replicas: int, tmp_path: Path
) -> None:
    assert of(CASES[number], tmp_path / "served", Shape(workers, servers, replicas)).digest == alone(number).digest


@pytest.mark.parametrize(
    ("number", "shape"),
    [
        # Every case and all links, but not each on each.
        pytest.param(number, shape, id=f"{CASES[number].name}-{shape}", marks=() if is_next else pytest.mark.long)
        for at, shape in enumerate(LINKS)
        for number, is_next in zip(SOME, (at % 3 == 0, at % 3 == 1, at % 3 == 2), strict=True)
    ],
)
def test_over_other_links_the_digest_is_the_same(number: int, shape: Shape, tmp_path: Path) -> None:
    # Buckets so small that most parameters have one of their own, and some share one.
    served = of(CASES[number], tmp_path / "served", shape, bucket_mb=0.0005)
    assert served.digest == alone(number, bucket_mb=0.0005).digest


@pytest.mark.long
@pytest.mark.parametrize("number", [SERVED[2], SERVED[4], SERVED[-1]], ids=lambda number: CASES[number].name)
def test_a_job_changes_from_the_ring_to_servers_and_back(number: int, tmp_path: Path) -> None:
    """Saved by one and gone on with by the other, with all that optimizers and schedules keep."""
    for shape, stop_at in ((Shape(2, 2), 2), (Shape(3), 4)):
        stopped = of(CASES[number], tmp_path / "changing", shape, stop_at=stop_at)
        assert (stopped.ending, stopped.progress["cursor"][0]) == ("interrupted", stop_at)
    assert of(CASES[number], tmp_path / "changing", Shape(1, 2)).digest == alone(number).digest


def test_what_no_optimizer_updates_stays_as_it_is_on_more_servers_than_there_are_parameters(tmp_path: Path) -> None:
    case, folder = Case(tasks.WithoutOptimizer, {"clip_norm": 0.1}), tmp_path / "changing"
    ring = one_digest(case.task, tmp_path, Shape(1), Shape(2, 7, 2), **case.keys)
    assert of(case, folder, Shape(1, 7), stop_at=2).ending == "interrupted"
    assert of(case, folder, Shape(2)).digest == ring


def test_a_bucket_without_elements_is_summed_in_shared_memory_as_elsewhere(tmp_path: Path) -> None:
    one_digest(tasks.NothingOfItsType, tmp_path, Shape(1), Shape(2), Shape(3, links="tcp"), Shape(2, 2, 2))


@pytest.mark.parametrize("strategy", [{"kind": "ring", "compress": {"top_k": 0.5}}, {"kind": "ddp"}], ids=str)
def test_a_bucket_without_elements_trains_with(strategy: dict[str, Any], tmp_path: Path) -> None:
    assert trained(tasks.NothingOfItsType, tmp_path, Shape(2), strategy=strategy, workers=2).digest


class Counts(torch.optim.Optimizer):
    """Writes to its groups in each step, which only servers do."""

    per_parameter = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "k": 0})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for one in group["params"]:
                if one.grad is not None:
                    one.data.add_(one.grad, alpha=-group["lr"] / group["k"])


class Counted(tasks.Regression):
    def optimizer(self, model: nn.Module) -> Any:
        return Counts(model.parameters())


def test_settings_that_an_optimizers_step_changes_are_those_of_servers(tmp_path: Path) -> None:
    assert not trained(Counted, tmp_path / "served", Shape(2, 2, 2), checkpoint={"every": 2}).failures
    served = trained(Counted, tmp_path / "served", Shape(2, 3), checkpoint={"every": 2}, steps=9)
    assert served.digest == trained(Counted, tmp_path / "ring", steps=9).digest


def test_who_joins_takes_up_the_settings_of_its_role() -> None:
    members = [(0, 5), (1, 0), (server_id(0), 0), (server_id(1), 5)]
    generation = Generation(
        GenerationId(0, 1),
        tuple(Member(one, "", range(0), cursor=Cursor(step), role=Role.of(one)) for one, step in members),
    )
    transfers = plan_transfers(generation, [{}, {}, {}, {0: 0}], [(server_id(1),)])
    assert {(each.donor, each.receivers) for each in transfers if not each.blocks} == {(0, (1,)), (3, (2,))}


def test_an_optimizer_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    failure = trained(tasks.NoisyOptimizer, tmp_path, strategy={"kind": "parameter-server"}).failure
    assert "is not one of torch's optimizers" in failure.message
    assert "per_parameter = True" in failure.message
