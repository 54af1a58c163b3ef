"""What is installed, with which interpreter a system runs, and how its script is started."""

import sys
from pathlib import Path

import pytest

from benchmarks.allreduce import GLOO, OPENMPI, SHM, AllReduce, repeats_for
from benchmarks.interpreters import (
    Interpreters,
    effective_rights,
    installed_version,
    mpirun,
    rights_in,
    shared_memory_layer,
)
from benchmarks.machine import Machine, processor_name
from benchmarks.overlap import OVERLAP
from benchmarks.step import FABRIC, HAND_WRITTEN, QUORATE
from benchmarks.system import Installed, absence_of
from quorate.core.errors import RequestError

ALL = Installed({"lightning": "2", "torch": "2.13", "mpi4py": "4", "numpy": "2"}, frozenset({"mpirun"}), "2.13")


def test_a_system_that_has_all_it_needs_is_measured() -> None:
    assert [absence_of(system, ALL) for system in (SHM, GLOO, OPENMPI, FABRIC, HAND_WRITTEN)] == [None] * 5


def test_a_missing_program_is_told_with_what_installs_it() -> None:
    absence = absence_of(OPENMPI, Installed(ALL.packages, frozenset(), "2.13"))
    assert absence is not None
    assert (absence.what, absence.reason) == ("openmpi", "mpirun is not installed")
    assert absence.command.startswith("apt install")


def test_programs_of_one_package_are_told_once() -> None:
    absence = absence_of(OVERLAP, Installed({}, frozenset(), "2.13"))
    assert absence is not None
    assert (absence.reason, absence.command) == ("ip and tc are not installed", "apt install iproute2")


def test_whoever_is_not_root_is_told_what_to_type() -> None:
    tools = frozenset({"ip", "tc"})
    absence = absence_of(OVERLAP, Installed({}, tools, "2.13", frozenset({"CAP_NET_ADMIN"})))
    assert absence is not None
    assert absence.reason == "it needs root: CAP_SYS_ADMIN is missing"
    assert "sudo" in absence.command
    assert "--cap-add SYS_ADMIN" in absence.command
    assert not absence.is_ours, "that is no failure of the benchmark"
    both = frozenset({"CAP_NET_ADMIN", "CAP_SYS_ADMIN"})
    assert absence_of(OVERLAP, Installed({}, tools, "2.13", both)) is None


@pytest.mark.parametrize(
    ("status", "rights"),
    [
        ("Name:\tpython\nCapEff:\t000001ffffffffff\n", {"CAP_NET_ADMIN", "CAP_SYS_ADMIN"}),
        ("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000001000\n", {"CAP_NET_ADMIN"}),
        ("CapEff:\t00000000a80425fb\n", set()),  # root in a container
        ("Name:\tpython\n", set()),
    ],
)
def test_rights_are_those_that_are_in_effect(status: str, rights: set[str]) -> None:
    assert rights_in(status) == rights
    assert effective_rights() <= {"CAP_NET_ADMIN", "CAP_SYS_ADMIN"}


def test_missing_packages_are_told_with_what_installs_them() -> None:
    absence = absence_of(FABRIC, Installed({}, frozenset(), "2.13"))
    assert absence is not None
    assert absence.reason == "lightning and torch are not installed"
    assert absence.command == "make bench-setup, or pip install 'quorate[bench]'"
    assert not absence.is_ours


def test_a_peer_with_another_torch_is_not_compared() -> None:
    absence = absence_of(FABRIC, Installed(ALL.packages, frozenset(), "2.14"))
    assert absence is not None
    assert absence.reason == "its torch is 2.13 and Quorate's is 2.14, which cannot be compared"


def test_only_who_needs_packages_runs_with_the_interpreter_of_the_peers() -> None:
    interpreters = Interpreters("ours", "theirs")
    assert [interpreters.of(system) for system in (QUORATE, HAND_WRITTEN, FABRIC)] == ["ours", "ours", "theirs"]


def test_the_interpreter_of_the_peers_is_the_given_one_or_lies_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert Interpreters.find(None).peers == sys.executable
    beside = tmp_path / ".venv-bench" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(sys.executable)
    assert Interpreters.find(None).peers == str(beside)
    assert Interpreters.find(Path(sys.executable)).peers == sys.executable


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--peers: .*absent is not a program"):
        Interpreters.find(tmp_path / "absent")
    with pytest.raises(RequestError, match="--peers: /bin/true is not a Python"):
        Interpreters("ours", "/bin/true").look([FABRIC])


def test_packages_are_found_by_their_metadata() -> None:
    found = Interpreters(sys.executable, sys.executable).look([FABRIC, OPENMPI])
    assert found.packages["torch"] == found.torch == installed_version("torch")
    assert found.packages["numpy"] == installed_version("numpy")
    assert installed_version("no-such-package") == "unknown"


@pytest.mark.parametrize(
    ("version", "layer"),
    [("mpirun (Open MPI) 4.1.4", "vader"), ("mpirun (Open MPI) 5.0.3", "sm"), ("prterun 3.0", "vader"), ("", "sm")],
)
def test_shared_memory_has_another_name_in_each_release(version: str, layer: str) -> None:
    assert shared_memory_layer(version) == layer
    assert mpirun(4, version)[-1] == f"self,{layer}"


def test_large_gradients_are_exchanged_less_often() -> None:
    assert [repeats_for(size) for size in (1024, 25 * 2**20, 2**30)] == [200, 20, 8]


def test_a_turn_of_the_all_reduce_exchanges_all_sizes() -> None:
    bench = AllReduce([2, 4], [1024, 4096], [SHM, OPENMPI], repeats=7, mpi_version="4.1")
    turns = bench.turns()
    assert [turn.label for turn in turns] == [
        "quorate-shm, 2 processes",
        "openmpi, 2 processes",
        "quorate-shm, 4 processes",
        "openmpi, 4 processes",
    ]
    assert turns[0].order["sizes"] == [1024, 4096]
    assert turns[0].order["repeats"] == [7, 7]
    assert (turns[0].prefix, turns[3].prefix[:3]) == ((), ("mpirun", "-n", "4"))


def test_a_busy_machine_is_told() -> None:
    quiet = Machine("cpu", 2, 10**9, "6.1", "3.11", "2.13", "0.1", load=0.4)
    assert quiet.warning == ""
    assert "load 3 on 2 cores" in Machine("cpu", 2, 10**9, "6.1", "3.11", "2.13", "0.1", load=3.0).warning
    assert quiet.sentence == "2 cores (cpu), 1 GB, Linux 6.1, Python 3.11, torch 2.13, Quorate 0.1"
    assert Machine.here().cores >= 1


def test_a_processor_without_a_name_is_told_by_its_kind() -> None:
    assert processor_name("processor : 0\nmodel name\t: A   Fast  One\n") == "A Fast One"
    assert processor_name("CPU implementer : 0x41\n")
