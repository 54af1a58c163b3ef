"""Memory that the simulated workers of one host share, as collectives/shared_memory.py has them share it.

Nothing fences it: a worker that was stopped and wakes up writes to what it holds. Two things keep that from a later
generation. Each has memory of its own, so what an older one holds is read by nobody; and whoever counts as lost is
killed before another takes its place. Quorate relies on the first: a generation begins while the process that it has
excluded may still be there.
"""

from quorate.core.generation import GenerationId
from simulation.task import Contribution

Segment = dict[int, Contribution]
"""By lane, what was written there last."""


class SimulatedMemory:
    """The memory of one host. `is_fresh`: every generation has a segment of its own."""

    def __init__(self, *, is_fresh: bool) -> None:
        self._is_fresh = is_fresh
        self._segments: dict[GenerationId | None, Segment] = {}

    def segment(self, generation: GenerationId) -> Segment:
        """What the members of a generation map."""
        return self._segments.setdefault(generation if self._is_fresh else None, {})
