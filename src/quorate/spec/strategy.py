"""The strategy that needs no option, and which strategies go on with each other's state."""

from typing import ClassVar, Literal

from quorate.spec.kinds import StrategySection
from quorate.spec.options import open_to_options


@open_to_options("strategy.ring")
class RingSpec(StrategySection):
    """Gradients are summed around a ring of workers, in an order that does not depend on their number."""

    kind: Literal["ring"] = "ring"
    factory: ClassVar[str] = "quorate.strategies.ring:RingFactory"


def goes_on(before: StrategySection, after: StrategySection) -> bool:
    """Whether it is another strategy that goes on with the same computation: who sums what lanes have is only manner.

    To the same bits, except with a gang, which adds in the order of its workers.
    """
    if not before.is_synchronous or not after.is_synchronous or before.arithmetic != after.arithmetic:
        return False
    # Servers that feed back what they have not sent answer with less than the ring has.
    return not before.keeps_residuals or before.kind == after.kind
