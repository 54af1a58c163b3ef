"""The `ddp` strategy: gradients are summed by DDP's reducer over Gloo or NCCL; everything else is the ring's.

Which worker adds what depends on how many there are, so another number of workers gives other last bits; the same
number gives the same again, whoever was lost and replaced.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.reduction import Reduction
from quorate.core.generation import EXCHANGE
from quorate.replica.gradients import check_compressible, gradient_plan, refuse_rows
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Replicated, StateLayout
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.gang_gradients import BucketSums, DdpReducer, GangGradients
from quorate.strategies.gangs.nccl import nccl_of, prepare_nccl
from quorate.strategies.gangs.option import DdpSpec
from quorate.strategies.gangs.process_group import GroupLinks, ProcessGroup
from quorate.strategies.gangs.sync_batch_norm import SyncedNorms
from quorate.strategies.kinds import Holdings
from quorate.strategies.ring import RingConnection, RingStrategy, StepParts
from quorate.training.lane import LaneResult

log = logging.getLogger(__name__)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DdpFactory:
    """Makes a process group of the workers of each generation of a job."""

    def __init__(self, spec: JobSpec, replica: Replica, held: Holdings) -> None:  # noqa: ARG002
        prepare_nccl(spec, on_host=replica.device.is_host)
        strategy = spec.strategy
        assert isinstance(strategy, DdpSpec)
        refuse_rows(replica.model, replica.trainable, "strategy: ddp")
        self.spec = spec
        self.replica = replica
        self._plan = gradient_plan(replica.trainable, spec.bucket_mb)
        self.dtype = None
        if strategy.compress is not None:
            self.dtype = DTYPES[strategy.compress.dtype]
            check_compressible(replica.trainable)
        self.norms: SyncedNorms | None = None
        if strategy.sync_batch_norm:
            self.norms = SyncedNorms(replica.model)
            log.info("batch norm takes the statistics of all workers, in %d layers", self.norms.count)
        self.layout: StateLayout = Replicated(replica)

    def connect(self, endpoint: Endpoint) -> "DdpConnection":
        """Waits for the other workers. A worker that is alone has no group."""
        links, _ = connect(endpoint, ())
        try:
            return self._connected(endpoint, links)
        except BaseException:
            links.close()
            raise

    def _connected(self, endpoint: Endpoint, links: Reduction) -> "DdpConnection":
        spec, replica = self.spec, self.replica
        hosted = endpoint.hosting[endpoint.position]
        parameters = [parameter for _, parameter in replica.trainable]
        reducer = None
        workers, groups = len(endpoint.generation.members), list[ProcessGroup]()
        in_turns = self.norms is not None and workers > 1 and _makes_equal_passes(endpoint.hosting)
        if parameters and workers > 1:
            try:
                group = ProcessGroup(endpoint, links, parameters[0].device, timeout=nccl_of(spec).timeout)
                groups.append(group)
                reducer = DdpReducer(parameters, self._plan, spec.bucket_mb, group, BucketSums(group, self.dtype))
                if self.norms is not None and in_turns:
                    # Of its own: which buckets are full when a batch norm's turn comes may differ between workers.
                    groups.append(ProcessGroup(endpoint, links, parameters[0].device, timeout=nccl_of(spec).timeout))
                    self.norms.join(groups[-1], endpoint.position, workers)
            except BaseException:
                links.close()  # first: a group may be asking who is gone
                for group in groups:
                    group.close()
                raise
        gradients = GangGradients(replica.trainable, hosted, reducer, overlaps=spec.overlap, in_turns=in_turns)
        joined = GroupLinks(links, *groups)
        return DdpConnection(spec, replica, endpoint, joined, gradients, self.layout, groups, self.norms, self.dtype)


def _makes_equal_passes(hosting: Sequence[range]) -> bool:
    """Whether all workers have the same number of passes in a step: else some would wait for others in vain.

    All are there, and have, but where those who are left of a job that stops do one more step to save what they hold.
    """
    counts = [len(hosted) for hosted in hosting]
    if len(set(counts)) == 1:
        return True
    log.warning(
        "strategy.sync_batch_norm: the %d workers that are left share %d lanes (%s), so each normalizes by its own "
        "samples until the others are back",
        len(counts),
        sum(counts),
        ", ".join(map(str, counts)),
    )
    return False


@dataclass
class DdpConnection(RingConnection):
    """One worker's connection to the others of its generation. Gradients are sent in the `dtype`, if there is one."""

    gradients: GangGradients
    groups: Sequence[ProcessGroup]
    norms: SyncedNorms | None
    dtype: torch.dtype | None

    def _strategy(self, parts: StepParts) -> "DdpStrategy":
        return DdpStrategy(parts, self.gradients, self.groups)

    def _bytes_per_step(self) -> int | None:
        """As many as a ring sends, which both backends use for what is large."""
        workers = len(self.endpoint.generation.members)
        sent = [p.nbytes if self.dtype is None else p.numel() * self.dtype.itemsize for p in self.gradients.parameters]
        return 2 * sum(sent) * (workers - 1) // workers

    def close(self) -> None:
        super().close()
        for group in self.groups:
            group.close()
        if self.norms is not None:
            self.norms.leave()


class DdpStrategy(RingStrategy):
    """Waits for the sums that the backward pass has begun."""

    def __init__(self, parts: StepParts, gradients: GangGradients, groups: Sequence[ProcessGroup]) -> None:
        super().__init__(parts)
        self._gang = gradients
        self._groups = groups

    def begin(self, step: int) -> None:
        super().begin(step)
        for group in self._groups:
            group.begin_step(step)

    def exchange(self, step: int, results: Sequence[LaneResult]) -> None:  # noqa: ARG002
        self._activity.enter(EXCHANGE)
        self._gang.exchange()

    def close(self) -> None:
        """With the groups, or others would wait for a sum until their lease is over."""
        super().close()
        for group in self._groups:
            group.close()
