"""How gradients get from workers to parameter servers, and new values back."""

from collections.abc import Mapping
from typing import Protocol

import torch


class Exchange(Protocol):
    """One member's end of the exchange of tensors in a generation with parameter servers. Any failure closes it.

    A *block* is a trainable parameter, by its index. All tensors are flat. In a step a worker pushes and pulls, a
    server receives, adds up and publishes, in this order; in between, members agree by gathers of their `Reduction`.
    """

    @property
    def bytes_sent(self) -> int:
        """What has gone from this member to others so far."""
        ...

    @property
    def bytes_received(self) -> int:
        """What has come to it."""
        ...

    def room(self, block: int) -> torch.Tensor:
        """Memory for a block's values: what is published from there, or pulled into there, need not be copied.

        A worker may read it from the pull on until its next push.
        """
        ...

    def push(self, step: int) -> None:
        """A worker: send what its lanes have collected to every server that holds it.

        The lanes' memory must not change before the step is agreed upon: it may be read in place.
        """
        ...

    def receive(self, step: int) -> None:
        """A server: have the gradients that all lanes have of the blocks which it holds."""
        ...

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:
        """A server: fill the totals of blocks that it holds with the sum over all lanes: the bits of the ring."""
        ...

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        """A server: send the new values of the blocks of which it is the primary to all workers."""
        ...

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        """A worker: fill the values of all blocks with those that the servers publish."""
        ...

    def close(self) -> None:
        """Any thread may call it, any number of times."""
        ...
