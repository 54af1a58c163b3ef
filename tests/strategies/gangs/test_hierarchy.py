"""Sums in stages: within hosts, between them, and back. Addresses say that members are on several hosts."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from quorate.core.errors import GenerationOver, LinkError
from quorate.core.generation import Member
from quorate.lanes.hosting import host_lanes
from quorate.reduce.connect import Endpoint, connect
from quorate.strategies.gangs.hierarchy import HierarchicalGroup, hosts_of, summing_group
from quorate.strategies.gangs.process_group import ProcessGroup
from strategies.test_strategy_contract import Kind, endpoints, error_of

CPU = torch.device("cpu")


def elsewhere(endpoint: Endpoint, hosts: str) -> Endpoint:
    """Its members on hosts, a letter for each: they tell no address of this one."""
    numbers = {host: number for number, host in enumerate(sorted(set(hosts)), 1)}
    members = tuple(
        replace(member, address=member.address.replace("127.0.0.1", f"127.0.0.{numbers[host]}"))
        for member, host in zip(endpoint.generation.members, hosts, strict=True)
    )
    return replace(endpoint, generation=replace(endpoint.generation, members=members))


@contextmanager
def connected(hosts: str) -> Iterator[list[ProcessGroup]]:
    with ExitStack() as stack:
        ours = endpoints(Kind("tcp", len(hosts)), stack, host_lanes(len(hosts), len(hosts)))

        def join(endpoint: Endpoint) -> ProcessGroup:
            links, _ = connect(endpoint, ())
            stack.callback(links.close)
            return summing_group(elsewhere(endpoint, hosts), links, CPU, None, hierarchical=True)

        with ThreadPoolExecutor(len(hosts)) as threads:
            groups = list(threads.map(join, ours))
        for group in groups:
            stack.callback(group.close)
        yield groups


def everywhere(groups: list[ProcessGroup], work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, range(len(groups))))


@pytest.mark.parametrize("hosts", ["AAB", "ABB", "ABAB", "AABBC"])
def test_every_member_has_the_same_sum_of_all(hosts: str) -> None:
    def sums(position: int) -> list[torch.Tensor]:
        tensors = [torch.full((size,), 0.1 * (position + 1)) for size in (1, 1000, 3)]
        group = groups[position]
        for step in (1, 2):
            group.begin_step(step)
            for tensor in tensors:
                group.begin_sum(tensor)
            group.wait()
        return tensors

    with connected(hosts) as groups:
        assert all(isinstance(group, HierarchicalGroup) for group in groups)
        # Only the first of each host talks to other hosts.
        firsts = [hosts.index(host) == position for position, host in enumerate(hosts)]
        assert [group._between is not None for group in groups] == firsts  # type: ignore[attr-defined]
        everyone = everywhere(groups, sums)
    expected = sum(0.1 * (position + 1) for position in range(len(hosts))) * len(hosts)
    for tensors in everyone:
        assert all(torch.equal(one, other) for one, other in zip(tensors, everyone[0], strict=True))
        assert all(torch.allclose(tensor, torch.full_like(tensor, expected)) for tensor in tensors)


@pytest.mark.parametrize("hosts", ["AAA", "AB"])
def test_where_it_is_of_no_use_there_is_one_stage(hosts: str) -> None:
    with connected(hosts) as groups:
        assert [type(group) for group in groups] == [ProcessGroup] * len(hosts)


def test_whoever_leaves_ends_the_wait_of_all_others() -> None:
    def work(position: int) -> BaseException | None:
        if position == 2:
            groups[2].close()
            groups[2]._links.close()
            return None
        groups[position].begin_sum(torch.zeros(3))
        return error_of(groups[position].wait)

    with connected("AABB") as groups:
        left = everywhere(groups, work)
    assert all(isinstance(error, LinkError) for position, error in enumerate(left) if position != 2), left


def test_a_member_that_hangs_keeps_nobody_from_closing() -> None:
    """Member 1 does not come to the sum: 0 waits for it within the host, and 2 for 0 between them."""

    def work(position: int) -> BaseException | None:
        if position == 1:
            return None
        groups[position].begin_sum(torch.zeros(3))
        return error_of(groups[position].wait)

    with connected("AAB") as groups, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(work, position) for position in (0, 2)]
        while not groups[0]._within._guarded or not groups[2]._between._guarded:  # type: ignore[attr-defined]
            time.sleep(0.01)
        for group in (groups[0], groups[2]):
            group._links.close()  # first, as a strategy does: whoever asks them who is gone is not kept by that either
            group.close()
        assert isinstance(waiting[0].result(60), GenerationOver)
        assert isinstance(waiting[1].result(60), LinkError)


def test_hosts_are_told_apart_by_what_members_say_of_them() -> None:
    said = [("a:1", "h1/x"), ("b:2", "h2/y"), ("b:3", "h1/z"), ("c:4", ""), ("c:5", "")]
    members = [Member(number, address, range(0), local) for number, (address, local) in enumerate(said)]
    assert hosts_of(members) == [(0, 2), (1,), (3, 4)]
