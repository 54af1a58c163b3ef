"""How fast a run trained, and where its time went."""

import math
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.timeline import Timeline

PHASES = ("data", "compute", "exchange", "apply")
_FIELDS = {phase: f"{phase}_s" for phase in PHASES}
_NEEDED = frozenset({"samples", "samples_per_second", *_FIELDS.values()})


@dataclass(frozen=True)
class RunPace:
    """Means over all steps: seconds for a step, samples a second, and the share of each phase in a step's time."""

    step_seconds: float
    samples_per_second: float
    shares: dict[str, float]

    @classmethod
    def of(cls, timeline: Timeline) -> "RunPace | None":
        """From the steps of a run; none where no step tells its speed."""
        steps, seconds, samples = 0, 0.0, 0.0
        spent = dict.fromkeys(PHASES, 0.0)
        for fields in timeline.steps.values():
            speed, size = _number(fields, "samples_per_second"), _number(fields, "samples")
            if 0 < speed < math.inf and 0 < size < math.inf:
                steps, seconds, samples = steps + 1, seconds + size / speed, samples + size
                for phase in PHASES:
                    spent[phase] += _number(fields, _FIELDS[phase])
        if not seconds:
            return None
        shares = {phase: spent[phase] / seconds for phase in PHASES if spent[phase]}
        return cls(seconds / steps, samples / seconds, shares)


def tells_pace(name: str) -> bool:
    """Whether a field of a step is needed here."""
    return name in _NEEDED


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if is_number(value) else 0.0
