"""What one member has, in the memory of those that need it: on the ring and in shared memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.rings import memory_rings
from collectives.test_shared_memory_reduction import plan_of, reductions
from quorate.collectives import shared_memory
from quorate.collectives.reduction import Reduction
from quorate.core.errors import LinkError

ROOM = 4096  # what passes through shared memory at once


def content(size: int, seed: int) -> bytes:
    return bytes((seed + at * 7) % 256 for at in range(size))


def broadcast_everywhere(
    reductions: list[Reduction], sizes: list[int], root: int, receivers: set[int]
) -> list[list[bytes]]:
    """What each member has in its buffers afterwards, for each of several broadcasts in a row."""

    def work(position: int) -> list[bytes]:
        found = []
        for index, size in enumerate(sizes):
            buffer = bytearray(content(size, index)) if position == root else bytearray(size)
            reductions[position].broadcast(1, index, root, memoryview(buffer), receivers)
            found.append(bytes(buffer))
        # Whatever comes next finds everybody in step.
        assert reductions[position].gather(2, 0, bytes([position])) == tuple(
            bytes([each]) for each in range(len(reductions))
        )
        return found

    with ThreadPoolExecutor(len(reductions)) as threads:
        return list(threads.map(work, range(len(reductions))))


def check(reductions: list[Reduction], sizes: list[int], root: int, receivers: set[int]) -> None:
    found = broadcast_everywhere(reductions, sizes, root, receivers)
    sent = [content(size, index) for index, size in enumerate(sizes)]
    for position in {root, *receivers}:
        assert found[position] == sent


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.lists(st.integers(0, 300), max_size=4))
def test_on_the_ring_whoever_needs_it_has_it(data: st.DataObject, members: int, sizes: list[int]) -> None:
    root = data.draw(st.integers(0, members - 1))
    receivers = data.draw(st.sets(st.integers(0, members - 1)))
    with memory_rings(max(members, 2), members) as rings:
        check(list(rings), sizes, root, receivers)


@pytest.mark.parametrize("receivers", [{0}, {2}, {0, 2}, set(), {0, 1, 2}])
@pytest.mark.parametrize("size", [0, 1, ROOM // 2, ROOM // 2 + 1, 2 * ROOM + 17])
def test_in_shared_memory_whoever_needs_it_has_it(
    receivers: set[int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "STAGING", ROOM)
    with reductions(3, 3, plan_of(11)) as met:
        check(list(met), [size, 5, size], 1, receivers)


def test_few_gradients_do_not_cut_a_state_into_many_pieces() -> None:
    with reductions(2, 2, plan_of(3)) as met:
        assert [len(reduction.memory.staging) for reduction in met] == [shared_memory.STAGING] * 2
        assert [bucket.numel() for bucket in met[0].memory.total] == [3]


def test_on_the_ring_who_comes_after_the_last_receiver_is_sent_nothing() -> None:
    with memory_rings(4, 4) as rings:
        # Nobody else has to be there.
        with ThreadPoolExecutor(2) as threads:
            buffers = [bytearray(b"state"), bytearray(5)]
            list(threads.map(lambda at: rings[at].broadcast(1, 0, 0, memoryview(buffers[at]), {1}), range(2)))
        assert buffers[1] == b"state"


@pytest.mark.parametrize("lost", [0, 1], ids=["the root", "one that passes it on"])
def test_whoever_waits_for_one_that_is_gone_learns_of_it(lost: int) -> None:
    def gone(reductions: list[Reduction]) -> Callable[[int], None]:
        def work(position: int) -> None:
            if position == lost:
                reductions[position].close()
            else:
                with pytest.raises(LinkError):
                    for index in range(50):
                        reductions[position].broadcast(1, index, 0, memoryview(bytearray(2**16)), {2})

        return work

    with memory_rings(3, 3) as rings, ThreadPoolExecutor(3) as threads:
        list(threads.map(gone(list(rings)), range(3)))
    with reductions(3, 3, plan_of(11)) as met, ThreadPoolExecutor(3) as threads:
        list(threads.map(gone(list(met)), range(3)))
