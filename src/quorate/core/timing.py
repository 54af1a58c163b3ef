"""Every timeout of a job, derived from the one number that a user sets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """How long things may take, in seconds, all from `failure_timeout`."""

    failure_timeout: float

    @property
    def heartbeat_every(self) -> float:
        """Several heartbeats may be lost before a worker counts as lost."""
        return self.failure_timeout / 10

    @property
    def lease(self) -> float:
        """A worker stops by itself before the coordinator gives its lanes away, so it is shorter than the timeout."""
        return self.failure_timeout * 0.8

    @property
    def connect(self) -> float:
        """To find the next worker on the ring once the generation is known."""
        return self.failure_timeout * 2

    @property
    def storm(self) -> float:
        """A network may break links again and again for so long before the job is given up."""
        return self.failure_timeout * 6
