"""What a coordinator is told when it starts."""

from dataclasses import dataclass

from quorate.core.timing import Timing


@dataclass(frozen=True)
class Terms:
    """What a job's coordinator is told when it starts."""

    incarnation: int
    lanes: int
    workers: int
    timing: Timing
    min_workers: int = 1
    step_timeout: float | None = None
    spares: int = 0
    # How lanes are shared: "even", or "speed".
    balance: str = "even"


@dataclass(frozen=True)
class Roster:
    """Who is there when a coordinator takes the place of another: processes, and places for which one is on its way.

    `has_begun`: there has been a generation. `is_condemned`: its replicas differed, and none has begun since.
    """

    present: frozenset[tuple[int, int]]
    awaited: frozenset[int]
    has_begun: bool = True
    is_condemned: bool = False
