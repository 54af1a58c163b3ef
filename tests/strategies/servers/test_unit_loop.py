"""The loop of a worker whose units are applied one by one."""

from unittest.mock import Mock, create_autospec

import pytest

from quorate.strategies.servers.unit_loop import UnitLoop, UnitStrategy
from quorate.task.progress import Progress


class Pulled(Exception):
    pass


def test_a_worker_pulls_nothing_while_what_it_holds_is_being_digested_for_a_save() -> None:
    """Or it would tell of newer values than the others, and pass for a replica that has diverged."""
    order: list[str] = []

    def work() -> None:
        order.append("pull")
        raise Pulled

    strategy = create_autospec(UnitStrategy, instance=True, leads=False, hosted=(0,))
    loop = object.__new__(UnitLoop)
    loop.strategy, loop.progress, loop.sampler, loop._settings = strategy, Mock(spec=Progress), Mock(), Mock()
    loop._server, loop._worker = None, Mock(run_segment=work)
    loop.checkpointer = Mock(settle_before=lambda: order.append("settle"))
    with pytest.raises(Pulled):
        loop._step(1)
    assert order == ["settle", "pull"]
