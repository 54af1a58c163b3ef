from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quorate.engines.ray.hosts import Node
from quorate.engines.ray.places import PACK, SPREAD, STRICT_SPREAD, choose_node, in_words, likely_nodes

nodes_of = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(
    lambda free: [Node(f"n{number}", "", {"CPU": float(cpus)}) for number, cpus in enumerate(free)]
)
strategies = st.sampled_from([SPREAD, PACK, STRICT_SPREAD])


def placed_one_by_one(nodes: list[Node], demand: dict[str, float], workers: int, strategy: str) -> list[str]:
    placed: list[str] = []
    for _ in range(workers):
        node = choose_node(nodes, demand, placed, placed, strategy)
        if node is None:
            break
        placed.append(node)
    return placed


@given(nodes_of, st.integers(1, 3), st.integers(1, 12), strategies)
def test_no_node_gets_more_than_it_has_and_nobody_waits_while_there_is_room(
    nodes: list[Node], cpus: int, workers: int, strategy: str
) -> None:
    placed = placed_one_by_one(nodes, {"CPU": float(cpus)}, workers, strategy)
    counts = Counter(placed)
    room = {node.id: int(node.free["CPU"] // cpus) for node in nodes}
    assert all(counts[node] <= room[node] for node in counts)
    most = sum(map(bool, room.values())) if strategy == STRICT_SPREAD else sum(room.values())
    assert len(placed) == min(workers, most)
    if strategy == STRICT_SPREAD:
        assert set(counts.values()) <= {1}


@given(nodes_of, st.integers(1, 12))
def test_spread_is_even_where_there_is_room_and_pack_opens_no_node_too_many(nodes: list[Node], workers: int) -> None:
    spread = Counter(placed_one_by_one(nodes, {"CPU": 1.0}, workers, SPREAD))
    for node in nodes:
        for other in nodes:
            if spread[node.id] < node.free["CPU"]:
                assert spread[other.id] <= spread[node.id] + 1
    packed = Counter(placed_one_by_one(nodes, {"CPU": 1.0}, workers, PACK))
    full = [node for node in nodes if packed[node.id] and packed[node.id] == node.free["CPU"]]
    assert len(packed) - len(full) <= 1, "one node is filled before the next is opened"


@given(nodes_of, st.integers(1, 12), strategies)
def test_hosts_are_prepared_where_workers_will_be(nodes: list[Node], workers: int, strategy: str) -> None:
    placed = placed_one_by_one(nodes, {"CPU": 1.0}, workers, strategy)
    assert likely_nodes(nodes, {"CPU": 1.0}, workers, strategy) == list(dict.fromkeys(placed))


def test_a_node_to_avoid_and_one_without_the_resource_are_not_chosen() -> None:
    nodes = [Node("a", "", {"CPU": 8.0}), Node("b", "", {"CPU": 2.0, "GPU": 1.0}), Node("c", "", {"CPU": 1.0})]
    assert choose_node(nodes, {"CPU": 1.0}, [], [], SPREAD, avoid={"a"}) == "b"
    assert choose_node(nodes, {"CPU": 1.0, "GPU": 1.0}, [], [], PACK) == "b"
    assert choose_node(nodes, {"CPU": 1.0, "GPU": 1.0}, ["b"], ["b"], PACK) is None


def test_where_a_host_is_already_comes_first_among_equals() -> None:
    nodes = [Node("a", "", {"CPU": 4.0}), Node("b", "", {"CPU": 4.0})]
    assert choose_node(nodes, {"CPU": 1.0}, [], [], SPREAD, ready={"b"}) == "b"


def test_what_is_asked_for_in_words() -> None:
    assert in_words({"CPU": 2.0, "GPU": 0.5, "TPU": 0.0}) == "{CPU: 2, GPU: 0.5}"
    assert in_words({"CPU": 0.0}) == "nothing"
