"""Which buckets of gradients are complete, while the backward pass still fills the others."""

from collections.abc import Callable, Sequence

from quorate.lanes.buckets import Bucket


class Readiness:
    """Announces buckets in the order of the plan, each once: all workers must sum them in the same order."""

    def __init__(self, plan: Sequence[Bucket], announce: Callable[[int], None]) -> None:
        self._bucket_of = {slot.index: number for number, bucket in enumerate(plan) for slot in bucket.slots}
        self._sizes = [len(bucket.slots) for bucket in plan]
        self._announce = announce
        self._missing = list(self._sizes)
        self._announced = 0

    def begin(self) -> None:
        """Nothing is complete."""
        self._missing = list(self._sizes)
        self._announced = 0

    def complete(self, index: int) -> bool:
        """The gradient of this parameter is in its place. False if that place has been announced already."""
        number = self._bucket_of[index]
        if number < self._announced:
            return False
        self._missing[number] -= 1
        while self._announced < len(self._missing) and self._missing[self._announced] <= 0:
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
