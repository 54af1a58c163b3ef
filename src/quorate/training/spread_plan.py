"""What `quorate plan` asks of a strategy whose workers hold a part of the state each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from quorate.core.mesh import MeshShape
from quorate.lanes.traffic import Traffic
from quorate.training.footprint import Footprint


@dataclass(frozen=True)
class Part:
    """A part of a worker's memory."""

    name: str
    bytes: int
    note: str = ""
    grows: bool = False
    """Whether it grows with the samples of a micro-batch."""


@dataclass(frozen=True)
class Spread:
    """How a model is spread: units are patterns of the modules that are gathered at a time, and how many there are."""

    shape: MeshShape
    units: tuple[tuple[str, int], ...]


class SpreadPlan(Protocol):
    """Of one job. `quorate plan` makes it, of what the strategy's section names in `planning`."""

    @property
    def spread(self) -> Spread:
        """How the model is spread."""
        ...

    def traced(self, trace: Callable[[Callable[[torch.nn.Module], None] | None], Footprint]) -> Footprint:
        """The footprint of a worker; `trace` finds that of the model after it was cut."""
        ...

    def whole(self, found: Footprint) -> Footprint:
        """With the parameters of all workers together."""
        ...

    def parts(self, found: Footprint, precision: str) -> Iterator[Part]:
        """The memory of a worker."""
        ...

    def traffic(self, found: Footprint) -> tuple[Traffic, ...]:
        """What each worker sends and receives in a step."""
        ...

    def advice(self, found: Footprint, precision: str, room: int) -> Iterator[str]:
        """What in the strategy would make it need less."""
        ...
