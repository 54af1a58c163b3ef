from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quorate.core.errors import TaskError
from quorate.replica.device import Device
from quorate.replica.footprint import Footprint, footprint
from quorate.spec.job import JobSpec
from quorate.task.task import Task

SPEC = JobSpec(task="task.py:Any", batch_size=8, steps=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attend(hidden, hidden, hidden, need_weights=False)
        changed: torch.Tensor = self.narrow(F.gelu(self.wide(self.norm(seen))))
        return hidden + changed


class Transformer(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(100, 64), *(Block() for _ in range(4)), nn.Linear(64, 100))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups)


class Images(Task):
    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Conv2d(w, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for w in (3, 16, 16)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def tokens(samples: int) -> torch.Tensor:
    return torch.arange(samples * 33).reshape(samples, 33) % 100


def images(samples: int) -> torch.Tensor:
    return torch.zeros(samples, 3, 32, 32)


def really_kept(task: Task, batch: Any, precision: str) -> int:
    """By torch itself: all that autograd is given to keep in a real forward pass, but for parameters and the batch."""
    model = task.model()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), batch)}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # so that no address is used twice
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Device(precision).autocast():
        loss = task.loss(model, batch)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of the real run, on processors without bfloat16
@pytest.mark.parametrize(
    ("task", "batch", "precision"),
    [
        (Transformer(), tokens, "bf16"),
        (Images(), images, "fp32"),
        pytest.param(Transformer(), tokens, "fp32", marks=pytest.mark.long),
        pytest.param(Images(), images, "bf16", marks=pytest.mark.long),
    ],
)
def test_what_is_kept_for_the_backward_pass_is_what_a_real_run_keeps(
    task: Task, batch: Callable[[int], Any], precision: str
) -> None:
    found = footprint(task, SPEC, batch(8), 8, precision=precision)
    assert found.notes == ()
    assert found.kept + found.weight_copies == pytest.approx(really_kept(task, batch(8), precision), rel=0.05)


def test_weights_gradients_and_optimizer_are_counted_exactly() -> None:
    model = Transformer().model()
    size = sum(parameter.nbytes for parameter in model.parameters())
    found = footprint(Transformer(), SPEC, tokens(8), 8)
    assert (found.weights, found.gradients) == (size, size)
    assert found.optimizer == 2 * size + 4 * len(list(model.parameters()))  # two moments, and a step count for each
    assert found.batch == 8 * 33 * 8
    assert found.has_blocks
    assert sum(part.parameters for part in found.modules) == sum(p.numel() for p in model.parameters())


@pytest.mark.long
def test_more_samples_need_more_and_blocks_that_are_computed_again_less() -> None:
    small, large = footprint(Transformer(), SPEC, tokens(8), 8), footprint(Transformer(), SPEC, tokens(16), 16)
    assert large.kept == pytest.approx(2 * small.kept, rel=0.01)
    again = footprint(Transformer(), SPEC, tokens(8), 8, checkpointed=True)
    assert again.kept < 0.6 * small.kept


def test_a_model_larger_than_any_memory_is_traced() -> None:
    class Huge(Transformer):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 10**11), nn.Linear(10**11, 100))

    assert footprint(Huge(), SPEC, tokens(8), 8).weights > 10**13


class Masked(Transformer):
    """Selects by content, which nothing without content can do."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch)
        return F.cross_entropy(scores[batch % 2 == 0], batch[batch % 2 == 0])


def test_what_cannot_be_traced_is_refused_with_what_to_leave_out() -> None:
    with pytest.raises(TaskError, match=r"cannot be traced without content \(DynamicOutputShape.* a mask that selects"):
        footprint(Masked(), SPEC, tokens(8), 8)


class Reading(Transformer):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.log("loss", loss.item())
        return loss


def test_a_number_that_is_read_is_guessed_and_said() -> None:
    plain, found = (footprint(task, SPEC, tokens(8), 8) for task in (Transformer(), Reading()))
    assert isinstance(found, Footprint)
    assert found.notes == ("loss() reads a number from a tensor; it was taken to be 1",)
    assert found.kept == plain.kept


class Wrong(Transformer):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).view(7).mean()
        return loss


def test_a_mistake_in_the_task_is_told_as_when_it_is_trained() -> None:
    with pytest.raises(Exception, match=r"in loss\(\)"):
        footprint(Wrong(), SPEC, tokens(8), 8)
