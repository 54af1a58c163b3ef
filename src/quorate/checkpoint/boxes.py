"""Where pieces of a tensor lie in the whole: boxes, how they meet, and whether they are the whole without gap or
overlap."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.core.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in each dimension. It may be empty."""

    offset: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Iterable[int]) -> "Box":
        """All of a tensor of this shape."""
        size = tuple(shape)
        return cls((0,) * len(size), size)

    @property
    def volume(self) -> int:
        return math.prod(self.size)

    @property
    def stop(self) -> Shape:
        return tuple(begin + size for begin, size in zip(self.offset, self.size, strict=True))

    def meet(self, other: "Box") -> "Box":
        """What both have."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = map(min, self.stop, other.stop)
        return Box(begins, tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where it lies in the values of a box that contains it."""
        starts = (begin - first for begin, first in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(self.offset, self.stop, strict=True)) + "]"


Boxes = Callable[[tuple[Any, ...], Shape], Box | None]
"""Which part of a tensor of the state a reader wants, by its place in the tree and its shape; None for all of it."""


def check_cover(name: str, shape: Shape, boxes: Sequence[Box], wanted: Box | None = None) -> None:
    """Raise `CheckpointError` unless these boxes of a tensor are disjoint and cover what is wanted: all, by default."""
    whole = Box.whole(shape)
    for box in boxes:
        if not len(box.offset) == len(box.size) == len(shape) or min((0, *box.offset, *box.size)) < 0:
            raise CheckpointError(
                f"tensor {name!r} has a piece at {list(box.offset)} of shape {list(box.size)}, which does not fit "
                f"its own, {list(shape)}"
            )
        if box.volume and whole.meet(box) != box:
            raise CheckpointError(f"tensor {name!r} has a piece {box} beyond its shape {list(shape)}")
    filled = [box for box in boxes if box.volume]
    _check_disjoint(name, filled)
    asked = whole if wanted is None else wanted
    found = sum(asked.meet(box).volume for box in filled)
    if found != asked.volume:
        raise CheckpointError(
            f"tensor {name!r} of shape {list(shape)} is not whole: of the {asked.volume:,} elements of {asked} its "
            f"pieces have {found:,}"
        )


def _check_disjoint(name: str, boxes: Sequence[Box]) -> None:
    """In the order in which they begin: each is compared with those only that have not ended by then."""
    begun: list[tuple[int, int, Box]] = []
    for index, box in enumerate(sorted(boxes)):
        begin, end = (box.offset[0], box.stop[0]) if box.size else (0, 1)
        while begun and begun[0][0] <= begin:
            heapq.heappop(begun)
        for _, _, other in begun:
            if box.meet(other).volume:
                raise CheckpointError(f"tensor {name!r} has pieces that overlap: {other} and {box}")
        heapq.heappush(begun, (end, index, box))
