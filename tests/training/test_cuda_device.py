"""What of a GPU's device can be seen without a GPU."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.errors import GpuLost, RunError
from quorate.training.batch_nest import mapped
from quorate.training.cuda_device import CudaDevice, count_differing, oldest_capability
from quorate.training.device import same_bits

TYPES = (torch.float32, torch.float64)
VALUES = (0.0, -0.0, 1.0, float("nan"), float("inf"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (0,), (3,), (2, 2)]), st.sampled_from([torch.float32, torch.float64]), st.randoms()
        ),
        min_size=1,
        max_size=6,
    )
)
def test_pairs_are_equal_to_the_last_bit_or_not(drawn: list[Any]) -> None:
    pairs = []
    for shape, dtype, random in drawn:
        count = torch.Size(shape).numel()
        left, right = (
            torch.tensor([random.choice(VALUES) for _ in range(count)], dtype=dtype).view(shape) for _ in range(2)
        )
        pairs.append((left, left.clone() if random.random() < 0.5 else right))
    found = [differing == 0 for differing in count_differing(pairs).tolist()]
    assert found == [same_bits(*pair) for pair in pairs]


class Named(NamedTuple):
    image: torch.Tensor
    label: int


@dataclass
class Sample:
    image: torch.Tensor
    name: str


def test_a_batch_is_moved_with_all_that_is_in_it() -> None:
    one = torch.ones(2)
    batch = {"a": [one, (one, "text")], "b": Named(one, 3), "c": Sample(one, "x"), "d": None}
    moved = mapped(batch, lambda tensor: tensor + 1)
    assert torch.equal(moved["a"][0], one + 1)
    assert torch.equal(moved["a"][1][0], one + 1)
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Named)
    assert torch.equal(moved["b"].image, one + 1)
    assert isinstance(moved["c"], Sample)
    assert torch.equal(moved["c"].image, one + 1)
    assert moved["d"] is None


@dataclass(frozen=True)
class Counted:
    image: torch.Tensor
    total: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.image.sum())


def test_a_batch_is_moved_whatever_its_types_are_made_of() -> None:
    one = torch.ones(2)
    batch = defaultdict(list, {"a": [one]}), Counted(one)
    named, counted = mapped(batch, lambda tensor: tensor + 1)
    assert torch.equal(named["a"][0], one + 1)
    assert named["b"] == []
    assert torch.equal(counted.image, one + 1)
    assert counted.total.item() == 3
    assert torch.equal(batch[0]["a"][0], one)
    assert torch.equal(batch[1].image, one)


def test_without_a_gpu_it_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RunError, match="this torch is built without CUDA"):
        CudaDevice()
    # It may have fallen off the bus: that costs this worker, and not the job.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(GpuLost, match="the driver does not answer torch"):
        CudaDevice()


def test_which_chips_are_too_old_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_120", "sm_75", "sm_90a", "compute_120", "gfx942"])
    assert oldest_capability() == (7, 5)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    assert oldest_capability() == (0, 0)
