"""The mesh of a sharded gang, for torch: it is made once in a process, and outlives generations.

FSDP2's modules, DTensors and optimizers keep the process groups of the mesh that they were made with. So these are
groups of our own, made before anybody is connected; each generation gives them others, by Gloo or NCCL, to do the work.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.reduction import Reduction
from quorate.core.errors import GenerationOver
from quorate.core.generation import MeshShape
from quorate.strategies.gangs.process_group import ProcessGroup

BACKEND = "quorate"
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
PARTS = "shard_tensor"
"""The dimensions of a mesh by name; the last is that of all parts of the state together."""

_KINDS = ("gather", "reduce", "scatter", "to_all", "toall", "broadcast", "barrier", "send", "recv")
_COLLECTIVES = [name for name in dir(dist.ProcessGroup) if name[:2] != "__" and any(kind in name for kind in _KINDS)]
"""Under all the names that they have had: which one DTensor and FSDP2 use depends on the version of torch."""


class LastingGroup(dist.ProcessGroup):
    """A process group that has the group of the present generation do what it is asked."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.ranks = ranks
        self.present: ProcessGroup | None = None
        self._name = self._description = ""

    def begin(self, collective: str, *arguments: Any) -> Work:
        if self.present is None:
            raise GenerationOver(f"{collective} was called between two generations")
        return self.present.begin(collective, *arguments)

    # What torch looks for in a group that is written in Python.

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description


def _forwarded(collective: str) -> Callable[..., Work]:
    def begin(self: LastingGroup, *arguments: Any) -> Work:
        return self.begin(collective, *arguments)

    return begin


for _name in _COLLECTIVES:
    setattr(LastingGroup, _name, _forwarded(_name))


class GangWorld:
    """The mesh of a process, which is one of `shape`'s workers. There is one world in a process."""

    def __init__(self, shape: MeshShape, worker: int, device: torch.device) -> None:
        self.shape = shape
        self.worker = worker
        self.device = device
        self._groups: list[LastingGroup] = []
        dist.Backend.register_backend(BACKEND, self._made, extended_api=True, devices=[device.type])
        # A store of our own: nobody else is there yet, and nobody need be.
        dist.init_process_group(BACKEND, store=HashStore(), rank=worker, world_size=shape.size)
        sizes = (shape.replicate, shape.shard, shape.tensor)
        self.mesh: DeviceMesh = init_device_mesh(device.type, sizes, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
        self.parts: dist.ProcessGroup = self.mesh[SHARD, TENSOR]._flatten(PARTS).get_group()

    @property
    def data_mesh(self) -> DeviceMesh:
        """Those who read data of their own, for FSDP2: a second dimension stands for replicas of shards."""
        return self.mesh[REPLICATE, SHARD] if self.shape.replicate > 1 else self.mesh[SHARD]

    def connect(self, endpoint: Endpoint, links: Reduction, timeout: float | None = None) -> tuple[ProcessGroup, ...]:
        """Have the groups work in a generation; those that do their work, for whoever ends it."""
        by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
        try:
            for group in self._groups:
                if group.ranks not in by_ranks:
                    # By position, which is the rank: a gang is complete, and in the order of its workers.
                    by_ranks[group.ranks] = ProcessGroup(endpoint, links, self.device, timeout, group.ranks)
                group.present = by_ranks[group.ranks]
        except BaseException:
            self.disconnect()
            for made in by_ranks.values():
                made.close()
            raise
        return tuple(by_ranks.values())

    def complete(self) -> None:
        """Return when all that was begun is there, on the device too; raise where that will never be."""
        for present in {id(group.present): group.present for group in self._groups}.values():
            if present is None:
                raise GenerationOver("the links of this generation are closed")
            present.complete()

    def disconnect(self) -> None:
        """No generation is under way any more."""
        for group in self._groups:
            group.present = None

    def close(self) -> None:
        """Let the process forget it, so that another may be made."""
        self.disconnect()
        self._groups.clear()
        dist.destroy_process_group()
        dist.Backend._plugins.pop(BACKEND.upper(), None)

    def _made(self, options: Any, _: object) -> LastingGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        group = LastingGroup(ranks, options.group_rank)
        self._groups.append(group)
        return group
