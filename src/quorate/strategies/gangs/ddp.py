"""The `ddp` strategy: gradients are summed by DDP's reducer over Gloo or NCCL; everything else is the ring's.

Which worker adds what depends on how many there are, so another number of workers gives other last bits; the same
number gives the same again, whoever was lost and replaced.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quorate.core.generation import Member
from quorate.core.worker_status import EXCHANGE, OTHERS
from quorate.reduce.connect import Endpoint
from quorate.reduce.reduction import Reduction
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement
from quorate.strategies.compression.methods import check_compressible
from quorate.strategies.gangs.ddp_reducer import BucketSums, DdpReducer, RoundedSums, WholeSums
from quorate.strategies.gangs.gang_gradients import GangGradients
from quorate.strategies.gangs.hierarchy import summing_group
from quorate.strategies.gangs.nccl import nccl_of, prepare_nccl
from quorate.strategies.gangs.option import DdpCompressSpec, DdpSpec
from quorate.strategies.gangs.power_sgd import PowerSgd, PowerSgdSums
from quorate.strategies.gangs.process_group import GroupLinks, ProcessGroup
from quorate.strategies.gangs.sync_batch_norm import SyncedNorms
from quorate.strategies.gangs.worker_residuals import WithFactors, WorkerResiduals
from quorate.strategies.kinds import Holdings
from quorate.strategies.lagging import Lag
from quorate.strategies.ring import RingConnection, RingStrategy, plain_links
from quorate.training.activity import Activity
from quorate.training.gradients import gradient_plan, refuse_rows
from quorate.training.replica import Replica
from quorate.training.state_layout import Replicated, StateLayout
from quorate.training.strategy import Strategy
from quorate.training.update import Update

log = logging.getLogger(__name__)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LowRank:
    """PowerSGD's state: what all workers know alike, what this one has held back, and the sums of a generation."""

    power_sgd: PowerSgd
    residuals: WorkerResiduals
    sums: PowerSgdSums | None = None

    def begin(self, step: int) -> None:
        assert self.sums is not None
        self.sums.begin_step(step)

    def commit(self, step: int) -> None:
        """The step is applied: what it has left is what was held back."""
        if self.power_sgd.commit():
            self.residuals.commit(step)


def ddp_factory(spec: JobSpec, replica: Replica, held: Holdings) -> "DdpFactory":
    """What makes the gang of each generation."""
    prepare_nccl(spec, on_host=replica.device.is_host)
    strategy = spec.strategy
    assert isinstance(strategy, DdpSpec)
    return DdpFactory(spec, replica, strategy.compress, held.lane_memory, sync_batch_norm=strategy.sync_batch_norm)


class DdpFactory:
    """Makes a process group of the workers of each generation of a job."""

    def __init__(
        self,
        spec: JobSpec,
        replica: Replica,
        compress: DdpCompressSpec | None,
        lane_memory: int | None,
        *,
        sync_batch_norm: bool = False,
    ) -> None:
        refuse_rows(replica.model, replica.trainable, "strategy: ddp")
        self.spec = spec
        self.replica = replica
        self._plan = gradient_plan(replica.trainable, spec.bucket_mb)
        self.dtype = None if compress is None or compress.dtype is None else DTYPES[compress.dtype]
        self.norms: SyncedNorms | None = None
        if sync_batch_norm:
            self.norms = SyncedNorms(replica.model)
            log.info("batch norm takes the statistics of all workers, in %d layers", self.norms.count)
        self._low_rank: LowRank | None = None
        self.layout: StateLayout = Replicated(replica)
        if compress is not None:
            check_compressible(replica.trainable)
        if compress is not None and compress.rank is not None:
            parameters = [parameter for _, parameter in replica.trainable]
            power_sgd = PowerSgd(parameters, compress.rank, compress.start, spec.seed)
            if not power_sgd.narrowed:
                log.warning(
                    "strategy.compress: no parameter is large enough for rank %d, so no gradient is compressed",
                    compress.rank,
                )
                return
            residuals = WorkerResiduals(self._plan, spec.lanes, lane_memory)
            self._low_rank = LowRank(power_sgd, residuals)
            self.layout = WithFactors(replica, residuals, power_sgd)

    def connect(self, endpoint: Endpoint) -> "DdpConnection":
        """Waits for the other workers. A worker that is alone has no group, but where PowerSGD is to do the same with
        what it held back when there were others."""
        links = plain_links(endpoint, self.replica.device)
        try:
            return self._connected(endpoint, links)
        except BaseException:
            links.close()
            raise

    def _connected(self, endpoint: Endpoint, links: Reduction) -> "DdpConnection":
        spec, replica = self.spec, self.replica
        hosted = endpoint.hosting[endpoint.position]
        parameters = [parameter for _, parameter in replica.trainable]
        reducer = low_rank = None
        workers, groups = len(endpoint.generation.members), list[ProcessGroup]()
        in_turns = self.norms is not None and workers > 1 and _makes_equal_passes(endpoint.hosting)
        if parameters and (workers > 1 or self._low_rank is not None):
            try:
                group = self._group(endpoint, links, parameters[0].device)
                groups.append(group)
                sums: BucketSums = WholeSums(group) if self.dtype is None else RoundedSums(group, self.dtype)
                if self._low_rank is not None:
                    sums = PowerSgdSums(self._low_rank.power_sgd, parameters, group, self._low_rank.residuals)
                    low_rank = replace(self._low_rank, sums=sums)
                reducer = DdpReducer(parameters, self._plan, spec.bucket_mb, group, sums)
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
        return DdpConnection(self, endpoint, GroupLinks(links, *groups), gradients, groups, low_rank)

    def _group(self, endpoint: Endpoint, links: Reduction, device: torch.device) -> ProcessGroup:
        strategy, timeout = self.spec.strategy, nccl_of(self.spec).timeout
        hierarchical = isinstance(strategy, DdpSpec) and strategy.hierarchical
        return summing_group(endpoint, links, device, timeout, hierarchical=hierarchical)


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


