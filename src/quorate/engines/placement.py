"""Which worker goes to which node: pure decisions on what is free where."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from quorate.engines.cluster import Node

SPREAD, PACK, STRICT_SPREAD = "spread", "pack", "strict_spread"


def fits(node: Node, demand: Mapping[str, float], used: int = 0) -> bool:
    """Whether a node has room for one more, besides `used` that its account does not show yet."""
    return all(node.free.get(what, 0.0) >= amount * (used + 1) for what, amount in demand.items() if amount > 0)


def choose_node(
    nodes: Sequence[Node],
    demand: Mapping[str, float],
    placed: Sequence[str],
    pending: Sequence[str],
    strategy: str,
    avoid: Collection[str] = (),
    ready: Collection[str] = (),
) -> str | None:
    """The node for one more worker; None where no node has room.

    `placed` are the nodes of the workers that there are, once for each, and `pending` those of them that the free
    resources do not show yet. Among equals those that are `ready`, since a host is there already, come first.
    """
    workers, unshown = Counter(placed), Counter(pending)
    able = [
        node
        for node in nodes
        if node.id not in avoid
        and fits(node, demand, unshown[node.id])
        and not (strategy == STRICT_SPREAD and workers[node.id])
    ]
    if not able:
        return None
    crowd = -1 if strategy == PACK else 1

    def rank(node: Node) -> tuple[float, bool, float, str]:
        return crowd * workers[node.id], node.id not in ready, -node.free.get("CPU", 0.0), node.id

    return min(able, key=rank).id


def likely_nodes(
    nodes: Sequence[Node], demand: Mapping[str, float], workers: int, strategy: str, most: int = 16
) -> list[str]:
    """The nodes that so many workers will probably be placed on, in the order of their use."""
    chosen: list[str] = []
    for _ in range(workers):
        node = choose_node(nodes, demand, chosen, chosen, strategy)
        if node is None or len(set(chosen) | {node}) > most:
            break
        chosen.append(node)
    return list(dict.fromkeys(chosen))


def in_words(demand: Mapping[str, float]) -> str:
    """What one worker asks for, or what a node has of that, as in ``{CPU: 2, GPU: 1}``."""
    words = [f"{what}: {amount:g}" for what, amount in demand.items() if amount > 0]
    return f"{{{', '.join(words)}}}" if words else "nothing"
