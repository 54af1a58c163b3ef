"""What travels between which worker and which server in a mode with units: the same on every member."""

from collections.abc import Sequence

from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import dtype_of
from quorate.strategies.servers.parcels import Parcel, plan_parcels


class UnitPlan:
    """Of each server, by its position: the blocks that it leads as their primary and those in which it follows others.

    `holders` has for each block the positions of the servers that hold it, the primary first. A worker pushes to a
    server all blocks that it holds, and pulls those that it leads. The first server is the hub.
    """

    def __init__(self, plan: Sequence[Bucket], holders: Sequence[Sequence[int]], servers: Sequence[int]) -> None:
        self.servers = tuple(servers)
        self.hub = self.servers[0]
        self.led: dict[int, tuple[int, ...]] = {}
        self.followed: dict[int, dict[int, tuple[int, ...]]] = {}
        self.pushed: dict[int, tuple[Parcel, ...]] = {}
        self.published: dict[int, tuple[Parcel, ...]] = {}
        itemsizes = [dtype_of(bucket).itemsize for bucket in plan]
        for server in self.servers:
            held = {block for block, places in enumerate(holders) if server in places}
            self.led[server] = tuple(block for block in sorted(held) if holders[block][0] == server)
            follows: dict[int, list[int]] = {}
            for block in sorted(held.difference(self.led[server])):
                follows.setdefault(holders[block][0], []).append(block)
            self.followed[server] = {primary: tuple(blocks) for primary, blocks in sorted(follows.items())}
            self.pushed[server] = plan_parcels(plan, itemsizes, held, lie_in_buckets=False)
            self.published[server] = plan_parcels(plan, itemsizes, self.led[server], lie_in_buckets=False)

    def held(self, server: int) -> tuple[int, ...]:
        """All blocks of a server."""
        return tuple(sorted((*self.led[server], *(b for blocks in self.followed[server].values() for b in blocks))))