class DdpConnection(RingConnection):
    """One worker's connection to the others of its generation."""

    def __init__(
        self,
        factory: DdpFactory,
        endpoint: Endpoint,
        links: Reduction,
        gradients: GangGradients,
        groups: Sequence[ProcessGroup],
        low_rank: LowRank | None,
    ) -> None:
        super().__init__(factory.spec, factory.replica, endpoint, links, gradients)
        self._layout = factory.layout
        self._dtype = factory.dtype
        self._gang = gradients
        self._norms = factory.norms
        self._groups = groups
        self._low_rank = low_rank

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        if self._low_rank is not None:
            with activity.waiting(OTHERS):
                self._low_rank.residuals.settle(self._endpoint.generation, self._endpoint.position, self.links)
        return super().strategy(update, activity)

    def _strategy(
        self, own: Member, agreement: StepAgreement, update: Update, activity: Activity, lag: Lag | None
    ) -> "DdpStrategy":
        if self._low_rank is not None:
            lag = None  # what is held back counts once its step is applied
        return DdpStrategy(
            own,
            self.links,
            self._gang,
            agreement,
            update,
            activity,
            lag=lag,
            groups=self._groups,
            low_rank=self._low_rank,
        )

    def _bytes_per_step(self) -> int | None:
        """As many as a ring sends, which both backends use for what is large."""
        workers = len(self._endpoint.generation.members)
        size = sum(parameter.nbytes for parameter in self._gang.parameters)
        if self._dtype is not None:
            size = self._dtype.itemsize * sum(parameter.numel() for parameter in self._gang.parameters)
        elif self._low_rank is not None and self._endpoint.generation.cursor.step >= self._low_rank.power_sgd.start:
            size = self._low_rank.power_sgd.nbytes()
        return 2 * size * (workers - 1) // workers

    def close(self) -> None:
        super().close()
        for group in self._groups:
            group.close()
        if self._norms is not None:
            self._norms.leave()


class DdpStrategy(RingStrategy):
    """Waits for the sums that the backward pass has begun."""

    _gradients: GangGradients

    def __init__(
        self,
        own: Member,
        links: Reduction,
        gradients: GangGradients,
        agreement: StepAgreement,
        update: Update,
        activity: Activity,
        *,
        lag: Lag | None,
        groups: Sequence[ProcessGroup],
        low_rank: LowRank | None,
    ) -> None:
        super().__init__(own, links, gradients, agreement, update, activity, lag=lag)
        self._groups = groups
        self._low_rank = low_rank

    def begin(self, step: int) -> None:
        super().begin(step)
        for group in self._groups:
            group.begin_step(step)
        if self._low_rank is not None:
            self._low_rank.begin(step)

    def _sum(self, step: int) -> None:  # noqa: ARG002
        self._activity.enter(EXCHANGE)
        self._gradients.exchange()

    def _applied(self, step: int) -> None:
        if self._low_rank is not None:
            self._low_rank.commit(step)

    def close(self) -> None:
        """With the groups, or others would wait for a sum until their lease is over."""
        super().close()
        for group in self._groups:
            group.close()
