"""With parameter servers a job gives the digest of the ring, on any number of workers and servers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits.test_bits import CASES, Case, alone
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Role, server_id
from quorate.strategies.servers.align import plan_transfers

pytestmark = pytest.mark.usefixtures("unmeasured")

REFUSED = {tasks.NoisyOptimizer, tasks.AveragesInside}
"""Optimizers of which nobody can say that they update each parameter by itself: of one's own, or with hooks."""
SERVED = [number for number, case in enumerate(CASES) if case.task not in REFUSED and case.keys.get("threads", 1) == 1]

SHAPES = [(2, 2, 2), (2, 3, 2), (4, 3, 2)]
"""Workers, servers and replicas that are compared."""
LINKS = ["tcp", "AABB", "ABAB", "AABBC"]
SOME = [SERVED[1], SERVED[4], SERVED[12]]


def digest(case: Case, folder: Path, workers: int, servers: int = 0, replicas: int = 1, **keys: Any) -> str:
    return trained(case, folder, workers, servers, replicas, **keys).digest


def trained(case: Case, folder: Path, workers: int, servers: int = 0, replicas: int = 1, **keys: Any) -> gang.Ended:
    folder.mkdir()
    hosts = keys.pop("hosts", "")
    served = {"strategy": {"kind": "parameter-server", "servers": servers, "replicas": replicas}} if servers else {}
    spec = gang.job(case.task, **case.keys, **served, **keys)
    return gang.train(case.task, spec, workers, folder, hosts=hosts)


@pytest.mark.parametrize(
    ("number", "shape"),
    [
        # Every fourth case on one of the small ones by turns; the others, and on the others, among the long tests.
        pytest.param(number, shape, id=f"{CASES[number].name}-{shape}", marks=() if is_next else pytest.mark.long)
        for at, number in enumerate(SERVED)
        for shape, is_next in zip(SHAPES, (at % 8 == 0, at % 8 == 4, False), strict=True)
    ],
)
def test_servers_give_the_digest_of_the_ring(number: int, shape: tuple[int, int, int], tmp_path: Path) -> None:
    served, ring = trained(CASES[number], tmp_path / "served", *shape), alone(number)
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
    case = Case(ChannelsLast, {"lanes": 1, **keys})
    ring, served = trained(case, tmp_path / "ring", 1), trained(case, tmp_path / "served", 1, 2)
    assert (served.digest, served.norms) == (ring.digest, ring.norms)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("number", SOME, ids=lambda number: CASES[number].name)
def test_every_shape_gives_the_digest_of_the_ring(
    number: int, workers: int, servers: int, replicas: int, tmp_path: Path
) -> None:
    assert digest(CASES[number], tmp_path / "served", workers, servers, replicas) == alone(number).digest


@pytest.mark.parametrize(
    ("number", "hosts"),
    [
        # Every case and all links, but not each on each.
        pytest.param(number, hosts, id=f"{CASES[number].name}-{hosts}", marks=() if is_next else pytest.mark.long)
        for at, hosts in enumerate(LINKS)
        for number, is_next in zip(SOME, (at % 3 == 0, at % 3 == 1, at % 3 == 2), strict=True)
    ],
)
def test_over_other_links_the_digest_is_the_same(number: int, hosts: str, tmp_path: Path) -> None:
    servers = 3 if len(hosts) == 5 else 2
    links: dict[str, Any] = {"links": "tcp"} if hosts == "tcp" else {"hosts": hosts}
    # Buckets so small that most parameters have one of their own, and some share one.
    ring = alone(number, bucket_mb=0.0005).digest
    assert digest(CASES[number], tmp_path / "served", 2, servers, 2, bucket_mb=0.0005, **links) == ring


@pytest.mark.long
@pytest.mark.parametrize("number", [SERVED[2], SERVED[4], SERVED[-1]], ids=lambda number: CASES[number].name)
def test_a_job_changes_from_the_ring_to_servers_and_back(number: int, tmp_path: Path) -> None:
    """Saved by one and gone on with by the other, with all that optimizers and schedules keep."""
    case, whole = CASES[number], alone(number).digest
    folder = tmp_path / "changing"
    folder.mkdir()
    ring = gang.job(case.task, **case.keys)
    served = gang.job(case.task, **case.keys, strategy={"kind": "parameter-server", "servers": 2})
    first = gang.train(case.task, served, 2, folder, stop_at=2)
    assert (first.ending, first.progress["cursor"][0]) == ("interrupted", 2)
    second = gang.train(case.task, ring, 3, folder, stop_at=4)
    assert (second.ending, second.progress["cursor"][0]) == ("interrupted", 4)
    assert gang.train(case.task, served.model_copy(), 1, folder).digest == whole


def test_what_no_optimizer_updates_stays_as_it_is_on_more_servers_than_there_are_parameters(tmp_path: Path) -> None:
    case, folder = Case(tasks.WithoutOptimizer, {"clip_norm": 0.1}), tmp_path / "changing"
    ring = digest(case, tmp_path / "ring", 1)
    assert digest(case, tmp_path / "served", 2, 7, 2) == ring
    folder.mkdir()
    served = gang.job(case.task, **case.keys, strategy={"kind": "parameter-server", "servers": 7})
    assert gang.train(case.task, served, 1, folder, stop_at=2).ending == "interrupted"
    assert gang.train(case.task, gang.job(case.task, **case.keys), 2, folder).digest == ring


def test_a_bucket_without_elements_is_summed_in_shared_memory_as_elsewhere(tmp_path: Path) -> None:
    case = Case(tasks.NothingOfItsType)
    ring = digest(case, tmp_path / "ring", 1)
    assert digest(case, tmp_path / "shared", 2) == ring
    assert digest(case, tmp_path / "tcp", 3, links="tcp") == ring
    assert digest(case, tmp_path / "served", 2, 2, 2) == ring


@pytest.mark.parametrize("strategy", [{"kind": "ring", "compress": {"top_k": 0.5}}, {"kind": "ddp"}], ids=str)
def test_a_bucket_without_elements_trains_with(strategy: dict[str, Any], tmp_path: Path) -> None:
    spec = gang.job(tasks.NothingOfItsType, strategy=strategy, workers=2)
    assert gang.train(tasks.NothingOfItsType, spec, 2, tmp_path).digest


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
    case, folder = Case(Counted, {"checkpoint": {"every": 2}}), tmp_path / "served"
    assert not trained(case, folder, 2, 2, 2).failures
    served = gang.job(Counted, **case.keys, steps=9, strategy={"kind": "parameter-server", "servers": 3})
    ring = digest(case, tmp_path / "ring", 1, steps=9)
    assert gang.train(Counted, served, 2, folder).digest == ring


def test_who_joins_takes_up_the_settings_of_its_role() -> None:
    members = [(0, 5), (1, 0), (server_id(0), 0), (server_id(1), 5)]
    generation = Generation(
        GenerationId(0, 1),
        tuple(Member(one, "", range(0), cursor=Cursor(step), role=Role.of(one)) for one, step in members),
    )
    transfers = plan_transfers(generation, [{}, {}, {}, {0: 0}], [(server_id(1),)])
    assert {(each.donor, each.receivers) for each in transfers if not each.blocks} == {(0, (1,)), (3, (2,))}


def test_an_optimizer_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    spec = gang.job(tasks.NoisyOptimizer, strategy={"kind": "parameter-server"})
    failure = gang.train(tasks.NoisyOptimizer, spec, 1, tmp_path).failure
    assert "is not one of torch's optimizers" in failure.message
    assert "per_parameter = True" in failure.message
