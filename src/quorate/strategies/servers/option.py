"""What parameter servers add to a job file."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from quorate.core.errors import Problem
from quorate.spec.keys import Allowed, Count, CountOrZero, Mark
from quorate.spec.options import ANY, Bytes, Option, Refusal, Said, StrategySection, open_to_options


@open_to_options("strategy.parameter-server")
class ServersSpec(StrategySection):
    """Servers hold the parameters and update them: workers push gradients and pull the new values.

    `servers` and `replicas` do not affect the result of a synchronous job.
    """

    kind: Literal["parameter-server"]
    mode: Literal["synchronous", "bounded", "asynchronous"] = "synchronous"
    """When workers wait for each other: in each step, when one is `staleness` steps ahead (`bounded`), or never."""
    servers: Annotated[Count, Mark.MANNER] = 1
    """How many servers there are."""
    replicas: Annotated[Count, Mark.MANNER] = 2
    """How many servers hold each parameter."""
    staleness: Annotated[CountOrZero | None, Allowed("a whole number of at least 0, or null")] = None
    """With `mode: bounded`, how many steps ahead of the oldest unapplied one work may start."""
    damping: bool = False
    """Lower the learning rate of late gradients."""

    factory: ClassVar[str] = "quorate.strategies.servers.factory:ServersFactory"

    @property
    def is_synchronous(self) -> bool:
        return self.mode == "synchronous"

    @property
    def cpu_only(self) -> str | None:
        return super().cpu_only or (None if self.is_synchronous else f"strategy.mode: {self.mode}")

    @property
    def server_count(self) -> int:
        return self.servers

    def server_traffic(self, gradients: int, hosting: Sequence[range]) -> tuple[tuple[Bytes, ...], Bytes]:
        """Every lane's gradient goes to each holder of a parameter, and one of them answers with the new value."""
        holders, lanes = min(self.servers, self.replicas), sum(len(hosted) for hosted in hosting)
        workers = tuple((len(hosted) * holders * gradients, gradients) for hosted in hosting)
        return workers, (len(hosting) * gradients // self.servers, lanes * holders * gradients // self.servers)

    def refusals(self) -> Iterator[Refusal]:
        instead = "Use precision: bf16 or fp32, or strategy: ring or ddp."
        yield Refusal(
            "precision", "fp16", "no worker holds the sum of all gradients, by which its scale grows", instead
        )
        instead = "Use on_out_of_memory: fail with a larger accumulate, or strategy: ring."
        yield Refusal("on_out_of_memory", "shrink", "its workers do not do a step again together", instead)
        instead = "Leave it out, or use strategy: ring or ddp."
        yield Refusal("check_gradients", ANY, "no worker holds the sum of all gradients", instead)
        if self.is_synchronous:
            return
        instead = "Leave balance out: a slow worker gets less to do by itself."
        yield Refusal("balance", "speed", f"in mode: {self.mode} lanes are not shared out", instead)
        instead = "Leave average out, or use strategy.mode: synchronous."
        yield Refusal("average", ANY, f"in mode: {self.mode} the weights after a step are nowhere all at once", instead)


def _mode_is_whole(job: Any, said: Said) -> Iterator[Problem]:
    strategy = job.strategy
    if not isinstance(strategy, ServersSpec):
        return
    there = said("strategy.mode")
    if strategy.mode == "bounded" and strategy.staleness is None:
        hint = "Write how many steps a unit of work may run ahead of the oldest unapplied one: staleness: 4."
        yield Problem("strategy.staleness", f"mode: bounded{there} needs a bound, and none is given", hint)
    if strategy.mode != "bounded" and strategy.staleness is not None:
        yield Problem(
            "strategy.staleness",
            f"{strategy.staleness}{said('strategy.staleness')} bounds nothing in mode: {strategy.mode}",
            "Leave it out, or write mode: bounded.",
        )
    if strategy.is_synchronous and strategy.damping:
        hint = "Leave it out, or write mode: bounded or mode: asynchronous."
        yield Problem("strategy.damping", f"in mode: synchronous{there} no gradient is late", hint)
    if not strategy.is_synchronous and strategy.treatments:
        for key in strategy.treatments:
            text = f"in mode: {strategy.mode}{there} gradients travel whole"
            yield Problem(f"strategy.{key}", text, f"Leave {key} out, or write mode: synchronous.")


OPTION = Option(kinds={"strategy": (ServersSpec,)}, rules={_mode_is_whole: frozenset({"strategy"})})
