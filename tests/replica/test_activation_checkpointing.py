"""Blocks that are computed again in the backward pass: the same bits, and nothing is changed twice."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import TaskError
from quorate.replica.activation_checkpointing import checkpoint_activations, repeated_blocks

pytestmark = pytest.mark.usefixtures("unmeasured")


class Block(nn.Module):
    """Everything that must not happen twice: statistics, a buffer that the result depends on, and three generators."""

    calls: torch.Tensor
    passes_of_all = 0

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.passes_of_all += 1
        self.calls += 1
        noise = random.random() + float(numpy.random.rand()) + torch.rand(())
        out: torch.Tensor = x + self.body(x) * self.calls * noise
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(tasks.FEATURES, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class TowerTask(tasks.Momentum):
    buffer_rules = {"*calls": "lane 0"}  # noqa: RUF012

    def model(self) -> nn.Module:
        return Tower()


@pytest.fixture(autouse=True)
def count() -> Iterator[None]:
    Block.passes_of_all = 0
    yield


def digest(folder: Path, workers: int, which: bool | str, **keys: Any) -> str:
    folder.mkdir()
    spec = gang.job(
        TowerTask,
        batch_size=32,
        accumulate=2,
        clip_norm=0.1,
        evaluate={"every": 3},
        memory={"checkpoint_activations": which},
        **keys,
    )
    return gang.train(TowerTask, spec, workers, folder).digest


@pytest.mark.long
def test_what_is_computed_again_changes_no_bit(tmp_path: Path) -> None:
    plain = digest(tmp_path / "plain", 1, False)
    assert digest(tmp_path / "one", 1, True) == plain
    assert digest(tmp_path / "two", 2, True, links="tcp") == plain
    assert digest(tmp_path / "named", 2, "blocks.[12]") == plain


def test_a_lone_lane_has_the_bits_of_one_without_it(tmp_path: Path) -> None:
    assert digest(tmp_path / "plain", 1, False, lanes=1) == digest(tmp_path / "again", 1, True, lanes=1)


def test_in_half_precision_too(tmp_path: Path) -> None:
    keys = {"device": "cpu", "precision": "bf16"}
    assert digest(tmp_path / "plain", 1, False, **keys) == digest(tmp_path / "again", 1, True, **keys)


def loss_of(model: nn.Module, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    inputs = torch.randn(16, tasks.FEATURES, generator=torch.Generator().manual_seed(5))
    out: torch.Tensor = model(inputs).square().mean()
    return out


def test_each_block_runs_a_second_time_and_leaves_its_buffers_alone() -> None:
    torch.manual_seed(0)
    model = Tower()
    held = [buffer for _, buffer in model.named_buffers()]
    assert checkpoint_activations(model, True) == ("blocks.0", "blocks.1", "blocks.2")
    loss = loss_of(model)
    before, states = [buffer.clone() for buffer in held], (random.getstate(), torch.get_rng_state())
    torch.autograd.backward(loss, retain_graph=True)
    assert Block.passes_of_all == 6
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    torch.autograd.backward(loss)
    assert Block.passes_of_all == 9
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True) if p.grad is not None)
    assert [id(buffer) for _, buffer in model.named_buffers()] == [id(buffer) for buffer in held]
    assert all(torch.equal(*pair) for pair in zip(held, before, strict=True))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_without_gradients_nothing_is_computed_again() -> None:
    model = Tower()
    checkpoint_activations(model, True)
    with torch.no_grad():
        loss_of(model)
    assert Block.passes_of_all == 3


@pytest.mark.long
def test_compiled_blocks_update_their_statistics_once() -> None:
    """By the compiler's own tracing and autograd, without its kernels, which take minutes to make on a CPU."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4)]
            self.blocks = nn.Sequential(nn.Sequential(*block), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.blocks(x)
            return out

    def trained(which: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Plain()
        if which:
            assert len(checkpoint_activations(model, True)) == 2
        model.compile(backend="aot_eager", dynamic=False)
        torch.autograd.backward(loss_of(model))
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {**gradients, **dict(model.named_buffers())}

    plain, again = trained(False), trained(True)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain), [
        name for name in plain if not torch.equal(plain[name], again[name])
    ]


def test_the_blocks_of_a_model_are_those_that_it_repeats() -> None:
    stages = [nn.Sequential(Block(), Block()) for _ in range(2)]
    assert repeated_blocks(nn.Sequential(nn.Linear(3, 3), *stages)) == ("1.0", "1.1", "2.0", "2.1")
    layer = nn.TransformerEncoderLayer(8, 2)
    assert repeated_blocks(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) == ("layers.0", "layers.1")


def test_a_model_without_blocks_is_told_so() -> None:
    with pytest.raises(TaskError, match="true looks for blocks that the model repeats, and Sequential has none"):
        checkpoint_activations(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), True)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("layers.*", "'layers.\\*' names no module of the model. Its modules: stem, blocks, blocks.0"),
        ("blocks", "names 'blocks', a ModuleList, which is never called itself. Name what it holds: \"blocks.\\*\""),
    ],
)
def test_a_pattern_that_names_nothing_to_compute_again_is_refused(pattern: str, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        checkpoint_activations(Tower(), pattern)
