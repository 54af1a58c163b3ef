"""What the workers of a step agree on: sums, means, requests, buffers, and what must not go on."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks
from plain_gradients import plain_gradients
from quorate.collectives import reduction
from quorate.core.errors import LossError, PeerLost, ReplicasDiffer, UnsupportedModelError
from quorate.core.generation import Member
from quorate.data.ledger import Tally
from quorate.replica.buffers import Buffers
from quorate.replica.device import CPU, Device, same_bits
from quorate.replica.losses import LossSum
from quorate.replica.settings import Settings
from quorate.strategies.agreement import NOTES_INDEX, StepAgreement, WorkerNote, pack, unpack
from quorate.strategies.ring import RingStrategy, StepParts
from quorate.task.task import Task
from quorate.training.activity import Activity
from quorate.training.divergence import ReplicaDigests
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, StepRequest
from quorate.training.update import Update
from replica.counting_device import CountingDevice, ReadsPast


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("exact", torch.zeros(2, 1, dtype=torch.float64))
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("free", torch.zeros(2))


RULES = {"mean": "mean", "exact": "mean", "first": "lane 0", "count": "mean"}


class NoUpdate:
    """Leaves the state as it is."""

    def apply(self, step: int, agreement: Agreement) -> Agreement:
        return agreement._replace(norms={"": float(step)})


class Alone:
    """A strategy on a ring of one worker that hosts three lanes."""

    def __init__(self, *, skips: bool = False, device: Device = CPU) -> None:
        model = Tables()
        own = Member(0, "here", range(3))
        self.ring = reduction.Alone()
        self.gradients = plain_gradients(list(model.named_parameters()), range(3), 25.0)
        parameters, digests = list(model.parameters()), cast(ReplicaDigests, None)
        buffers = Buffers(model, RULES, device)
        held = parameters, buffers, digests, Settings({}, {})
        agreement = StepAgreement(self.ring.gather, [own], own, *held, skips=skips)
        activity, update = Activity(lambda *_: None), cast(Update, NoUpdate())
        self.strategy = RingStrategy(StepParts(own, self.ring, self.gradients, agreement, update, activity))
        activity.begin_step(4)

    def advance(self, *results: LaneResult, stop: str | None = None) -> Agreement:
        outcome = self.strategy.advance(4, results, StepRequest(stop))
        assert outcome.norms == {"": 4.0}
        return outcome

    def agree(self, *buffers: dict[str, torch.Tensor], samples: tuple[int, ...] = (2, 1, 1)) -> dict[str, torch.Tensor]:
        results = [LaneResult(i, n, buffers=b) for i, (n, b) in enumerate(zip(samples, buffers, strict=True))]
        return self.advance(*results).buffers


def lane(number: int, samples: int = 1, loss: LossSum | None = None, **keys: Any) -> LaneResult:
    return LaneResult(number, samples, losses={"": loss or LossSum(1.0, samples)}, **keys)


def test_gradients_are_summed_and_notes_put_together() -> None:
    alone = Alone()
    for number in range(3):
        alone.gradients.lanes[number].buckets[0].fill_(10.0**number)
    agreed = alone.advance(
        lane(0, 2, LossSum(6.0, 2), present=0b01, log={"x": (2.0, 2)}, tally=Tally.of(0, (7, 3))),
        lane(1, 1, LossSum(1.0, 1), present=0b10, log={"x": (4.0, 1), "y": (5.0, 1)}, tally=Tally.of(0, (5,))),
        lane(2, 1, LossSum(5.0, 1), present=0b10, log={"x": (2.0, 1)}),
        stop="terminated",
    )
    assert alone.strategy.hosted == range(3)
    assert alone.gradients.total.buckets[0].tolist() == [111.0] * 3
    assert (agreed.samples, agreed.present, agreed.request.stop) == (4, 0b11, "terminated")
    assert agreed.tally == Tally.of(0, (3, 5, 7))
    assert agreed.losses[""].mean == 3.0
    assert agreed.log == {"x": 2.0, "y": 5.0}
    assert alone.strategy.gather(4, b"word") == (b"word",)
    alone.strategy.close()


def test_nobody_asked_to_stop() -> None:
    assert Alone().advance(lane(0), lane(1), lane(2)).request == StepRequest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_step(value: float) -> None:
    alone = Alone()
    with pytest.raises(LossError, match=rf"loss is not finite \({value}\) at step 4 in lane 1"):
        alone.advance(lane(0), lane(1, loss=LossSum(value, 1)), lane(2))


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan])
def test_a_count_that_cannot_divide_ends_the_step(count: float) -> None:
    nothing = {"make": LossSum(0.0, count, per_item=True)}
    with pytest.raises(LossError, match=r"loss 'make' has a count of .* at step 4"):
        Alone().advance(LaneResult(0, 1, losses=nothing))


def test_a_lane_in_which_nothing_counts_is_fine_beside_one_in_which_something_does() -> None:
    parts = (LossSum(0.0, 0.0, True), LossSum(6.0, 3.0, True), LossSum(0.0, 0.0, True))
    agreed = Alone().advance(*(lane(i, loss=part) for i, part in enumerate(parts)))
    assert (agreed.losses[""].mean, agreed.losses[""].per_item) == (2.0, True)


def test_a_step_without_a_sample_in_any_lane_is_void() -> None:
    agreed = Alone().advance(*(LaneResult(i, 0, bad=(i,), why=((i, "torn"),)) for i in range(3)), stop="terminated")
    assert agreed.is_void
    assert (agreed.samples, agreed.losses, agreed.buffers, agreed.request.stop) == (0, {}, {}, "terminated")
    assert agreed.bad == (0, 1, 2)
    assert agreed.why == ((0, "torn"), (1, "torn"), (2, "torn"))


@pytest.mark.parametrize("total", [1.0, math.nan])
def test_a_step_tells_how_long_it_has_waited_for_data_also_if_it_is_void(total: float) -> None:
    alone = Alone(skips=True)
    agreed = alone.advance(*(lane(i, loss=LossSum(total, 1), data_s=0.25) for i in range(3)))
    assert agreed.is_void is math.isnan(total)
    assert agreed.data_s == 0.75


def test_whether_the_weights_are_to_blame_is_read_from_the_device_in_one_go() -> None:
    device = CountingDevice()
    alone = Alone(skips=True, device=device)
    with ReadsPast(device):
        assert alone.advance(*(lane(i, loss=LossSum(math.nan, 1)) for i in range(3))).is_void
    assert device.counts["numbers"] == 1


class TestBuffers:
    def test_a_change_that_is_equal_in_all_lanes_is_taken_as_it_is(self) -> None:
        value = torch.tensor([0.1, -0.0])
        agreed = Alone().agree(*({"mean": value.clone(), "free": value.clone()} for _ in range(3)))
        assert set(agreed) == {"mean", "free"}
        assert all(same_bits(agreed[name], value) for name in agreed)

    def test_means_are_weighted_by_samples_and_count_lanes_that_changed_nothing(self) -> None:
        agreed = Alone().agree(
            {"mean": torch.tensor([4.0, 0.0]), "exact": torch.ones(2, 1, dtype=torch.float64)},
            {"mean": torch.tensor([8.0, 4.0])},
            {"mean": torch.tensor([0.0, 0.0])},
        )
        assert agreed["mean"].tolist() == [4.0, 1.0]
        assert agreed["exact"].tolist() == [[0.5], [0.5]]
        assert agreed["exact"].dtype is torch.float64

    def test_a_lane_without_samples_has_no_say(self) -> None:
        value = {"mean": torch.tensor([4.0, 2.0]), "free": torch.tensor([1.0, 1.0])}
        agreed = Alone().agree(dict(value), dict(value), {}, samples=(2, 2, 0))
        assert same_bits(agreed["mean"], value["mean"])
        assert same_bits(agreed["free"], value["free"])

    def test_lane_0_decides_where_the_rule_says_so(self) -> None:
        agreed = Alone().agree(
            {"first": torch.tensor([1.0, 2.0])}, {"first": torch.tensor([3.0, 4.0])}, {"first": torch.zeros(2) + 9}
        )
        assert agreed["first"].tolist() == [1.0, 2.0]

    def test_lane_0_decides_also_that_nothing_changed(self) -> None:
        agreed = Alone().agree({}, {"first": torch.tensor([3.0, 4.0])}, {})
        assert agreed["first"].tolist() == [0.0, 0.0]

    def test_where_lane_0_has_no_samples_the_first_lane_that_has_some_decides(self) -> None:
        agreed = Alone().agree(
            {}, {"first": torch.tensor([3.0, 4.0])}, {"first": torch.tensor([5.0, 6.0])}, samples=(0, 2, 1)
        )
        assert agreed["first"].tolist() == [3.0, 4.0]

    def test_what_is_equal_in_all_lanes_with_samples_is_taken_also_where_the_first_has_none(self) -> None:
        value = {"free": torch.tensor([1.0, -0.0])}
        agreed = Alone().agree({}, dict(value), dict(value), samples=(0, 2, 1))
        assert same_bits(agreed["free"], value["free"])

    def test_without_a_rule_a_difference_is_refused_with_the_rules_to_choose_from(self) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"Buffer 'free'.*step 4.*\{\"free\": \"mean\"\} or .*\"lane 0\""
        ):
            Alone().agree({"free": torch.ones(2)}, {}, {})

    def test_whole_numbers_have_no_mean(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"'count' is of type torch\.int64, which has no mean"):
            Alone().agree({"count": torch.tensor(1)}, {}, {})


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3), torch.zeros(0), torch.rand(2, 3).bfloat16(), torch.rand(3, 2).t(), torch.tensor([True, False])],
    ids=["scalar", "empty", "bfloat16", "transposed", "bool"],
)
def test_buffers_of_any_kind_survive_the_journey(value: torch.Tensor) -> None:
    values = {"before": torch.tensor([1.5]), "é.b": value, "after": torch.tensor([-0.0])}
    by_lane = unpack(pack({3: values, 4: {}}))
    again = by_lane[3]
    assert by_lane[4] == {}
    assert list(again) == list(values)
    assert all(same_bits(again[name], values[name]) for name in values)


class LastLaneOnly(bit_tasks.Regression):
    """A table that each lane makes of its own data; most of the last batch's lanes are empty."""

    learning_rate: float = 1e-8
    buffer_rules: ClassVar[Mapping[str, str]] = {"tab*": "lane 0"}

    def model(self) -> nn.Module:
        return bit_tasks._Remembers()


