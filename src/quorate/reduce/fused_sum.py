"""The sum of several tensors in one kernel: each term is read once, and the sum written once.

The additions are those of `add_up`, term after term, each rounded to the type of the sum, so the bits are the same.
That is not taken on trust: before it is used, it has to give the bits of torch for values that would show a difference.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from quorate.reduce.reduction import add_up

log = logging.getLogger(__name__)

AddUp = Callable[[Sequence[torch.Tensor], torch.Tensor], None]

FUSED_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_TERMS = 64
"""The loop over terms is unrolled, so each number of them is compiled anew; more than this is not worth it."""
_BLOCK = 1024
_PROBE = 4099


def choose_sum(device: torch.device) -> AddUp:
    """The fused sum where it works and is right, else torch's additions."""
    try:
        fused = fused_sum()
        wrong = [dtype for dtype in FUSED_TYPES if not _is_right(fused, device, dtype)]
    except Exception as error:  # no Triton, no compiler for it, no such GPU: torch goes on without it
        log.info("lanes are summed by one kernel for each addition: %s: %s", type(error).__name__, error)
        return _add_up
    if wrong:
        log.warning("lanes are summed by one kernel for each addition: a fused one has other bits in %s", wrong)
        return _add_up
    return fused


def fused_sum() -> AddUp:
    """A sum by a Triton kernel. ImportError where there is no Triton."""
    from quorate.reduce.sum_kernel import add_all

    def run(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        # For two terms torch has such a kernel.
        if not 2 < len(terms) <= MOST_TERMS or out.dtype not in FUSED_TYPES:
            _add_up(terms, out)
            return
        addresses = _table(tuple(term.data_ptr() for term in terms), out.device)
        blocks = -(-out.numel() // _BLOCK)
        add_all[(blocks,)](addresses, out, out.numel(), len(terms), out.dtype.itemsize < 4, _BLOCK)

    return run


@functools.lru_cache(maxsize=4096)  # the same in every step
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    add_up(terms[0], terms[1:], out)


def _is_right(fused: AddUp, device: torch.device, dtype: torch.dtype) -> bool:
    """Compared for values of all magnitudes, denormal ones among them, and zeros of both signs."""
    generator = torch.Generator().manual_seed(5)
    info = torch.finfo(dtype)
    exponents = torch.rand((5, _PROBE), generator=generator, dtype=torch.float64)
    lowest, highest = torch.log2(torch.tensor([info.smallest_normal, info.max], dtype=torch.float64)).tolist()
    values = torch.exp2(lowest - 8 + exponents * (highest - lowest))
    values *= torch.randint(-1, 2, values.shape, generator=generator)
    values[:, ::7] *= torch.exp2(lowest - torch.log2(values[:, ::7].abs().clamp_min(info.smallest_normal)))
    values[:, ::11] = -0.0
    terms = list(values.to(dtype).to(device))
    expected, given = torch.empty_like(terms[0]), torch.empty_like(terms[0])
    _add_up(terms, expected)
    fused(terms, given)
    return bool(torch.equal(expected.view(torch.uint8), given.view(torch.uint8)))
