from pathlib import Path
from typing import Any

import pytest

from quorate.doctor.nccl import Network, check_nccl, is_meant, settings_of
from quorate.doctor.report import Level
from quorate.doctor.software import TorchFacts
from quorate.strategies.gangs.option import NcclSpec

NOWHERE = Network({"lo": True}, {})
ONE_GPU = TorchFacts(version="2.11.0", repeats_bits=True, cuda=("H200",), nccl="2.28.9")
HOST = Network({"lo": True, "eth0": True, "eth1": False}, {"mlx5_0": True, "mlx5_1": False})


def found(facts: TorchFacts, network: Network = HOST, environment: Any = None, **keys: Any) -> dict[str, Any]:
    return {each.name: each for each in check_nccl(facts, network, NcclSpec(**keys), environment or {})}


def test_without_a_gpu_it_is_said_that_there_is_nothing_to_check() -> None:
    (only,) = found(TorchFacts(version="2.13.0+cpu", repeats_bits=True)).values()
    assert only.level is Level.NOTE
    assert only.text.startswith("nothing to check: there is no GPU here")
    assert not found(TorchFacts(error="gone"))


def test_one_gpu_has_no_way_to_another() -> None:
    checks = found(ONE_GPU, NOWHERE)
    assert checks["nccl"].text == "2.28.9; with one GPU there is no way between GPUs here to check"
    assert checks["nccl interface"].level is Level.NOTE
    assert checks["nccl infiniband"].text == "no adapter here: hosts exchange over TCP, and there is nothing to check"


def test_gpus_without_a_direct_way_are_named() -> None:
    facts = {"version": "2.11.0", "repeats_bits": True, "cuda": ("H200",) * 3, "nccl": "2.28.9"}
    assert found(TorchFacts(**facts))["nccl"].level is Level.OK  # type: ignore[arg-type]
    apart = found(TorchFacts(**facts, apart=((0, 2),)))["nccl"]  # type: ignore[arg-type]
    assert apart.level is Level.WARNING
    assert "1 pair of 3 GPUs cannot reach each other directly: 0 and 2" in apart.text
    assert "nvidia-smi topo" in apart.remedy


@pytest.mark.parametrize(
    ("keys", "check", "level", "words"),
    [
        ({}, "nccl interface", Level.OK, "eth0: NCCL takes the first"),
        ({"interface": "eth"}, "nccl interface", Level.OK, "eth0: as nccl.interface: eth says"),
        ({"interface": "ib0"}, "nccl interface", Level.PROBLEM, "no interface here; there are lo, eth0, eth1"),
        ({"interface": "=eth1"}, "nccl interface", Level.PROBLEM, "eth1 is down"),
        ({}, "nccl infiniband", Level.OK, "mlx5_0: active"),
        ({"infiniband": "mlx5_1"}, "nccl infiniband", Level.WARNING, "mlx5_1: no port is active"),
        ({"infiniband": "mlx4"}, "nccl infiniband", Level.PROBLEM, "there are mlx5_0, mlx5_1"),
        ({"infiniband": False}, "nccl infiniband", Level.NOTE, "although mlx5_0 is active"),
    ],
    ids=str,
)
def test_what_a_job_names_must_be_there(keys: dict[str, Any], check: str, level: Level, words: str) -> None:
    finding = found(ONE_GPU, **keys)[check]
    assert (finding.level, words in finding.text) == (level, True), finding


def test_an_adapter_that_is_asked_for_must_be_there() -> None:
    finding = found(ONE_GPU, NOWHERE, infiniband=True)["nccl infiniband"]
    assert finding.level is Level.PROBLEM
    assert "--device /dev/infiniband" in finding.remedy


def test_variables_of_the_shell_count_where_the_job_says_nothing() -> None:
    shell = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_DISABLE": "1", "NCCL_BUFFSIZE": "8388608", "PATH": "/bin"}
    checks = found(ONE_GPU, environment=shell)
    assert checks["nccl interface"].level is Level.PROBLEM
    assert checks["nccl infiniband"].text.startswith("switched off")
    assert "jobs that do not say `nccl.interface`" in checks["NCCL_SOCKET_IFNAME"].text
    assert "as it is" in checks["NCCL_BUFFSIZE"].text
    assert "PATH" not in checks
    assert found(ONE_GPU, environment=shell, interface="eth0")["nccl interface"].level is Level.OK


@pytest.mark.parametrize(
    ("name", "listed", "meant"),
    [
        ("eth0", "eth", True),
        ("eth0", "=eth", False),
        ("eth0", "=ib0,eth0", True),
        ("docker0", "^lo,docker", False),
        ("eth0", "^lo,docker", True),
        ("eth0", "^=eth", True),
        ("mlx5_1", "=mlx5_1:2", True),
    ],
)
def test_names_are_taken_as_nccl_takes_them(name: str, listed: str, meant: bool) -> None:
    assert is_meant(name, listed) is meant


def test_interfaces_and_adapters_are_read_from_the_kernel(tmp_path: Path) -> None:
    for file, text in {
        "net/eth0/operstate": "up\n",
        "net/lo/operstate": "unknown\n",
        "net/eth1/operstate": "down\n",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    assert Network.here(tmp_path) == Network(
        {"eth0": True, "eth1": False, "lo": True}, {"mlx5_0": True, "mlx5_1": False}
    )
    assert Network.here().interfaces, "this machine has one at least"


def test_what_every_job_or_one_run_says_is_found(tmp_path: Path) -> None:
    assert settings_of({"QUORATE_NCCL__INTERFACE": "ib0"}, None).interface == "ib0"
    assert settings_of({"QUORATE_NCCL__P2P_LEVEL": "far"}, None) == NcclSpec()
    file = tmp_path / "job.yaml"
    file.write_text("task: a.py:A\nbatch_size: 8\nsteps: 1\nnccl: {infiniband: mlx5}\n")
    assert settings_of({"QUORATE_NCCL__INTERFACE": "ib0"}, file) == NcclSpec(infiniband="mlx5")
