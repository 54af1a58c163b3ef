"""A reduction among all members, and the links between workers and servers beside it: they end together."""

from collections.abc import Mapping

from quorate.reduce.connect import Neighbour
from quorate.reduce.reduction import Reduction, Wrapped


class LinkedReduction(Wrapped):
    """The reduction of a generation, and with it the links to servers: who closes one closes all."""

    def __init__(self, reduction: Reduction, links: Mapping[int, Neighbour]) -> None:
        super().__init__(reduction)
        self._neighbours = links

    def close(self) -> None:
        for link in self._neighbours.values():
            link.close()
        super().close()
