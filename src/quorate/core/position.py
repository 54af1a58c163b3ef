"""Where a worker stands in its job, as it tells a coordinator that knows nobody."""

from dataclasses import dataclass, field

from quorate.core.cursor import Cursor
from quorate.core.generation import Generation


@dataclass(frozen=True)
class Position:
    """Its latest generation, if it has been in one. If it `has_left` that, it stands at `cursor` until the next.

    `has_trained`: what it holds is the state of the job, and not just a beginning.
    """

    generation: Generation | None = None
    cursor: Cursor = field(default_factory=Cursor)
    has_left: bool = True
    has_trained: bool = False
