"""Each lane starts from the committed buffers, whatever the lane before it did to the model."""

from typing import Any

import pytest
import torch
from torch import nn

from quorate.core.errors import TaskError, UnsupportedModelError
from quorate.lanes.buckets import LANE_0, MEAN
from quorate.replica.buffers import Buffers


class Holder(nn.Module):
    table: torch.Tensor
    count: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.tensor([1.0, -0.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_nothing_has_changed_at_first() -> None:
    model = Holder()
    buffers = Buffers(model, {})
    assert buffers.take_changes() == {}
    assert {name for name, _ in buffers.committed()} == {
        "table",
        "count",
        "scratch",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_batch_norm_changes_are_seen_by_their_bits() -> None:
    model = Holder()
    buffers = Buffers(model, {})
    model.norm(torch.randn(4, 2))
    assert set(buffers.take_changes()) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    buffers.restore()
    assert buffers.take_changes() == {}
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.tolist() == [0.0, 0.0]


def test_a_changed_sign_of_zero_is_a_change() -> None:
    model = Holder()
    buffers = Buffers(model, {})
    model.table.abs_()
    assert set(buffers.take_changes()) == {"table"}


def test_writing_the_same_value_is_no_change() -> None:
    model = Holder()
    buffers = Buffers(model, {})
    model.count.add_(0)
    model.table = model.table.clone()
    assert buffers.take_changes() == {}


def reassign(model: Holder) -> None:
    model.table = torch.tensor([5.0, 6.0])


def reshape(model: Holder) -> None:
    model.table = torch.zeros(7)


def retype(model: Holder) -> None:
    model.table = model.table.double()


def write(model: Holder) -> None:
    model.table.fill_(5)


def drop(model: Holder) -> None:
    model._buffers["table"] = None


@pytest.mark.parametrize("act", [reassign, reshape, retype, write, drop])
def test_the_next_lane_finds_the_committed_value_in_its_old_place(act: Any) -> None:
    """Otherwise what a lane reads would depend on which lanes its worker hosts."""
    model = Holder()
    home = model.table
    buffers = Buffers(model, {})
    act(model)
    buffers.restore()
    assert model.table is home
    assert model.table.tolist() == [1.0, -0.0]
    assert torch.signbit(model.table[1])


def test_a_buffer_that_was_empty_may_not_be_filled_while_training() -> None:
    """The next lane would find it filled if the same worker hosts it, and empty otherwise."""
    model = nn.Sequential(Holder())
    model[0].register_buffer("cache", None)
    buffers = Buffers(model, {})
    assert buffers.take_changes() == {}
    model[0]._buffers["cache"] = torch.ones(3)
    with pytest.raises(UnsupportedModelError, match=r"Buffer '0\.cache' was None.*Give it a tensor in model\(\)"):
        buffers.take_changes()


def test_what_is_taken_does_not_change_with_the_model() -> None:
    model = Holder()
    buffers = Buffers(model, {})
    model.table.fill_(5)
    taken = buffers.take_changes()["table"]
    buffers.restore()
    assert taken.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("value", [torch.tensor([8.0, 9.0]), torch.zeros(7), torch.zeros(2, dtype=torch.float64)])
def test_committed_values_are_in_the_model_and_stay(value: torch.Tensor) -> None:
    model = Holder()
    buffers = Buffers(model, {})
    model.table = torch.tensor([5.0, 6.0])
    model.count.fill_(9)
    buffers.commit({"table": value})
    assert torch.equal(model.table, value)
    assert torch.equal(buffers.get("table"), value)
    buffers.restore()
    assert model.count.item() == 3, "what was not agreed on goes back before the next lane"
    assert buffers.take_changes() == {}
    model.table.fill_(77)
    assert torch.equal(buffers.get("table"), value), "the committed value is not the one that lanes write to"
    buffers.restore()
    assert torch.equal(model.table, value)


def test_batch_norm_has_its_rules_by_itself() -> None:
    rules = Buffers(Holder(), {}).rules
    assert rules["norm.running_mean"] == rules["norm.running_var"] == MEAN
    assert rules["norm.num_batches_tracked"] == LANE_0
    assert "table" not in rules


def test_rules_by_name_and_by_pattern() -> None:
    rules = Buffers(Holder(), {"*": MEAN, "tab*": LANE_0, "norm.running_mean": LANE_0}).rules
    assert rules["scratch"] == MEAN
    assert rules["table"] == rules["norm.running_mean"] == LANE_0
    assert rules["norm.running_var"] == MEAN


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(TaskError, match=r"'table' has the rule 'max'; the rules are \"mean\" and \"lane 0\""):
        Buffers(Holder(), {"table": "max"})


def test_a_rule_for_no_buffer_is_refused_with_the_buffers_there_are() -> None:
    with pytest.raises(TaskError, match=r"'tabel' names no buffer.*norm\.running_mean"):
        Buffers(Holder(), {"tabel": MEAN})
    with pytest.raises(TaskError, match="Its buffers: none"):
        Buffers(nn.Linear(1, 1), {"*": MEAN})
