"""Every byte of a replica is compared within a cycle, committed buffers at each step, and a majority names culprits."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gang
from quorate.core.errors import ReplicasDiffer
from quorate.replica.replica import Replica
from quorate.task.task import Task
from quorate.training.divergence import CYCLE, ReplicaDigests, Voucher, compare_replicas, divergence


class Odd(nn.Module):
    """Tensors of every kind: large and tiny, without dimensions, of other types, not contiguous, tied and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.brief = nn.Parameter(torch.linspace(1, 2, 7, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).add(1).t())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.tied = self.body[2].weight


class OddTask(Task):
    def model(self) -> nn.Module:
        return Odd()

    def datasets(self) -> Any:
        return torch.zeros(4, 1)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.1)


class Rebinding(torch.optim.Optimizer):
    """Puts a new tensor into its state at each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["mean"] = self.state[parameter].get("mean", torch.ones(5)) * 2


def trained(task: type[Task] = OddTask) -> Replica:
    replica = Replica(task(), gang.job(OddTask, average={"decay": 0.9}))
    for _, parameter in replica.parameters:
        parameter.grad = torch.ones_like(parameter)
    replica.optimizers.update()
    return replica


def copied(replica: Replica) -> Replica:
    """What somebody holds who has copied the state."""
    other = Replica(OddTask(), gang.job(OddTask, average={"decay": 0.9}))
    state = copy.deepcopy(replica.state())
    cloned = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state["tensors"].items()}
    other.load({**state, "tensors": cloned})
    return other


def cycle(replica: Replica, digests: ReplicaDigests | None = None) -> list[int]:
    digests = digests or ReplicaDigests(replica)
    return [digests.of_slice(step) for step in range(1, CYCLE + 1)]


def places(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, int]]:
    for name, tensor in state.items():
        for byte in range(0, tensor.numel() * tensor.element_size(), 13):
            yield name, byte


def test_equal_replicas_have_equal_digests_at_every_step() -> None:
    replica = trained()
    assert cycle(replica) == cycle(copied(replica))
    assert len(set(cycle(replica))) > CYCLE / 2, "each step has a slice of its own"


def test_a_change_of_any_byte_is_seen_within_a_cycle() -> None:
    replica = trained()
    digests = ReplicaDigests(replica)
    usual = cycle(replica, digests)
    seen = 0
    for name, byte in places(replica.state_tensors()):
        tensor = replica.state_tensors()[name].detach()
        raw = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy()
        raw[byte] ^= 1
        assert cycle(replica, digests) != usual, (name, byte)
        raw[byte] ^= 1
        seen += 1
    assert seen > 500
    assert cycle(replica, digests) == usual


def test_a_change_of_a_committed_buffer_is_seen_at_once() -> None:
    replica = trained()
    digests = ReplicaDigests(replica)
    usual = cycle(replica, digests)
    dict(replica.buffers.committed())["body.1.running_var"][3] += 1
    assert all(now != before for now, before in zip(cycle(replica, digests), usual, strict=True))


def test_state_that_an_optimizer_puts_elsewhere_is_followed() -> None:
    class RebindingTask(OddTask):
        def optimizer(self, model: nn.Module) -> Any:
            return Rebinding(model.parameters())

    replica = trained(RebindingTask)
    digests = ReplicaDigests(replica)
    before = [digests.of_slice(step) for step in range(1, CYCLE)]
    replica.optimizers.update()
    after = [digests.of_slice(step) for step in range(1, CYCLE)]
    assert before != after


def test_state_that_appears_is_compared_from_then_on() -> None:
    replica = Replica(OddTask(), gang.job(OddTask, average={"decay": 0.9}))
    digests = ReplicaDigests(replica)
    digests.of_slice(1)
    for _, parameter in replica.parameters:
        parameter.grad = torch.ones_like(parameter)
    replica.optimizers.update()
    expected = ReplicaDigests(replica)
    assert [digests.of_slice(step) for step in range(2, 66)] == [expected.of_slice(step) for step in range(2, 66)]


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32))
def test_the_fault_that_flips_a_bit_changes_one_value_and_is_found(seed: int) -> None:
    replica = trained()
    other = copied(replica)
    versions = replica.versions()
    flip_bit = pytest.importorskip("quorate.chaos.worker_hook").flip_bit
    told = flip_bit(replica.state_tensors(), random.Random(seed))
    assert "has been flipped" in told
    assert replica.versions() == versions, "bad memory tells nobody"
    assert cycle(replica) != cycle(other)
    found = divergence(9, [Voucher(i, ReplicaDigests(r).of_all()) for i, r in enumerate((replica, other, other))])
    assert found is not None


def vouchers(*states: str) -> list[Voucher]:
    return [Voucher(worker, {"w": "1", "x": state}) for worker, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "culprits", "text"),
    [
        ("aba", (1,), "worker 1 and workers 0, 2 hold different bits, first in 'x'; worker 1 is wrong"),
        ("ab", (), "worker 1 and worker 0 hold different bits, first in 'x'; nobody can say who is wrong"),
        ("aabb", (), "nobody can say who is wrong"),
        ("abc", (), "nobody can say who is wrong"),
        ("aaabc", (3, 4), "workers 3, 4 are wrong"),
    ],
)
def test_a_majority_names_the_culprits(states: str, culprits: tuple[int, ...], text: str) -> None:
    found = divergence(7, vouchers(*states))
    assert found is not None
    assert found.culprits == culprits
    assert text in found.message
    assert "after step 7" in found.message


def test_nobody_differs_from_those_who_vouch_for_nothing() -> None:
    assert divergence(7, vouchers("a", "a")) is None
    assert divergence(7, []) is None
    seen: list[bytes] = []

    def gather(own: bytes) -> list[bytes]:
        seen.append(own)
        return [b"", own]

    compare_replicas(7, vouchers("a")[0], gather)
    compare_replicas(7, None, lambda own: [own, seen[0]])
    with pytest.raises(ReplicasDiffer):
        compare_replicas(7, Voucher(1, {"w": "1", "x": "b"}), lambda own: [own, seen[0]])