class Averaged(LastLaneOnly):
    buffer_rules: ClassVar[Mapping[str, str]] = {"*": "mean"}


@pytest.mark.parametrize("task", [pytest.param(LastLaneOnly, marks=pytest.mark.long), Averaged])
def test_workers_without_samples_commit_the_same_buffers(task: type[Task], tmp_path: Path) -> None:
    """50 samples in batches of 16: the last one has two, for four lanes."""
    digests = {}
    for workers in (1, 3, 4):
        folder = tmp_path / str(workers)
        folder.mkdir()
        spec = gang.job(task, batch_size=16, epochs=1, last_batch="keep")
        digests[workers] = gang.train(task, spec, workers, folder).digest
    assert len(set(digests.values())) == 1, digests


def test_closing_lets_the_parameters_go() -> None:
    alone = Alone()
    alone.gradients.announce(lambda _: None)
    alone.strategy.close()
    (weight,) = alone.gradients.parameters
    weight.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None, "with its hook it would have been refused: no backward pass of ours"


class Torn:
    """Links on which the others' slice differs, and which break or go on when all of the state is compared."""

    def __init__(self, whole: dict[str, str] | None) -> None:
        self._whole = whole

    def all_reduce(self, *_: Any) -> None:
        pass

    def broadcast(self, *_: Any) -> None:
        pass

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        if index == NOTES_INDEX:
            note = WorkerNote.decode(payload)
            return payload, replace(note, state=(note.state or 0) + 1).encode(), payload
        if self._whole is None:
            raise PeerLost("worker 1", "end of file")
        other = json.dumps({"worker": 1, "digests": self._whole}).encode()
        return payload, other, payload


