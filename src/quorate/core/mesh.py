"""How the workers of a sharded gang stand to each other: replicas, each cut into shards, and these cut across."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """`replicate` × `shard` × `tensor` workers, by their numbers: the last dimension counts first, so that those who
    exchange most are neighbours."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def groups(self) -> int:
        """How many read data of their own: whoever stands in one tensor dimension reads the same."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Into how many parts the state is cut; every replica holds all of them."""
        return self.shard * self.tensor

    def part(self, worker: int) -> int:
        """Which part of the state a worker holds."""
        return worker % self.parts

    def lanes_of(self, worker: int, lanes: int) -> range:
        """The lanes that a worker computes."""
        each, group = lanes // self.groups, worker // self.tensor
        return range(group * each, (group + 1) * each)

    def told_by(self, worker: int, lanes: int) -> range:
        """The lanes that it speaks for: the first of those who compute them does, the others for none."""
        hosted = self.lanes_of(worker, lanes)
        return hosted if worker % self.tensor == 0 else range(hosted.stop, hosted.stop)

    def __str__(self) -> str:
        return " × ".join(
            f"{name} {size}"
            for name, size in (("replicate", self.replicate), ("shard", self.shard), ("tensor", self.tensor))
            if size > 1 or (name == "shard" and self.size == 1)
        )
