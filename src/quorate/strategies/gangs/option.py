"""What gangs add to a job file: the strategies `ddp` and `fsdp`, and what is said to NCCL."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from quorate.core.errors import Problem
from quorate.core.generation import MeshShape
from quorate.spec.keys import AUTO_BATCH, Allowed, Count, Mark, OptionalPositive, Section, one_of
from quorate.spec.options import ANY, Option, Refusal, Removed, Said, StrategySection, Treatment

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")


class DdpCompressSpec(Treatment):
    """What is sent of a bucket: all of it, in 16 bits."""

    dtype: Annotated[Literal["fp16", "bf16"], Allowed("fp16 or bf16")]
    """Send and sum gradients in this type."""


class DdpSpec(StrategySection):
    """Gradients are summed by the reducer of PyTorch's DDP, over Gloo or NCCL: fast, but the last bits depend on the
    number of workers."""

    kind: Literal["ddp"]
    compress: DdpCompressSpec | None = None
    """Compress gradients."""
    sync_batch_norm: bool = False
    """Batch norm uses the statistics of the micro-batches that all workers compute at the same time."""

    factory: ClassVar[str] = "quorate.strategies.gangs.ddp:DdpFactory"
    is_gang: ClassVar[bool] = True

    @property
    def couples_passes(self) -> bool:
        return self.sync_batch_norm

    @property
    def arithmetic(self) -> dict[str, Any]:
        return super().arithmetic | ({"sync_batch_norm": True} if self.sync_batch_norm else {})

    def refusals(self) -> Iterator[Refusal]:
        yield _CLEAR
        yield _ALONE


class FsdpSpec(StrategySection):
    """Every worker holds a part of the parameters, gradients and optimizer state: FSDP2 and tensor parallelism.

    There are `replicate` × `shard` × `tensor` workers. `units` names modules by patterns.
    """

    kind: Literal["fsdp"]
    shard: Annotated[
        Count | None, Mark.MANNER, Allowed("a whole number of at least 1, or null: as many as there are workers")
    ] = None
    """Workers among which the state is split."""
    replicate: Annotated[Count, Mark.MANNER] = 1
    """Copies of the sharded model."""
    tensor: Annotated[Count, Mark.MANNER] = 1
    """Workers that compute the same samples, each with a part of the matrices: the task's `parallelize()` says how."""
    units: Annotated[
        Literal["auto"] | list[str], Mark.MANNER, Allowed('auto, or a list of patterns such as ["blocks.*"]')
    ] = "auto"
    """The modules whose weights are gathered at a time."""
    gather: Annotated[Literal["fp32", "bf16"] | None, Allowed("fp32, bf16, or null: as they are")] = None
    """The type in which weights are gathered."""
    reduce: Annotated[Literal["fp32", "bf16"] | None, Allowed("fp32, bf16, or null: as they are")] = None
    """The type in which gradients are summed."""
    reshard: Annotated[bool, Mark.MANNER] = True
    """Free gathered weights after the forward pass; false: keep them until the backward pass."""
    offload: Annotated[bool, Mark.MANNER] = False
    """Keep the shards in the memory of the host."""

    factory: ClassVar[str] = "quorate.strategies.gangs.fsdp:FsdpFactory"
    planning: ClassVar[str] = "quorate.strategies.gangs.sharded_plan:ShardedPlan"
    sharding: ClassVar[str] = "quorate.strategies.gangs.sharded_model:sharding_of"
    is_gang: ClassVar[bool] = True

    @property
    def arithmetic(self) -> dict[str, Any]:
        return {key: value for key, value in (("gather", self.gather), ("reduce", self.reduce)) if value is not None}

    def mesh(self, workers: int) -> MeshShape:
        return MeshShape(self.replicate, self.shard or max(1, workers // (self.replicate * self.tensor)), self.tensor)

    def refusals(self) -> Iterator[Refusal]:
        yield _CLEAR
        yield _ALONE
        instead = "Use strategy: ring or ddp, or precision: bf16 or fp32."
        yield Refusal(
            "precision", "fp16", "no worker holds the sum of all gradients, by which its scale grows", instead
        )
        instead = "Leave it out, or use strategy: ring or ddp."
        yield Refusal("check_gradients", ANY, "no worker holds the sum of all gradients", instead)
        instead = "Leave spares out: another process takes the place of one that is lost."
        yield Refusal("spares", ANY, "each worker has a part of its own", instead)
        in_step = "its workers compute in step, with as many lanes each"
        yield Refusal("balance", "speed", in_step, "Leave balance out.")
        few = "the last batch of an epoch may leave lanes without a sample"
        yield Refusal("last_batch", "keep", few, "Use last_batch: drop.")
        yield Refusal("on_bad_sample", "skip", "a lane may be left without a sample", "Use on_bad_sample: fail.")
        gathered = "a model that is gathered on the way is not compiled in this version"
        yield Refusal("compile", True, gathered, "Use compile: auto.")
        one = "the largest batch is looked for on one device"
        yield Refusal("batch_size", AUTO_BATCH, one, "Use a number: `quorate plan` says what fits.")


def _checked(text: str | None, names: tuple[str, ...]) -> str | None:
    """A list of names, led by ^ where they are the ones not to be used; of some collectives alone as `allreduce:Ring`,
    with a semicolon between."""
    known = {name.lower() for name in names}
    for part in [] if text is None else text.split(";"):
        listed = part.rpartition(":")[2].removeprefix("^").split(",")
        if unknown := [name for name in listed if name.strip().lower() not in known]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(names)}; ^ before a list leaves those out.")
    return text


class NcclSpec(Section):
    """A key that is null is left to NCCL, or to its variable in your shell."""

    interface: Annotated[
        str | None,
        Field(min_length=1),
        Allowed('the beginning of the names of network interfaces, such as eth or "=eth0,eth1" or ^docker, or null'),
    ] = None
    """Network interfaces to use."""
    infiniband: Annotated[
        bool | Annotated[str, Field(min_length=1)] | None,
        Allowed('true, false, the beginning of the names of adapters, such as mlx5 or "=mlx5_0:1", or null'),
    ] = None
    """Whether to use InfiniBand or RoCE, or which adapters."""
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = None
    """Between which GPUs of a host memory is read directly: up to this distance."""
    algorithm: Annotated[
        str | None,
        Mark.MEANING,
        AfterValidator(lambda text: _checked(text, ALGORITHMS)),
        Allowed(f"a list of {one_of(list(ALGORITHMS))}, or ^ and a list of those to leave out, or null"),
    ] = None
    """The algorithms that NCCL may use."""
    protocol: Annotated[
        str | None,
        Mark.MEANING,
        AfterValidator(lambda text: _checked(text, PROTOCOLS)),
        Allowed(f"a list of {one_of(list(PROTOCOLS))}, or ^ and a list of those to leave out, or null"),
    ] = None
    """The protocols that NCCL may use."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL logs."""
    timeout: OptionalPositive = None
    """Seconds after which NCCL itself gives up waiting."""


def _workers_fill_mesh(job: Any, said: Said) -> Iterator[Problem]:
    """A sharded gang is there in full, or not at all."""
    strategy, workers, lanes = job.strategy, job.workers, job.lanes
    if not isinstance(strategy, FsdpSpec):
        return
    there, across = said("strategy"), strategy.replicate * strategy.tensor
    if not isinstance(workers, int):
        yield Problem("workers", f"strategy: fsdp{there} needs a fixed number of workers", "Write workers: 4.")
        return
    if workers % across or (strategy.shard is not None and workers != across * strategy.shard):
        parts = {key: getattr(strategy, key) for key in ("replicate", "shard", "tensor")}
        given = [f"{key} {value}" for key, value in parts.items() if key in strategy.model_fields_set and value]
        yield Problem(
            "workers",
            f"{workers} workers{said('workers')} are not the {' × '.join(given)}{there} of the mesh",
            f"Use workers: {across * (strategy.shard or 1)}, or another mesh.",
        )
        return
    groups = workers // strategy.tensor
    if lanes % groups:
        yield Problem(
            "lanes",
            f"{lanes} lanes{said('lanes')} cannot be shared evenly by {groups} groups of workers{there}, which compute "
            f"in step: {lanes} is not a multiple of {groups}",
            f"Use lanes: {-(-lanes // groups) * groups} (which changes what the job computes), or another mesh.",
        )
    if job.min_workers not in (1, workers):
        hint = "Leave min_workers out."
        yield Problem("min_workers", f"strategy: fsdp{there} trains with all {workers} workers, or not at all", hint)


def _workers_take_turns(job: Any, said: Said) -> Iterator[Problem]:
    """With synchronized batch norm all workers make the same number of passes."""
    workers, lanes = job.workers, job.lanes
    if not job.strategy.couples_passes:
        return
    what = f"strategy.sync_batch_norm{said('strategy.sync_batch_norm')}"
    if not isinstance(workers, int):
        yield Problem("workers", f"{what} needs a fixed number of workers", "Write workers: 4.")
        return
    if lanes % workers:
        yield Problem(
            "workers",
            f"{workers} workers{said('workers')} do not have equal numbers of the {lanes} lanes{said('lanes')}, which "
            f"{what} needs: {lanes} = {lanes // workers} × {workers} + {lanes % workers}",
            "Use a number of workers that divides lanes.",
        )
    if job.min_workers != workers:
        yield Problem(
            "min_workers",
            f"with {what}, {job.min_workers}{said('min_workers')} of {workers} workers would normalize by the "
            "statistics of other samples",
            f"Write min_workers: {workers}.",
        )
    for key, value in (("balance", "speed"), ("last_batch", "keep"), ("on_bad_sample", "skip")):
        if getattr(job, key) == value:
            text = f"{value}{said(key)} lets workers make different numbers of passes, in which {what} needs them all"
            yield Problem(key, text, f"Leave {key} out, or sync_batch_norm.")


_CLEAR = Refusal(
    "encrypt",
    True,
    "its tensors travel by Gloo or NCCL, which do not encrypt",
    "Use strategy: ring, or write encrypt: auto and see to the network between the hosts yourself.",
)
_ALONE = Refusal(
    "on_out_of_memory",
    "shrink",
    "its workers do not do a step again together",
    "Use on_out_of_memory: fail with a larger accumulate, or strategy: ring.",
)
_NCCL = Annotated[
    NcclSpec,
    Mark.MANNER,
    Field(description="Settings of NCCL, by which `ddp` and `fsdp` exchange tensors between GPUs. Others do without."),
]
OPTION = Option(
    kinds={"strategy": (DdpSpec, FsdpSpec)},
    keys={"job": {"nccl": (_NCCL, NcclSpec())}},
    rules={
        _workers_fill_mesh: frozenset({"strategy", "workers", "lanes", "min_workers"}),
        _workers_take_turns: frozenset(
            {"strategy", "workers", "lanes", "min_workers", "balance", "last_batch", "on_bad_sample"}
        ),
    },
    removed={
        "strategy.hierarchical": Removed(
            False, "leave it out; NCCL's own algorithms take hosts into account (nccl.algorithm)."
        ),
        "strategy.plan": Removed(
            "auto",
            "the task says how modules are split: parallelize(self, model, mesh), by torch's parallelize_module.",
        ),
        "strategy.compress.rank": Removed(
            None,
            "use compress: {dtype: bf16}, or strategy: ring with compress: {top_k: 0.01}.",
            with_it="strategy.compress",
        ),
        "strategy.compress.start": Removed(1000, "leave it out: it went with rank."),
    },
)
