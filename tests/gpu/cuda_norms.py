"""Norms in the order in which CUDA adds them up: which one it is depends on where a tensor lies."""

from collections.abc import Sequence

import torch

_THREADS, _AT_ONCE, _CHUNK = 512, 4, 65536


def foreach_norm(tensors: Sequence[torch.Tensor], ord: float = 2.0) -> list[torch.Tensor]:
    """What `torch._foreach_norm` gives there, of two."""
    assert ord == 2.0
    return [_norm(one) for one in tensors]


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    sums = [_sum_of_squares(flat[begin : begin + _CHUNK]) for begin in range(0, flat.numel(), _CHUNK)]
    return _halved(torch.stack(sums)).sqrt()


def _sum_of_squares(chunk: torch.Tensor) -> torch.Tensor:
    # Each thread reads what lies side by side, if that can be read at once.
    is_read_at_once = chunk.numel() % _AT_ONCE == 0 and chunk.data_ptr() % (_AT_ONCE * chunk.itemsize) == 0
    squares = torch.zeros(-(-chunk.numel() // (_THREADS * _AT_ONCE)) * _THREADS * _AT_ONCE, dtype=chunk.dtype)
    squares[: chunk.numel()] = chunk.square()
    if is_read_at_once:
        rounds = squares.view(-1, _THREADS, _AT_ONCE)
    else:
        rounds = squares.view(-1, _AT_ONCE, _THREADS).transpose(1, 2)
    by_thread = _in_turn(rounds)
    return _halved(_in_turn(by_thread.transpose(0, 1)))


def _in_turn(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def _halved(terms: torch.Tensor) -> torch.Tensor:
    while terms.numel() > 1:
        if terms.numel() % 2:
            terms = torch.cat([terms, terms.new_zeros(1)])
        half = terms.numel() // 2
        terms = terms[:half] + terms[half:]
    return terms[0]
