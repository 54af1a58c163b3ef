"""PowerSGD against torch's own hook, with the same gradients and the same beginning."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from quorate.strategies.gangs.power_sgd import PowerSgd, PowerSgdSums, orthonormal

SHAPES = [(12, 10), (7,), (4, 3, 2), (8, 5, 3)]
RANK = 2
STEPS = 6


class Bucket:
    """All gradients in one buffer."""

    def __init__(self, parameters: list[nn.Parameter], flat: torch.Tensor) -> None:
        self._parameters = parameters
        self._flat = flat

    def buffer(self) -> torch.Tensor:
        return self._flat

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        pieces = torch.split(self._flat, [parameter.numel() for parameter in self._parameters])
        return [piece.view(one.shape) for piece, one in zip(pieces, self._parameters, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Kept:
    """What is held back, in dictionaries."""

    def __init__(self) -> None:
        self.before: dict[int, torch.Tensor] = {}
        self.after: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self.before, self.after = self.before | self.after, {}

    def held(self, index: int) -> torch.Tensor | None:
        return self.before.get(index)

    def hold(self, index: int, rest: torch.Tensor) -> None:
        self.after[index] = rest.reshape(-1)

    def seal(self, step: int) -> None:
        pass


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


def gradients(step: int) -> torch.Tensor:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    return torch.randn(numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def made_by_torch(parameters: list[nn.Parameter], state: PowerSgd, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of a group of one, whose sums are there at once."""

    def all_reduce(tensor: torch.Tensor, **_: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group: Any = SimpleNamespace(size=lambda: 1)
    theirs = torchs.PowerSGDState(group, RANK, start_powerSGD_iter=2)
    theirs.iter = 2
    first = [state.factor(index, parameters[index]) for index in state.narrowed]
    theirs.q_memory_dict[0] = torch.cat([factor.reshape(-1) for factor in first])
    theirs.p_memory_dict[0] = torch.empty(sum((12 if index == 0 else 8) * RANK for index in state.narrowed)).double()
    found = []
    for step in range(STEPS):
        bucket: Any = Bucket(parameters, gradients(step))
        found.append(torchs.powerSGD_hook(theirs, bucket).wait().clone())
    return found


def test_it_is_what_torchs_hook_makes_of_the_same_gradients(
    parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = PowerSgd(parameters, RANK, 0, seed=7)
    assert state.narrowed == (0, 3), "the others are no matrices, or would hardly be smaller"
    expected = made_by_torch(parameters, state, monkeypatch)
    group: Any = SimpleNamespace(begin_sum=lambda _: None, wait=lambda: None)
    sums = PowerSgdSums(state, parameters, group, Kept())
    for step in range(STEPS):
        bucket: Any = Bucket(parameters, gradients(step))
        sums.begin_step(step + 1)
        sums.begin(bucket)
        sums.finish()
        assert state.commit()
        torch.testing.assert_close(bucket.buffer(), expected[step], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(bucket.buffer(), gradients(step))


def test_a_gradient_of_zeros_has_orthonormal_columns_too() -> None:
    for columns in (torch.zeros(5, 2), torch.ones(5, 2).bfloat16()):
        found = orthonormal(columns)
        assert found.dtype == columns.dtype
        torch.testing.assert_close(found.float().t() @ found.float(), torch.eye(2), rtol=0, atol=1e-2)
