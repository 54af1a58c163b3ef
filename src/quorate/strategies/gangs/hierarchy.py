"""Sums in three stages where workers are on several hosts: within each host, among the first of each, and back.

What goes between hosts is then one gradient for each host, and not one for each worker.
"""

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOptions

from quorate.core.errors import GenerationOver
from quorate.core.generation import Member
from quorate.reduce.connect import Endpoint
from quorate.reduce.reduction import Reduction
from quorate.strategies.gangs.process_group import STORE_INDEX, ProcessGroup

log = logging.getLogger(__name__)


def hosts_of(members: Sequence[Member]) -> list[tuple[int, ...]]:
    """The positions of the members of each host, in the order of their first members. Who tells no address of its host
    is told apart by that of its network."""
    hosts: dict[str, tuple[int, ...]] = {}
    for position, member in enumerate(members):
        host = member.local_address.rpartition("/")[0] or member.address.rpartition(":")[0]
        hosts[host] = (*hosts.get(host, ()), position)
    return list(hosts.values())


def summing_group(
    endpoint: Endpoint, links: Reduction, device: torch.device, timeout: float | None, *, hierarchical: bool
) -> ProcessGroup:
    """A group of all members; in stages where that is wanted, and of use."""
    hosts = hosts_of(endpoint.generation.members)
    if hierarchical and 1 < len(hosts) < len(endpoint.generation.members):
        return HierarchicalGroup(endpoint, links, device, timeout, hosts)
    if hierarchical:
        log.info("gradients are summed in one stage: no host has several workers, or one has them all")
    return ProcessGroup(endpoint, links, device, timeout)


class HierarchicalGroup(ProcessGroup):
    """A group of all members whose sums go within hosts, between them, and back.

    A thread takes each tensor through the stages, in the order in which sums are begun: so all members call the
    collectives of each group in the same order, and the backward pass waits for none of them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        links: Reduction,
        device: torch.device,
        timeout: float | None,
        hosts: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(endpoint, links, device, timeout)
        own = next(host for host in hosts if endpoint.position in host)
        firsts = [host[0] for host in hosts]
        self._within: ProcessGroup | None = None
        self._between: ProcessGroup | None = None
        self._stream: Any = None if self._is_host else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._queue: SimpleQueue[tuple[torch.Tensor, Any] | None] = SimpleQueue()
        self._settled = threading.Condition()
        self._unsettled = 0
        try:
            # Where a member has no part in a group, others who make one wait for its word all the same.
            if len(own) > 1:
                self._within = ProcessGroup(endpoint, links, device, timeout, own)
            else:
                links.gather(self._step, STORE_INDEX, b"{}")
            if endpoint.position in firsts:
                self._between = ProcessGroup(endpoint, links, device, timeout, firsts)
            else:
                links.gather(self._step, STORE_INDEX, b"{}")
        except BaseException:
            self._close_stages()
            super().close()
            raise
        self._thread = threading.Thread(target=self._work, name="quorate-hierarchical-sums", daemon=True)
        self._thread.start()
        log.info("gradients are summed within %d hosts, and between the first workers of each", len(hosts))

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        for group in self._stages:
            group.begin_step(step)

    def begin_sum(self, tensor: torch.Tensor) -> None:
        if self._error is not None or self._is_over.is_set():
            return
        self._sums += 1
        with self._settled:
            self._unsettled += 1
        filled = None if self._stream is None else torch.cuda.current_stream(tensor.device).record_event()
        self._queue.put((tensor, filled))

    def wait(self) -> None:
        with self._settled:
            self._settled.wait_for(lambda: not self._unsettled)
        if self._error is not None:
            raise self._error
        if self._is_over.is_set():
            raise GenerationOver("the links of this generation were closed while gradients were summed")

    def abort(self) -> None:
        super().abort()
        for group in self._stages:
            group.abort()

    def close(self) -> None:
        """End the thread first: with the groups aborted, nothing keeps it."""
        self.abort()
        self._queue.put(None)
        self._thread.join()
        self._close_stages()
        super().close()

    @property
    def _stages(self) -> list[ProcessGroup]:
        return [group for group in (self._within, self._between) if group is not None]

    def _close_stages(self) -> None:
        for group in self._stages:
            group.close()
        self._within = self._between = None

    def _work(self) -> None:
        while (begun := self._queue.get()) is not None:
            if self._error is None and not self._is_over.is_set():
                try:
                    self._sum(*begun)
                except Exception as error:
                    self._fail(error)
            with self._settled:
                self._unsettled -= 1
                self._settled.notify_all()

    def _fail(self, error: Exception) -> None:
        """Others may wait for this member in a stage that it will not come to: they are to see its connections end.
        Whatever knows of a collective keeps those."""
        self._error = error.with_traceback(None)
        error.__context__ = None
        self._close_stages()

    def _sum(self, tensor: torch.Tensor, filled: Any) -> None:
        if self._stream is None:
            self._pass_stages(tensor)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            self._pass_stages(tensor)
        # What NCCL does has only been ordered so far, and somebody may be waited for in vain.
        for group in self._stages:
            group.complete()

    def _pass_stages(self, tensor: torch.Tensor) -> None:
        if self._within is not None:
            self._within.begin("reduce", [tensor], self._options(ReduceOptions())).wait()
        if self._between is not None:
            self._between.begin("allreduce", [tensor], self._options(AllreduceOptions())).wait()
        if self._within is not None:
            self._within.begin("broadcast", [tensor], self._options(BroadcastOptions())).wait()
        self._done += 1

    def _options(self, options: Any) -> Any:
        """Of a collective whose root, if it has one, is the first member of its group."""
        options.timeout = self._patience
        return options
