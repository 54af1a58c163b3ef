"""Tensors cut at random: into boxes that a mesh may or may not have made."""

import math
from random import Random

import torch

from quorate.checkpoint.pieces import Box, Piece


def cut(box: Box, random: Random, most: int) -> list[Box]:
    """Into at most so many boxes, some of them empty, cut across again and again."""
    if most <= 1 or not box.size or random.random() < 0.1:
        return [box]
    dim = random.randrange(len(box.size))
    at = random.randint(0, box.size[dim])
    sizes = [(at, 0), (box.size[dim] - at, at)]
    halves = [
        Box(
            tuple(o + shift if d == dim else o for d, o in enumerate(box.offset)),
            tuple(size if d == dim else s for d, s in enumerate(box.size)),
        )
        for size, shift in sizes
    ]
    return [part for half in halves for part in cut(half, random, most // 2)]


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def piece(whole: torch.Tensor, box: Box) -> Piece:
    shape = tuple(whole.shape)
    return Piece(whole[box.within(Box.whole(shape))], shape, box.offset)
