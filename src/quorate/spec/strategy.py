"""How gradients become an update: a section for each kind of strategy, told apart by `kind`."""

from typing import Annotated, Literal

from pydantic import Field

from quorate.core.mesh import MeshShape
from quorate.spec.keys import Allowed, Mark
from quorate.spec.section import Count, CountOrZero, Fraction, OptionalCount, Section


class CompressSpec(Section):
    """What is sent of a gradient: its largest elements, some drawn at random, or all in 8 bits. One of the three."""

    top_k: Annotated[Fraction | None, Allowed("a fraction above 0 and at most 1, or null")] = None
    """Send only this fraction of the elements: the largest."""
    random_k: Annotated[Fraction | None, Allowed("a fraction above 0 and at most 1, or null")] = None
    """Send only this fraction of the elements, drawn at random."""
    bits: Annotated[Literal[8] | None, Allowed("8, or null")] = None
    """Send all elements in 8 bits."""
    feedback: bool = True
    """Add what was not sent to the next gradient (error feedback)."""
    momentum: Annotated[
        float | None, Field(gt=0, lt=1), Allowed("a number above 0 and below 1 (it replaces the optimizer's), or null")
    ] = None
    """Momentum that is applied before compression."""


class RingSpec(Section):
    """Gradients are summed around a ring of workers, in an order that does not depend on their number."""

    kind: Literal["ring"] = "ring"
    compress: CompressSpec | None = None
    """Compress the gradients of the lanes. Set one of `top_k`, `random_k` and `bits`."""


class DdpCompressSpec(Section):
    """What is sent of a bucket: all in 16 bits, or after step `start` matrices of a low rank (PowerSGD). One of the
    two."""

    dtype: Annotated[Literal["fp16", "bf16"] | None, Allowed("fp16, bf16, or null")] = None
    """Send and sum gradients in this type."""
    rank: OptionalCount = None
    """Compress with PowerSGD of this rank."""
    start: CountOrZero = 1000
    """With `rank`: steps without compression, before PowerSGD begins."""

    @property
    def feedback(self) -> bool:
        """Whether what is not sent is added to the next gradient."""
        return self.rank is not None


class DdpSpec(Section):
    """Gradients are summed by the reducer of PyTorch's DDP, over Gloo or NCCL: fast, but the last bits depend on the
    number of workers."""

    kind: Literal["ddp"]
    hierarchical: bool = False
    """Sum within each host first, then between the first workers of the hosts."""
    compress: DdpCompressSpec | None = None
    """Compress gradients. Set `dtype` or `rank`."""
    sync_batch_norm: bool = False
    """Batch norm uses the statistics of the micro-batches that all workers compute at the same time."""


class FsdpSpec(Section):
    """Every worker holds a part of the parameters, gradients and optimizer state: FSDP2 and tensor parallelism.

    There are `replicate` × `shard` × `tensor` workers. `units` and `plan` name modules by patterns.
    """

    kind: Literal["fsdp"]
    shard: Annotated[
        Count | None, Mark.MANNER, Allowed("a whole number of at least 1, or null: as many as there are workers")
    ] = None
    """Workers among which the state is split."""
    replicate: Annotated[Count, Mark.MANNER] = 1
    """Copies of the sharded model."""
    tensor: Annotated[Count, Mark.MANNER] = 1
    """Workers that compute the same samples, each with a part of the matrices."""
    units: Annotated[
        Literal["auto"] | list[str], Mark.MANNER, Allowed('auto, or a list of patterns such as ["blocks.*"]')
    ] = "auto"
    """The modules whose weights are gathered at a time."""
    plan: Annotated[
        Literal["auto"] | dict[str, Literal["column", "row", "replicate"]],
        Mark.MANNER,
        Allowed("auto, or a mapping from patterns of module names to column, row or replicate"),
    ] = "auto"
    """How modules are split for tensor parallelism."""
    gather: Annotated[Literal["fp32", "bf16"] | None, Allowed("fp32, bf16, or null: as they are")] = None
    """The type in which weights are gathered."""
    reduce: Annotated[Literal["fp32", "bf16"] | None, Allowed("fp32, bf16, or null: as they are")] = None
    """The type in which gradients are summed."""
    reshard: Annotated[bool, Mark.MANNER] = True
    """Free gathered weights after the forward pass; false: keep them until the backward pass."""
    offload: Annotated[bool, Mark.MANNER] = False
    """Keep the shards in the memory of the host."""

    @property
    def compress(self) -> CompressSpec | None:
        """Gradients travel whole."""
        return None

    def mesh(self, workers: int) -> MeshShape:
        """How so many workers stand to each other."""
        return MeshShape(self.replicate, self.shard or max(1, workers // (self.replicate * self.tensor)), self.tensor)


class ServersSpec(Section):
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
    compress: CompressSpec | None = None
    """Compress the gradients of the lanes. Set one of `top_k`, `random_k` and `bits`."""


AnyStrategy = RingSpec | DdpSpec | FsdpSpec | ServersSpec
StrategySpec = Annotated[AnyStrategy, Field(discriminator="kind")]
"""What of a kind is only manner has a mark of its own."""


def server_count(strategy: AnyStrategy) -> int:
    """How many processes a job has that hold parameters."""
    return strategy.servers if isinstance(strategy, ServersSpec) else 0


def lane_compression(strategy: AnyStrategy) -> CompressSpec | None:
    """What is taken of each lane's gradient; None where lanes' gradients travel whole, or only as the sum of some."""
    return strategy.compress if isinstance(strategy.compress, CompressSpec) else None


def cpu_only(strategy: AnyStrategy) -> str | None:
    """What of it is computed on CPUs alone; None if a GPU will do."""
    if lane_compression(strategy) is not None:
        return "strategy.compress"
    if not isinstance(strategy, ServersSpec) or strategy.mode == "synchronous":
        return None
    return f"strategy.mode: {strategy.mode}"


def syncs_batch_norm(strategy: AnyStrategy) -> bool:
    """Whether workers need each other within a pass."""
    return isinstance(strategy, DdpSpec) and strategy.sync_batch_norm


def rounding(strategy: AnyStrategy) -> tuple[str | None, str | None]:
    """To which types weights and gradients of a sharded gang are rounded on their way; None: they are not."""
    return (strategy.gather, strategy.reduce) if isinstance(strategy, FsdpSpec) else (None, None)


def is_synchronous(strategy: AnyStrategy) -> bool:
    """Whether all lanes of a step are one update, whoever was when at work."""
    return not isinstance(strategy, ServersSpec) or strategy.mode == "synchronous"


def fixes_bits(strategy: AnyStrategy) -> bool:
    """Whether its bits depend on lanes alone, and not on the number of workers either."""
    return is_synchronous(strategy) and not is_gang(strategy)


def is_gang(strategy: AnyStrategy) -> bool:
    """Whether its workers exchange tensors by torch.distributed: over Gloo on CPUs, over NCCL on GPUs."""
    return isinstance(strategy, DdpSpec | FsdpSpec)


def mesh_of(strategy: AnyStrategy, workers: int) -> MeshShape | None:
    """How the workers of a sharded gang stand to each other; None where each holds all of the state, or servers do."""
    return strategy.mesh(workers) if isinstance(strategy, FsdpSpec) else None
