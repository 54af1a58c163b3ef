"""The strategies that there are, by `strategy.kind` of the job file."""

from collections.abc import Callable, Mapping
from typing import Protocol

from quorate.observe.events import LinksMeasured
from quorate.reduce.connect import Endpoint
from quorate.reduce.reduction import Reduction
from quorate.spec.job import JobSpec
from quorate.strategies.ring import RingFactory
from quorate.training.activity import Activity
from quorate.training.gradients import Gradients
from quorate.training.replica import Replica
from quorate.training.strategy import Strategy
from quorate.training.update import Update


class Connection(Protocol):
    """A worker that is connected to the other members of its generation.

    The session copies state over its links, and then has the strategy built, for whose lanes `gradients` collects.
    """

    @property
    def links(self) -> Reduction:
        """Between the members. Whoever closes them ends every wait of this generation."""
        ...

    @property
    def gradients(self) -> Gradients:
        """Where the hosted lanes leave their gradients, and where the update finds their sum."""
        ...

    def measure(self) -> LinksMeasured:
        """How this worker is joined to the next one. All members call it before the first step, if a job is tracked."""
        ...

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        """What the loop trains with in this generation."""
        ...

    def close(self) -> None:
        """Let go of the other members. It may be closed already."""
        ...


class StrategyFactory(Protocol):
    """Made once in each worker; the session calls it at the beginning of each generation."""

    def connect(self, endpoint: Endpoint) -> Connection:
        """Connect to the other members of a generation, for as long as the endpoint's deadline lasts."""
        ...


FACTORIES: Mapping[str, Callable[[JobSpec, Replica], StrategyFactory]] = {"ring": RingFactory}


def strategy_factory(spec: JobSpec, replica: Replica) -> StrategyFactory:
    """The one that a job asks for."""
    return FACTORIES[spec.strategy.kind](spec, replica)
