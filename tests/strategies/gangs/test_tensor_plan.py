"""How a model is cut across: what is recognised, what patterns may say, and which modules are gathered at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gpt2 import Gpt2
from quorate.core.errors import TaskError
from quorate.strategies.gangs.linear_flow import trace_flow
from quorate.strategies.gangs.option import FsdpSpec
from quorate.strategies.gangs.shard_units import units_of
from quorate.strategies.gangs.tensor_parallel import parallelize
from quorate.strategies.gangs.tensor_plan import TensorPlan, plan_tensors
from strategies.gangs.cut_models import (
    BY_HAND,
    HEADS,
    WIDTH,
    Gated,
    GatedBlock,
    Llama,
    Odd,
    Split,
    encoder,
    hidden,
    planned,
    tokens,
)


def plan(model: nn.Module, batch: torch.Tensor, tensor: int, patterns: Any = "auto") -> TensorPlan:
    return plan_tensors(model, patterns, tensor, trace_flow(model, lambda: model(batch)))


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_the_blocks_of_transformers_are_recognised_by_what_flows_through_them(name: str) -> None:
    _, _, found = planned(name, 2)
    assert found.rows() == (
        ("blocks.*.attend", "column, 3 maps in one"),
        ("blocks.*.merge", "row"),
        ("blocks.*.widen", "column"),
        ("blocks.*.narrow", "row"),
    )
    assert found.regions == ("blocks.0", "blocks.1")
    assert not found.notes


def test_separate_maps_are_columns_of_one_row() -> None:
    found = plan(Llama(), hidden(), 2)
    hows = dict(found.rows())
    assert {pattern for pattern, words in hows.items() if words == "column"} == {
        f"blocks.*.{name}" for name in ("q", "k", "v", "gate", "up")
    }
    assert {pattern for pattern, words in hows.items() if words == "row"} == {"blocks.*.o", "blocks.*.down"}


def test_attention_whose_heads_cannot_be_shared_stays_whole_and_the_rest_is_cut() -> None:
    found = plan(Llama(kv_heads=2), hidden(), 4)
    assert {pattern for pattern, _ in found.rows()} == {"blocks.*.gate", "blocks.*.up", "blocks.*.down"}
    assert found.notes[0] == (
        "blocks.*.o and what it reads stay whole: blocks.*.k has 2 heads, which 4 workers cannot share equally"
    )


def test_a_single_head_of_keys_is_not_cut() -> None:
    found = plan(Llama(kv_heads=1), hidden(), 2)
    assert {pattern for pattern, _ in found.rows()} == {"blocks.*.gate", "blocks.*.up", "blocks.*.down"}
    assert "blocks.*.k has 1 heads" in found.notes[0]


def test_what_is_split_within_its_heads_is_one_map() -> None:
    words = dict(plan(Odd(), hidden(), 2).rows())
    assert words == {f"blocks.*.{name}": "column" for name in ("attend", "frozen", "other", "widen")} | {
        f"blocks.*.{name}": "row" for name in ("merge", "add", "pool")
    }


def test_maps_of_one_weight_stay_whole_by_themselves() -> None:
    model = Gated()
    blocks = [block for block in model.blocks if isinstance(block, GatedBlock)]
    blocks[1].both.weight = blocks[0].both.weight
    found = plan(model, tokens(), 2)
    assert not found.cuts
    assert "blocks.*.both stays whole: it shares a weight with another module" in found.notes
    shared = nn.Parameter(torch.zeros(WIDTH))
    blocks[0].down.bias, blocks[1].down.bias = shared, shared
    with pytest.raises(TaskError, match=r"'blocks.0.down' and 'blocks.1.down' share a weight"):
        plan(model, tokens(), 2, {"blocks.0.down": "row"})


def test_maps_that_only_the_loss_calls_exchange_all_between_them() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    flow = trace_flow(model, lambda: model[1](model[0](hidden())))
    found = plan_tensors(model, {"0": "column", "1": "row"}, 2, flow)
    assert [cut.whole for cut in found.cuts] == [True, True]
    assert not found.regions


def test_torchs_encoder_keeps_its_attention_whole_and_says_so() -> None:
    found = plan(encoder(), hidden(), 2)
    assert found.rows() == (("layers.*.linear1", "column"), ("layers.*.linear2", "row"))
    assert any("layers.*.self_attn.out_proj stays whole" in note for note in found.notes)


def test_a_row_that_reads_what_flows_past_as_well_is_none() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            given: torch.Tensor = self.two(hidden + self.one(hidden))
            return given

    found = plan(nn.Sequential(Block(), Block()), hidden(), 2)
    assert not found.cuts
    assert len(found.notes) == 2


def test_a_model_without_blocks_is_not_cut() -> None:
    found = plan(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), hidden(), 2)
    assert not found.cuts
    assert found.notes == ("nothing is cut: Sequential repeats no blocks",)


def test_what_a_pattern_cuts_without_its_pair_is_gathered() -> None:
    found = plan(Split(), hidden(), 2, {"*.attend": "column", "blocks.0.network.3": "row"})
    assert found.rows() == (
        ("blocks.*.attention.attend", "column, output gathered"),
        ("blocks.*.network.3", "row, given the whole input"),
    )
    assert not found.regions


def test_the_first_pattern_that_matches_decides() -> None:
    found = plan(Gated(), tokens(), 2, {"blocks.0.*": "replicate", "*.both": "column", "*.down": "row"})
    assert [cut.module for cut in found.cuts] == ["blocks.1.both", "blocks.1.down"]


@pytest.mark.parametrize(
    ("patterns", "tensor", "message"),
    [
        ({"block.*": "column"}, 2, "'block.*' names no module of the model. Its modules: embed, blocks"),
        ({"blocks.*": "column"}, 2, "names 'blocks.0', a GatedBlock. What can be cut across is a Linear"),
        (
            {"embed": "row"},
            2,
            "'embed' and 'score' share a weight, which is cut along dimension 0 for the one and whole",
        ),
        ({"embed": "column", "score": "column"}, 2, "cut along dimension 1 for the one and cut along dimension 0"),
        ({"*.down": "row"}, 7, "'blocks.0.down' has 24 inputs, which strategy.tensor: 7 cannot share equally"),
        ({"*.both": "column"}, 5, "'blocks.0.both' has 48 outputs, which strategy.tensor: 5"),
    ],
)
def test_patterns_that_cannot_be_followed_are_refused(patterns: Any, tensor: int, message: str) -> None:
    with pytest.raises(TaskError) as raised:
        plan(Gated(), tokens(), tensor, patterns)
    assert message in str(raised.value)


def test_a_weight_that_somebody_else_reads_is_not_cut() -> None:
    with pytest.raises(TaskError, match="never called: another module reads its weight itself"):
        plan(encoder(), hidden(), 2, {"*.out_proj": "row"})

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, WIDTH)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.embed(tokens) @ self.embed.weight.T
            return scores

    with pytest.raises(TaskError, match="the weight of 'embed' is read outside of it"):
        plan(Reader(), tokens(), 2, {"embed": "row"})


@pytest.fixture
def one_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=HashStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_model_without_content_is_cut_as_well_and_ties_stay(one_of_two: None) -> None:
    with torch.device("meta"):
        model = Gated()
    found = plan_tensors(model, BY_HAND, 2, trace_flow(model, lambda: model(tokens().to("meta"))))
    parallelize(model, init_device_mesh("cpu", (2,)), found)
    assert model.score.weight is model.embed.weight
    weight = model.embed.weight
    assert isinstance(weight, DTensor)
    assert weight.shape == (40, WIDTH)
    assert weight.to_local().shape == (20, WIDTH)
    assert weight.to_local().is_meta


def test_a_mesh_of_another_size_is_refused(one_of_two: None) -> None:
    model, _, found = planned("gpt2", 4)
    with pytest.raises(ValueError, match="a plan for 4 workers"):
        parallelize(model, init_device_mesh("cpu", (2,)), found)


def test_what_differs_from_one_process_is_refused_where_tensors_are_cut(one_of_two: None) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.in_place = False

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            wide = self.one(hidden)
            if self.in_place:
                wide = torch.zeros_like(hidden).add_(wide)
            given: torch.Tensor = self.two(wide * torch.rand_like(wide))
            return given

    model = nn.Sequential(Noisy(), Noisy())
    found = plan(model, hidden(), 2)
    assert len(found.cuts) == 4
    parallelize(model, init_device_mesh("cpu", (2,)), found)
    with pytest.raises(TaskError, match=r"rand_like\(\) draws random numbers for a tensor that is cut"):
        model(hidden())
    first = model[0]
    assert isinstance(first, Noisy)
    first.in_place = True
    with pytest.raises(TaskError, match=r"add_\(\) writes what is cut across workers into a tensor that is not"):
        model(hidden())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda both: both.mul_(2), r"mul_\(\) changes in place what holds several maps"),
        (lambda both: F.alpha_dropout(both, 0.5, True), r"alpha_dropout\(\) draws random numbers"),
        (lambda both: F.rrelu(both, training=True), r"rrelu\(\) draws random numbers"),
    ],
)
def test_what_would_be_lost_or_drawn_otherwise_is_refused(one_of_two: None, change: Any, message: str) -> None:
    class Changed(GatedBlock):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            both = self.both(hidden)
            change(both)
            value, gate = both.chunk(2, dim=-1)
            given: torch.Tensor = hidden + self.down(value * gate)
            return given

    model = nn.Sequential(Changed(), Changed())
    parallelize(model, init_device_mesh("cpu", (2,)), plan(model, hidden(), 2))
    with pytest.raises(TaskError, match=message):
        model(hidden())


def test_units_are_the_repeated_blocks_or_what_patterns_name() -> None:
    model = Gpt2(40, 8, WIDTH, HEADS, 3)
    assert units_of(model, FsdpSpec(kind="fsdp")) == ("blocks.0", "blocks.1", "blocks.2")
    assert units_of(nn.Linear(2, 2), FsdpSpec(kind="fsdp")) == ()
    named = FsdpSpec(kind="fsdp", units=["blocks.[01]", "blocks.0.attend", "norm"])
    assert units_of(model, named) == ("blocks.0", "blocks.1", "norm")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*", "strategy.units: 'layers.*' names no module of the model"),
        ("score", "strategy.units: 'score' shares a parameter with 'embed', which is outside of it"),
    ],
)
def test_units_that_cannot_be_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(TaskError) as raised:
        units_of(Gpt2(40, 8, WIDTH, HEADS, 2), FsdpSpec(kind="fsdp", units=[pattern]))
    assert message in str(raised.value)


def test_blocks_that_share_a_parameter_are_no_units() -> None:
    model = Gpt2(40, 8, WIDTH, HEADS, 3)
    first, _, last = (block.get_submodule("attend") for block in model.blocks)
    first.weight = last.weight
    assert units_of(model, FsdpSpec(kind="fsdp")) == ("blocks.1",)
