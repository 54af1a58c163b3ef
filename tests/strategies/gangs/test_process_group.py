"""A sum of a process group is waited for in small pieces, and only what is wrong with it ends the wait."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.core.errors import GenerationOver
from quorate.strategies.gangs.process_group import ProcessGroup
from strategies.test_strategy_contract import Kind, endpoints


class Sum:
    """Comes just after the first wait for it is over, with or without an error."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._is_there = False
        self.waits = 0

    def is_completed(self) -> bool:
        return self._is_there

    def wait(self, _: timedelta | None = None) -> None:
        self.waits += 1
        if not self._is_there:
            self._is_there = True
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)


def awaited(work: Any, deadline: Callable[[], float] = lambda: 1.0) -> None:
    group: Any = ProcessGroup.__new__(ProcessGroup)
    group.__dict__.update(_is_host=True, _lease=lambda: 1.0, _check=deadline, _is_over=threading.Event())
    group._await(work)


@contextmanager
def joined(deadline: Callable[[], float] | None = None) -> Iterator[list[ProcessGroup]]:
    """Two members; `deadline` is that of both."""
    with ExitStack() as stack:
        ours = endpoints(Kind("tcp", 2), stack, [range(1), range(1, 2)])

        def join(endpoint: Endpoint) -> ProcessGroup:
            links, _ = connect(endpoint, ())
            stack.callback(links.close)
            told = replace(endpoint, deadline=deadline or endpoint.deadline)
            group = ProcessGroup(told, links, torch.device("cpu"))
            stack.callback(group.close)
            return group

        with ThreadPoolExecutor(2) as threads:
            yield list(threads.map(join, ours))


def test_a_sum_that_comes_when_the_time_is_just_over_has_not_failed() -> None:
    work = Sum()
    awaited(work)
    assert work.waits == 2


def test_what_is_wrong_with_a_sum_is_raised_when_it_is_over() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        awaited(Sum("connection closed by peer"))


def test_the_end_of_a_generation_ends_a_sum_that_is_waited_for_while_members_connect() -> None:
    """Nobody knows the group yet who could abort it, and a member that was cut off neither comes nor closes."""

    def over() -> float:
        raise GenerationOver("generation 1 is over")

    with joined(over) as groups, pytest.raises(GenerationOver):
        groups[0].sum(torch.ones(3))


def test_who_is_slow_is_waited_for_in_any_collective() -> None:
    """Also where torch calls it, which says nothing of how long: the time for connecting is soon over."""
    with joined() as groups:
        short = timedelta(milliseconds=1)
        for group in groups:
            group._backend._set_default_timeout(short)
        tensors = [torch.ones(3), torch.ones(3)]
        waited = groups[0].begin("allreduce", [tensors[0]], AllreduceOptions())
        assert not threading.Event().wait(100 * short.total_seconds())
        for work in (groups[1].begin("allreduce", [tensors[1]], AllreduceOptions()), waited):
            work.wait()
        assert all(tensor.tolist() == [2.0] * 3 for tensor in tensors)


class Kernel:
    """As NCCL has it: whoever waits tells a stream to, and an abort looks like the end."""

    def __init__(self, aborted: threading.Event) -> None:
        self.is_completed = aborted.is_set

    def wait(self) -> None:
        """At once."""


def test_what_an_abort_has_ended_on_a_gpu_does_not_pass_for_complete() -> None:
    group: Any = ProcessGroup.__new__(ProcessGroup)
    over = threading.Event()
    group.__dict__.update(_is_host=False, _check=lambda: None, _lease=lambda: 1.0, _is_over=over, _error=None, _done=0)
    group._begun = [Kernel(over)]
    aborter = threading.Timer(0.01, over.set)
    aborter.start()
    with pytest.raises(GenerationOver):
        group.complete()
    aborter.join()


class LikeNccl:
    """A group whose collectives have ended; whoever says that it waits gets nothing to wait for, as from NCCL."""

    def __init__(self) -> None:
        self.made: list[Kernel] = []

    def allreduce(self, _: list[torch.Tensor], options: AllreduceOptions) -> Kernel | None:
        ended = threading.Event()
        ended.set()
        self.made.append(Kernel(ended))
        return self.made[-1] if options.asyncOp else None


def test_a_collective_of_nccl_gives_a_work_and_only_the_last_is_kept() -> None:
    """Each holds the weights that it has gathered, and of a step there are hundreds."""
    group: Any = ProcessGroup.__new__(ProcessGroup)
    group.__dict__.update(
        _is_host=False, _check=lambda: None, _lease=lambda: 1.0, _is_over=threading.Event(), _error=None
    )
    group._begun, group._done, group._group = [], 0, LikeNccl()
    for _ in range(3):
        options = AllreduceOptions()
        options.asyncOp = False
        assert group.begin("allreduce", [torch.ones(1)], options) is group._group.made[-1]
        assert group._begun == group._group.made[-1:]
    group.complete()
    assert not group._begun
