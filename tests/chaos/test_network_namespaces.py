"""Network namespaces: who reaches whom, that many of them live side by side, and that nothing of them is left."""

import os
import socket
import subprocess
import sys
from ipaddress import IPv4Network
from itertools import permutations
from pathlib import Path

import pytest

from bad_networks import BadNetworks, why_impossible
from command import await_condition
from quorate.chaos import network_namespaces as module
from quorate.chaos.network_namespaces import inside_network
from quorate.core.errors import RequestError
from quorate.engines.local import COORDINATOR

needs_namespaces = pytest.mark.usefixtures("namespaces_allowed")

PLACES = (COORDINATOR, 0, 1, 2)


def severed(namespaces: BadNetworks) -> set[tuple[int, int]]:
    """Who does not reach whom."""
    return {pair for pair in permutations(PLACES, 2) if not namespaces.reaches(*pair, 0.05)}


def await_severed(namespaces: BadNetworks, expected: set[tuple[int, int]]) -> None:
    """On a busy machine also one that is not cut off may not be reached in so short a time: it is tried again."""
    await_condition(f"{expected or 'nobody'} to be severed", lambda: severed(namespaces) == expected, 60.0)


def await_whole(namespaces: BadNetworks) -> None:
    """The kernel takes up to a second to use a cable that is plugged in again."""
    await_severed(namespaces, set())


@needs_namespaces
def test_each_cut_severs_what_it_says_and_healing_joins_it_again() -> None:
    with BadNetworks(3) as namespaces:
        await_whole(namespaces)
        namespaces.cut(2)
        namespaces.cut(2)
        await_severed(namespaces, {pair for pair in permutations(PLACES, 2) if 2 in pair})
        namespaces.heal(2)
        await_whole(namespaces)
        namespaces.cut_from_coordinator(1)
        await_severed(namespaces, {(1, COORDINATOR), (COORDINATOR, 1)})
        namespaces.cut_link(0, 2)
        await_severed(namespaces, {(1, COORDINATOR), (COORDINATOR, 1), (0, 2), (2, 0)})
        namespaces.heal(1)
        await_severed(namespaces, {(0, 2), (2, 0)})
        namespaces.heal()
        namespaces.cut_one_way(0, 1)
        await_severed(namespaces, {(0, 1)})
        namespaces.heal(1)
        await_severed(namespaces, set())


@needs_namespaces
def test_what_gets_lost_is_found_again() -> None:
    with BadNetworks(3) as namespaces:
        await_whole(namespaces)
        namespaces.lose(1, 100.0)
        await_severed(namespaces, {pair for pair in permutations(PLACES, 2) if 1 in pair})
        namespaces.lose(1, 0.0)
        await_severed(namespaces, set())
        namespaces.heal()
        namespaces.heal()
        await_severed(namespaces, set())


@needs_namespaces
def test_the_launcher_reaches_the_hub_and_nobody_else() -> None:
    with BadNetworks(1) as namespaces:
        hub = namespaces.network_of(COORDINATOR)
        with inside_network(hub.namespace, lambda: socket.create_server((hub.address, 0))) as server:
            socket.create_connection(server.getsockname(), timeout=60).close()
        told = subprocess.run(
            ["ip", "route", "get", namespaces.network_of(0).address], capture_output=True, text=True, check=False
        )
        assert namespaces.cable not in told.stdout


@needs_namespaces
def test_many_live_side_by_side_and_are_gone_afterwards() -> None:
    before = socket.if_nameindex()
    with BadNetworks(1) as one, BadNetworks(2) as other:
        addresses = {network.address for network in (one.network_of(0), other.network_of(0), other.network_of(1))}
        assert len(addresses) == 3
        assert len({one.cable, other.cable} & {name for _, name in socket.if_nameindex()}) == 2
        assert one.reaches(0, COORDINATOR)
        assert other.reaches(0, 1)
        networks = [Path(namespaces.network_of(0).namespace) for namespaces in (one, other)]
        assert len({network.readlink() for network in networks}) == 2
    assert not {one.cable, other.cable} & {name for _, name in socket.if_nameindex()}
    assert not any(network.exists() for network in networks)
    assert len(before) <= len(socket.if_nameindex())


@needs_namespaces
def test_a_name_that_is_taken_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE", IPv4Network("198.18.7.0/24"))
    with BadNetworks(1) as namespaces:
        assert namespaces.cable == "quorate-0"
        with pytest.raises(RequestError, match=r"all of 198\.18\.7\.0/24 is in use"), BadNetworks(1):
            pass


@pytest.mark.parametrize("count", [0, 201])
def test_a_count_that_cannot_be(count: int) -> None:
    with pytest.raises(RequestError, match=rf"1 to 200 namespaces, not {count}"):
        BadNetworks(count)


@needs_namespaces
def test_a_part_that_cannot_get_lost() -> None:
    with BadNetworks(1) as namespaces, pytest.raises(RequestError, match="101 percent"):
        namespaces.lose(0, 101)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.core.processes.SYSTEM_FOLDERS", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_impossible() == "`ip` is not installed, which namespaces are made with: install iproute2."


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_whoever_is_not_root_is_told_so() -> None:
    code = "import os; from bad_networks import why_impossible as w; os.setuid(65534); print(w())"
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("the kernel gives no network namespace (Operation not permitted): it is for root")
