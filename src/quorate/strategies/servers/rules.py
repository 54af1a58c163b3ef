"""What must hold between the keys of parameter servers."""

from collections.abc import Iterator

from quorate.core.errors import Problem
from quorate.spec.job import JobSpec
from quorate.spec.options import Rules, Said
from quorate.strategies.servers.option import ServersSpec


def _mode_is_whole(job: JobSpec, said: Said) -> Iterator[Problem]:
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


RULES: Rules = {_mode_is_whole: frozenset({"strategy"})}