class Known:
    """The digests of a replica, as they are said to be."""

    def of_slice(self, step: int) -> int:
        return step

    def of_all(self) -> dict[str, str]:
        return {"w": "1"}


def agreed_with(others: Torn) -> Agreement:
    model = Tables()
    members = tuple(Member(worker, "here", range(worker, worker + 1)) for worker in range(3))
    digests = cast(ReplicaDigests, Known())
    held = list(model.parameters()), Buffers(model, RULES), digests, Settings({}, {})
    agreement = StepAgreement(others.gather, members, members[0], *held, skips=True)
    return agreement.reach(4, [lane(0)], StepRequest())


def test_that_replicas_differ_is_known_also_if_the_culprit_dies_before_it_says_where() -> None:
    with pytest.raises(ReplicasDiffer, match=r"after step 3: worker 1 and workers 0, 2 .* worker 1 is wrong") as raised:
        agreed_with(Torn(None))
    assert raised.value.culprits == (1,)


def test_replicas_that_differ_are_told_with_the_tensor() -> None:
    with pytest.raises(ReplicasDiffer, match="first in 'w'"):
        agreed_with(Torn({"w": "2"}))


def test_a_digest_that_was_read_wrongly_is_told_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert agreed_with(Torn({"w": "1"})).samples == 3
    assert "one of them was read wrongly" in caplog.text
