"""Where blocks lie: balanced, the same everywhere, and hardly moved by a server that comes or goes."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from quorate.strategies.servers.placement import Holders, place

BLOCKS_EACH = 200
SEEDS = range(3)


def names(seed: int, count: int) -> list[str]:
    """Those of a model, which differ in a digit or two."""
    return [f"model{seed}.layers.{index // 4}.{index % 4}.weight" for index in range(count)]


def loads(placed: Sequence[Holders], rank: int = 0) -> list[int]:
    return list(Counter(holders[rank] for holders in placed).values())


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 8, 12, 16])
def test_every_server_has_its_share_within_ten_percent(servers: int) -> None:
    for seed in SEEDS:
        placed = place(names(seed, BLOCKS_EACH * servers), range(servers), 2)
        for rank in range(min(2, servers)):
            share = loads(placed, rank)
            assert len(share) == servers
            assert 0.9 * BLOCKS_EACH <= min(share) <= max(share) <= 1.1 * BLOCKS_EACH


@pytest.mark.parametrize("servers", [2, 3, 4, 5, 8, 16])
def test_a_server_more_or_less_moves_about_its_share(servers: int) -> None:
    moved = []
    for seed in SEEDS:
        blocks = names(seed, BLOCKS_EACH * servers)
        all_of_them = place(blocks, range(servers))
        lost = seed % servers
        rest = place(blocks, [server for server in range(servers) if server != lost])
        # The same two placements, read in either direction, are of one that goes and of one that comes.
        changed = [before != after for before, after in zip(all_of_them, rest, strict=True)]
        assert all(changed[block] for block, holders in enumerate(all_of_them) if holders == (lost,))
        moved.append(sum(changed) / len(blocks) * servers)
    assert max(moved) < 1.4
    assert sum(moved) / len(moved) < 1.3


def test_replicas_are_on_other_servers() -> None:
    placed = place(names(0, 300), range(5), 3)
    assert all(len(set(holders)) == 3 for holders in placed)
    assert {len(holders) for holders in place(names(0, 9), [7, 4], 3)} == {2}
    assert set(place(names(0, 9), [4], 2)) == {(4,)}


def test_a_replica_mostly_takes_over() -> None:
    blocks = names(0, 800)
    before, after = place(blocks, range(4), 2), place(blocks, range(3), 2)
    orphans = [block for block, holders in enumerate(before) if holders[0] == 3]
    taken = sum(after[block][0] == before[block][1] for block in orphans)
    assert taken > 0.6 * len(orphans)


def test_shares_are_of_bytes_where_sizes_are_told() -> None:
    draw = random.Random(1)
    sizes = [draw.choice([4, 1024, 4 * 1024, 1024 * 1024]) * draw.randint(1, 9) for _ in range(400)]
    placed = place(names(0, 400), range(4), 2, sizes)
    for rank in range(2):
        held: Counter[int] = Counter()
        for holders, size in zip(placed, sizes, strict=True):
            held[holders[rank]] += size
        assert max(held.values()) < 1.05 * sum(sizes) / 4


def test_a_block_larger_than_all_others_together_has_a_place_too() -> None:
    placed = place(["embedding", *names(0, 20)], range(3), 2, [10**9, *[100] * 20])
    primaries = Counter(primary for primary, _ in placed)
    assert primaries[placed[0][0]] == 1
    assert len(primaries) == 3


def test_the_order_of_servers_and_blocks_makes_no_difference() -> None:
    blocks = names(0, 100)
    shuffled = random.Random(3).sample(blocks, len(blocks))
    by_name = dict(zip(blocks, place(blocks, [3, 1, 2], 2), strict=True))
    assert dict(zip(shuffled, place(shuffled, [1, 2, 3], 2), strict=True)) == by_name


def test_another_process_places_alike() -> None:
    imported = "from quorate.strategies.servers.placement import place"
    code = f"{imported}; print(place([f'b{{i}}' for i in range(50)], [5, 6, 7], 2))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {str(place([f"b{index}" for index in range(50)], [5, 6, 7], 2))}


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="no server"):
        place(["a"], [])
    with pytest.raises(ValueError, match="one holder at least, not 0"):
        place(["a"], [0], 0)
    with pytest.raises(ValueError, match="1 blocks, and the sizes of 2"):
        place(["a"], [0], 1, [1, 2])
