"""Buffers that lie together on a device: what lanes agree on there has the bits of the agreement on the host."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quorate.core.errors import UnsupportedModelError
from quorate.core.generation import Member
from quorate.replica.buffers import Buffers
from quorate.replica.device import CPU, Device, same_bits
from quorate.replica.losses import LossSum
from quorate.replica.settings import Settings
from quorate.strategies.agreement import StepAgreement
from quorate.training.divergence import ReplicaDigests
from quorate.training.lane import LaneResult
from quorate.training.strategy import NOTHING_ASKED
from replica.away_device import AwayDevice

RULES = {"mean": "mean", "wide": "mean", "exact": "mean", "first": "lane 0"}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        generator = torch.Generator().manual_seed(2)
        for name, size in (("wide", 33), ("mean", 3), ("first", 5), ("free", 2)):
            self.register_buffer(name, torch.randn(size, generator=generator))
        self.register_buffer("exact", torch.randn(2, 2, generator=generator).double())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 4))


def buffers_of(device: Device) -> tuple[Tables, Buffers]:
    model = Tables()
    return model, Buffers(model, RULES, device)


def change(model: nn.Module, names: Any, seed: int) -> None:
    """The same seed leaves the same in every lane."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(names):
        value = model.get_buffer(name)
        value.copy_(torch.rand(value.shape, generator=generator) * 10)


def agreed_on_host(results: list[LaneResult], buffers: Buffers) -> dict[str, torch.Tensor]:
    own = Member(0, "here", range(len(results)))
    agreement = StepAgreement(
        lambda *_: (), [own], own, [], buffers, cast(ReplicaDigests, None), Settings({}, {}), skips=False
    )
    return agreement.reach(4, results, NOTHING_ASKED).buffers


LANES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sets(st.sampled_from(["wide", "mean", "first", "exact", "free", "count", "mask"])),
        st.integers(0, 1),
    ),
    min_size=2,
    max_size=5,
).filter(lambda lanes: any(samples for samples, _, _ in lanes))


@given(LANES)
def test_lanes_agree_on_the_device_to_the_bits_of_the_host(lanes: list[tuple[int, set[str], int]]) -> None:
    home_model, home = buffers_of(CPU)
    away_model, away = buffers_of(AwayDevice())
    assert away.flat is not None and home.flat is None
    results, taken = [], []
    for number, (samples, names, seed) in enumerate(lanes):
        result = LaneResult(number, samples, losses={"": LossSum(1.0 * samples, samples)} if samples else {})
        if samples:
            for model, buffers in ((home_model, home), (away_model, away)):
                buffers.restore()
                change(model, names, seed)
            result.buffers = home.take_changes()
            taken.append((samples, away.take()))
            assert taken[-1][1] is not None
            changes = away.changes_in(taken[-1][1])
            assert changes.keys() == result.buffers.keys()
        else:
            taken.append((0, None))
        results.append(result)
    values, flags = away.flat.agree(taken)
    refused = away.flat.refused([float(flag) for flag in flags])
    try:
        home.commit(agreed_on_host(results, home))
    except UnsupportedModelError as error:
        assert refused is not None and f"'{refused}'" in str(error)
        return
    assert refused is None
    away.flat.commit_unless(torch.tensor(False), values)
    for name, value in home.committed():
        assert same_bits(value, away.get(name)), name


def test_what_a_void_step_has_made_of_them_is_not_committed() -> None:
    model, buffers = buffers_of(AwayDevice())
    assert buffers.flat is not None
    before = {name: value.clone() for name, value in buffers.committed()}
    change(model, ["mean", "count"], 1)
    taken = buffers.take()
    assert taken is not None
    values, _ = buffers.flat.agree([(1, taken)])
    buffers.flat.commit_unless(torch.tensor(True), values)
    buffers.restore()
    for name, value in before.items():
        assert same_bits(buffers.get(name), value) and same_bits(model.get_buffer(name), value)


def test_each_begins_where_kernels_like_it_and_has_a_storage_of_its_own() -> None:
    model, buffers = buffers_of(AwayDevice())
    assert buffers.flat is not None
    homes = [buffer for buffer in model.buffers() if buffer.numel()]
    base = min(home.data_ptr() for home in homes if home.dtype is torch.float32)
    assert all((home.data_ptr() - base) % 64 == 0 for home in homes if home.dtype is torch.float32)
    assert len({home.untyped_storage().data_ptr() for home in homes}) == len(homes)


def test_a_buffer_that_is_assigned_is_taken_by_itself_and_given_back_its_place() -> None:
    model, buffers = buffers_of(AwayDevice())
    home = model.get_buffer("mean")
    model.mean = torch.ones(3)
    assert buffers.take() is None
    assert set(buffers.take_changes()) == {"mean"}
    buffers.restore()
    assert model.get_buffer("mean") is home
    assert buffers.take() is not None


def test_one_of_another_shape_ends_it() -> None:
    model, buffers = buffers_of(AwayDevice())
    buffers.commit({"free": torch.ones(7)})
    assert buffers.flat is None and buffers.take() is None
    change(model, ["free"], 1)
    assert set(buffers.take_changes()) == {"free"}
    buffers.restore()
    assert model.get_buffer("free").tolist() == [1.0] * 7


def test_memory_of_ones_own_ends_it() -> None:
    model, buffers = buffers_of(AwayDevice())
    model.get_buffer("free").data = torch.full((2,), 5.0)
    assert buffers.take() is None and buffers.flat is None
    assert set(buffers.take_changes()) == {"free"}


@pytest.mark.parametrize("odd", [torch.zeros(3, 2).t(), torch.zeros(2).expand(3, 2), torch.ones(2).to_sparse()])
def test_odd_ones_are_left_where_they_are(odd: torch.Tensor) -> None:
    model = Tables()
    model.register_buffer("odd", odd)
    assert Buffers(model, {}, AwayDevice()).flat is None
