"""Attention that repeats its bits, by the fastest kernels that do.

With deterministic kernels torch computes attention's gradient by FlashAttention 2, whose ordered form is slow on newer
chips. cuDNN has a faster one that repeats, for which torch does not ask, but NVIDIA's package `nvidia-cudnn-frontend`
does. Where that is not installed, or does not serve what it is given, torch chooses as it does for everybody.
"""

from importlib import import_module
from importlib.metadata import version

import torch
from torch.nn.functional import scaled_dot_product_attention

PACKAGE = "nvidia-cudnn-frontend"
_OLDEST_CUDNN, _OLDEST_CHIP = 91500, (9, 0)
"""Older versions are wrong where a sequence's length is no multiple of 128; older chips have no ordered gradient."""
_WIDEST = 128
_by_cudnn = False
"""Found once, before anything is compiled: a compiler that meets the search itself stops there."""


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False, dropout: float = 0.0
) -> torch.Tensor:
    """Scaled dot-product attention over (batch, heads, length, width), like torch's function of that name.

    With `deterministic: true` it uses a faster deterministic kernel of cuDNN on GPUs that have one.
    """
    if _repeats_faster_by_cudnn(query, key, value, dropout, is_causal):
        scale = query.shape[-1] ** -0.5
        seen: torch.Tensor = torch.ops.cudnn.sdpa_fwd(query, key, value, scale, is_causal=is_causal, return_lse=True)[0]
        return seen
    return scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal)


def find_kernels() -> str:
    """Whose kernels compute attention that repeats, here and from now on: bits depend on it."""
    global _by_cudnn
    _by_cudnn = _has_cudnn()
    return f"{PACKAGE} {version(PACKAGE)}" if _by_cudnn else "torch"


def _has_cudnn() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _OLDEST_CHIP:
        return False
    if (torch.backends.cudnn.version() or 0) < _OLDEST_CUDNN:  # type: ignore[no-untyped-call]
        return False
    try:
        version(PACKAGE)
        import_module("cudnn.sdpa.fwd.torch_op")
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def _repeats_faster_by_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool
) -> bool:
    if not _by_cudnn or not query.is_cuda or dropout or not torch.are_deterministic_algorithms_enabled():
        return False
    if hasattr(query, "device_mesh"):  # cut across workers: torch's function is known to be of heads each by itself
        return False
    # Nothing in it is empty or broadcast, and a causal mask means one thing alone: for lengths that differ it has two.
    shape, others = query.shape, (key.shape, value.shape)
    if len(shape) != 4 or key.shape != value.shape or 0 in shape or 0 in key.shape:
        return False
    width, is_alike = shape[3], all(len(each) == 4 and each[:2] == shape[:2] and each[3] == shape[3] for each in others)
    is_alike = is_alike and query.dtype == key.dtype == value.dtype and (not is_causal or key.shape[2] == shape[2])
    return is_alike and query.dtype in (torch.bfloat16, torch.float16) and width <= _WIDEST and not width % 8
