"""How late the updates of a run came, where units of work are applied one by one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quorate.observe.events import StalenessObserved
from quorate.observe.quantities import plural


@dataclass
class Staleness:
    """All that was observed: how many units came with how many updates of others between their pull and their push.

    `gap` is how many steps ahead of the oldest unapplied one a unit was begun at most, `bound` how many are allowed.
    """

    updates: Counter[int] = field(default_factory=Counter)
    gap: int = 0
    bound: int | None = None

    @classmethod
    def of(cls, events: Iterable[StalenessObserved]) -> "Staleness | None":
        """What these tell together; None where there are none."""
        total: Staleness | None = None
        for event in events:
            total = total or cls()
            for updates, units in event.updates.items():
                total.updates[int(updates)] += units
            total.gap, total.bound = max(total.gap, event.gap), event.bound
        return total

    @property
    def mean(self) -> float:
        units = sum(self.updates.values())
        return sum(late * count for late, count in self.updates.items()) / units if units else 0.0

    @property
    def most(self) -> int:
        return max(self.updates, default=0)

    def in_words(self) -> str:
        allowed = "" if self.bound is None else f" of {self.bound} allowed"
        late = f"updates came {self.mean:.1f} others late, at most {self.most}"
        return f"{late}; begun at most {plural(self.gap, 'step')}{allowed} ahead"

    def to_dict(self) -> dict[str, Any]:
        """As `quorate show --json` prints it."""
        updates = {str(late): units for late, units in sorted(self.updates.items())}
        return {"updates": updates, "mean": round(self.mean, 3), "gap": self.gap, "bound": self.bound}
