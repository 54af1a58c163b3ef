"""quorate.attention computes what torch's function computes, by kernels that repeat where there are faster ones."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import quorate
from quorate.cuda import attention as module

SERVED: dict[str, Any] = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (2, 4, 197, 64)}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_by_cudnn", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_a_gpu_it_is_torchs_own_to_the_bit(is_causal: bool) -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    found = quorate.attention(query, key, value, is_causal=is_causal)
    assert torch.equal(found, scaled_dot_product_attention(query, key, value, is_causal=is_causal))
    assert module.find_kernels() == "torch"


def test_its_dropout_is_torchs_own() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    torch.manual_seed(3)
    found = quorate.attention(query, key, value, dropout=0.4)
    torch.manual_seed(3)
    assert torch.equal(found, scaled_dot_product_attention(query, key, value, dropout_p=0.4))


@pytest.mark.parametrize(
    ("query", "key", "dropout", "served"),
    [
        ({}, {}, 0.0, True),
        ({}, {}, 0.1, False),  # its numbers would be drawn on the host
        ({"is_cuda": False}, {}, 0.0, False),
        ({"dtype": torch.float32}, {"dtype": torch.float32}, 0.0, False),
        ({}, {"dtype": torch.float16}, 0.0, False),
        ({"shape": (2, 4, 197, 60)}, {"shape": (2, 4, 197, 60)}, 0.0, False),
        ({"shape": (2, 4, 197, 256)}, {"shape": (2, 4, 197, 256)}, 0.0, False),
        ({}, {"shape": (2, 2, 197, 64)}, 0.0, False),
        ({}, {"shape": (1, 4, 197, 64)}, 0.0, False),
        ({}, {"shape": (2, 4, 197, 32)}, 0.0, False),
        ({}, {"shape": (2, 4, 50, 64)}, 0.0, False),  # a causal mask is another one there
        ({"shape": (4, 197, 64)}, {"shape": (4, 197, 64)}, 0.0, False),
        ({"shape": (2, 4, 0, 64)}, {"shape": (2, 4, 0, 64)}, 0.0, False),
    ],
)
@pytest.mark.usefixtures("on_a_gpu")
def test_what_cudnn_does_not_serve_is_left_to_torch(
    query: dict[str, Any], key: dict[str, Any], dropout: float, served: bool
) -> None:
    left, right = (SimpleNamespace(**SERVED | changes) for changes in (query, key))
    given: Any = (left, right, right, dropout, True)
    assert module._repeats_faster_by_cudnn(*given) is served


@pytest.mark.usefixtures("on_a_gpu")
def test_bits_that_may_differ_are_left_to_torch() -> None:
    torch.use_deterministic_algorithms(False)
    given: Any = (*[SimpleNamespace(**SERVED)] * 3, 0.0, True)
    assert not module._repeats_faster_by_cudnn(*given)
