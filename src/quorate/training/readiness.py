"""Which buckets of gradients are complete, while the backward pass still fills the others."""

from collections.abc import Callable, Sequence

from quorate.lanes.buckets import Bucket


class Readiness:
    """Announces buckets in the order of the plan, each once: all workers must sum them in the same order."""

    def __init__(self, plan: Sequence[Bucket], announce: Callable[[int], None]) -> None:
        self._bucket_of = {slot.index: number for number, bucket in enumerate(plan) for slot in bucket.slots}
        self._contents = [frozenset(slot.index for slot in bucket.slots) for bucket in plan]
        self._announce = announce
        self._missing = [set(content) for content in self._contents]
        self._announced = 0

    def begin(self) -> None:
        """Nothing is complete."""
        self._missing = [set(content) for content in self._contents]
        self._announced = 0

    def complete(self, index: int) -> bool:
        """The gradient of this parameter is in its place. False if that place has been announced already."""
        number = self._bucket_of[index]
        if number < self._announced:
            return False
        # By name, not by number: reentrant checkpointing tells of one parameter as often as it is used.
        self._missing[number].discard(index)
        while self._announced < len(self._missing) and not self._missing[self._announced]:
            self._announce_next()
        return True

    def complete_all(self) -> None:
        """What has not been announced is complete now, too."""
        while self._announced < len(self._missing):
            self._announce_next()

    def _announce_next(self) -> None:
        number = self._announced
        self._announced += 1
        self._announce(number)
