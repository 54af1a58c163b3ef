"""How far ahead work may be begun: the rule of bounded staleness, and the check that it was kept.

A unit of work is a lane of a step. The clock of a job stands at the oldest step of which a unit is not applied yet.
"""

from quorate.core.errors import JobError


class ClockViolation(JobError):  # noqa: N818 (a happening, not a mistake)
    """A unit was begun that the rule does not allow: a fault of Quorate."""


def may_begin(step: int, oldest_unapplied: int, staleness: int | None) -> bool:
    """Whether a unit of `step` may be begun now: at most `staleness` steps ahead of the oldest unapplied one.

    Without a bound (the asynchronous mode) only the next boundary holds it back, and that is the dealer's business.
    """
    return staleness is None or step - oldest_unapplied <= staleness


def check_begun(step: int, oldest_unapplied: int, staleness: int | None) -> None:
    """Raise if a unit of `step` was begun too early. Apart from the rule: a mistake there must not excuse itself."""
    if staleness is not None and step > oldest_unapplied + staleness:
        raise ClockViolation(
            f"a unit of step {step} was begun while step {oldest_unapplied} was not applied: {step - oldest_unapplied} "
            f"steps ahead, and at most {staleness} are allowed (strategy.staleness). This is a fault of Quorate."
        )
