"""Which server holds which block: consistent hashing with virtual nodes and bounded loads.

Each server has many points on a ring of hashes, its virtual nodes. A block belongs to the server whose point comes next
after its own hash, so that a server which comes or goes takes or leaves only the blocks next to its points. Hashes
alone would give some servers a fifth more than others at 200 blocks each. So a server takes no more once it has its
fair share, and the block goes on to the next server of the ring (Mirrokni, Thorup, Zadimoghaddam 2018).

A pure function of names, sizes and servers: every member of a generation finds the same without a word.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

import xxhash

VIRTUAL_NODES = 512
"""Points of each server: the more, the fewer blocks move only because the loads are bounded."""

SLACK = 0.005
"""How much more than its fair share a server takes."""

Holders = tuple[int, ...]
"""The servers that hold a block: its primary, then its replicas."""


def place(
    blocks: Sequence[str], servers: Iterable[int], replicas: int = 1, sizes: Sequence[int] | None = None
) -> tuple[Holders, ...]:
    """The holders of each block: so many different servers, or all if there are fewer.

    `sizes` are the blocks' bytes; without them all blocks count alike. Shares are bounded by size, the largest blocks
    first, and no server exceeds its share by more than the last block that it took. Primaries and replicas of each rank
    are bounded by themselves: a server works for all that it holds.
    """
    present = sorted(set(servers))
    if not present:
        raise ValueError("there is no server that could hold a block")
    if replicas < 1:
        raise ValueError(f"a block has one holder at least, not {replicas}")
    weights = [1] * len(blocks) if sizes is None else [max(1, size) for size in sizes]
    if len(weights) != len(blocks):
        raise ValueError(f"there are {len(blocks)} blocks, and the sizes of {len(weights)}")
    # The points of all servers, in order.
    points = sorted((_hash(f"server {one} node {node}"), one) for one in present for node in range(VIRTUAL_NODES))
    share = (1 + SLACK) * sum(weights) / len(present)
    ranks = min(replicas, len(present))
    loads = [dict.fromkeys(present, 0) for _ in range(ranks)]
    hashes = [_hash(f"block {name}") for name in blocks]
    holders: list[Holders] = [()] * len(blocks)
    for block in sorted(range(len(blocks)), key=lambda block: (-weights[block], hashes[block], blocks[block])):
        walk = _walk(points, hashes[block], len(present))
        chosen: list[int] = []
        for load in loads:
            # A replica is on one of the servers behind the primary, as far as these have room for it.
            start = walk.index(chosen[-1]) + 1 if chosen else 0
            left = [server for server in walk[start:] + walk[:start] if server not in chosen]
            server = next((server for server in left if load[server] < share), None)
            if server is None:
                server = min(left, key=load.__getitem__)
            load[server] += weights[block]
            chosen.append(server)
        holders[block] = tuple(chosen)
    return tuple(holders)


def _walk(points: list[tuple[int, int]], start: int, servers: int) -> list[int]:
    """All servers, in the order in which a walk round the ring first comes to a point of theirs."""
    found: dict[int, None] = {}
    position = bisect_right(points, start, key=itemgetter(0))
    while len(found) < servers:
        found.setdefault(points[position % len(points)][1])
        position += 1
    return list(found)


def _hash(text: str) -> int:
    """The same in every process and on every machine, which Python's own is not."""
    return xxhash.xxh3_64_intdigest(text.encode())
