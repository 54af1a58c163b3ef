"""All-reduce of OpenMPI over shared memory, in place: the faster of its two ways.

Every process runs this script; mpirun starts them. OpenMPI looks for messages again and again instead of sleeping, so
it uses whole cores while it waits.
"""

from importlib import import_module
from typing import Any

import numpy

from benchmarks.exchange import exchange_all, readings_of
from benchmarks.size import ELEMENT
from benchmarks.told import answer, read_order

# By name: what checks the types of this file does not have it.
MPI: Any = import_module("mpi4py.MPI")


class MpiExchange:
    """One process with one array, which torch could read where it is."""

    def __init__(self, size: int) -> None:
        self._gradient = numpy.zeros(size // ELEMENT, numpy.float32)

    def fill(self, value: float) -> None:
        """Write the gradient."""
        self._gradient.fill(value)

    def reduce(self) -> None:
        """Sum over all processes."""
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._gradient)

    def extremes(self) -> tuple[float, float]:
        """Of the sum, which has taken the gradient's place."""
        return float(self._gradient.min()), float(self._gradient.max())


def main() -> None:
    """Answer the launcher: the first process does."""
    order, everybody = read_order(), MPI.COMM_WORLD
    spans = exchange_all(order, everybody.Get_rank(), lambda index: MpiExchange(order["sizes"][index]))
    everyone = everybody.gather(spans, root=0)
    if everyone is not None:
        answer(*readings_of(order, everyone))


if __name__ == "__main__":
    main()
