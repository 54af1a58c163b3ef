"""How gradients become an update: a section for each kind of strategy, told apart by `kind`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from quorate.spec.keys import Allowed, Mark
from quorate.spec.section import Count, CountOrZero, Section

Fraction = Annotated[float, Field(gt=0, le=1), Allowed("a fraction above 0 and at most 1")]


class CompressSpec(Section):
    """What travels of a gradient: its largest elements, some drawn at random, or all in 8 bits. One of the three."""

    top_k: Annotated[Fraction | None, Allowed("a fraction above 0 and at most 1, or null")] = None
    random_k: Annotated[Fraction | None, Allowed("a fraction above 0 and at most 1, or null")] = None
    bits: Annotated[Literal[8] | None, Allowed("8, or null")] = None
    feedback: bool = True
    momentum: Annotated[
        float | None, Field(gt=0, lt=1), Allowed("a number above 0 and below 1 (it replaces the optimizer's), or null")
    ] = None


class RingSpec(Section):
    """Gradients are summed round a ring of workers, each of which hosts a lane at least."""

    kind: Literal["ring"] = "ring"
    compress: CompressSpec | None = None


class ServersSpec(Section):
    """Servers hold the parameters: workers push gradients to them, and pull what the servers have made of them.

    How many servers there are, and how many hold each parameter, changes nothing in what a synchronous job produces.
    """

    kind: Literal["parameter-server"]
    mode: Literal["synchronous", "bounded", "asynchronous"] = "synchronous"
    servers: Annotated[Count, Mark.MANNER] = 1
    replicas: Annotated[Count, Mark.MANNER] = 2
    staleness: Annotated[CountOrZero | None, Allowed("a whole number of at least 0, or null")] = None
    damping: bool = False
    compress: CompressSpec | None = None


StrategySpec = Annotated[RingSpec | ServersSpec, Field(discriminator="kind")]
"""What of a kind is only manner has a mark of its own."""


def spelled_out(strategy: Any) -> Any:
    """A strategy that is given by its kind alone."""
    return {"kind": strategy} if isinstance(strategy, str) else strategy


def server_count(strategy: RingSpec | ServersSpec) -> int:
    """How many processes a job has that hold parameters."""
    return strategy.servers if isinstance(strategy, ServersSpec) else 0


def is_synchronous(strategy: RingSpec | ServersSpec) -> bool:
    """Whether its bits depend on lanes alone, and not on who was when at work."""
    return isinstance(strategy, RingSpec) or strategy.mode == "synchronous"
