"""What a job says to NCCL: the variables that it sets, and those of the shell that it sets aside."""

from typing import Any

import pytest

from quorate.core.errors import JobFileError
from quorate.spec.changes import refused_on_resume
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark
from quorate.spec.load import resolve_mapping
from quorate.strategies.gangs.nccl import KEYS, REPEATABLE, VARIABLES, nccl_variables, set_variables
from quorate.strategies.gangs.option import NcclSpec

JOB: dict[str, Any] = {"task": "a.py:A", "batch_size": 8, "steps": 1}


def variables(deterministic: bool = False, **keys: Any) -> dict[str, str]:
    found = nccl_variables(NcclSpec(**keys), deterministic=deterministic)
    return {name: value for name, value in found.items() if name in KEYS}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"interface": "=eth0,eth1"}, {"NCCL_SOCKET_IFNAME": "=eth0,eth1"}),
        ({"infiniband": False}, {"NCCL_IB_DISABLE": "1"}),
        ({"infiniband": True}, {"NCCL_IB_DISABLE": "0"}),
        ({"infiniband": "mlx5"}, {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5"}),
        ({"p2p_level": "NVL"}, {"NCCL_P2P_LEVEL": "NVL"}),
        ({"algorithm": "Ring", "protocol": "^LL"}, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "^LL"}),
        ({"debug": "INFO", "timeout": 60.0}, {"NCCL_DEBUG": "INFO"}),
    ],
    ids=str,
)
def test_each_key_sets_its_variable_and_no_other(keys: dict[str, Any], expected: dict[str, str]) -> None:
    assert variables(**keys) == expected


def test_every_key_but_the_timeout_has_a_variable() -> None:
    assert VARIABLES.keys() | {"timeout"} == NcclSpec.model_fields.keys()


def test_a_deterministic_job_leaves_out_what_adds_in_no_fixed_order_unless_it_says_otherwise() -> None:
    assert variables(deterministic=True) == {"NCCL_ALGO": REPEATABLE}
    assert variables(deterministic=True, algorithm="NVLS") == {"NCCL_ALGO": "NVLS"}


def test_only_what_changes_the_order_of_additions_is_meaning() -> None:
    meaning = {key for key in NcclSpec.model_fields if mark_of(f"nccl.{key}") is Mark.MEANING}
    assert meaning == {"algorithm", "protocol"}
    before, after = (
        JobSpec.model_validate(JOB | {"nccl": {"interface": interface, "algorithm": algorithm}})
        for interface, algorithm in (("eth0", "Ring"), ("ib0", "Tree"))
    )
    assert [change.key for change in refused_on_resume(before, after)] == ["nccl.algorithm"]


def test_what_the_shell_has_set_otherwise_is_told_once() -> None:
    shell = {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO", "NCCL_PROTO": "LL"}
    wanted = nccl_variables(NcclSpec(algorithm="Ring", debug="INFO"), deterministic=True)
    (told,) = set_variables(wanted, shell)
    assert told == "NCCL_ALGO=Tree of the shell is not used: the job sets it to Ring (nccl.algorithm)"
    assert (shell["NCCL_ALGO"], shell["NCCL_PROTO"]) == ("Ring", "LL")
    assert set_variables(wanted, shell) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"algorithm": "Rings"}, "'Rings' is not one of Ring, Tree"),
        ({"algorithm": "allreduce:Ring;broadcast:Bush"}, "'Bush' is not one of"),
        ({"protocol": "^LL,simpel"}, "'simpel' is not one of LL, LL128, Simple"),
        ({"p2p_level": "PCI"}, "is not LOC, NVL, PIX, PXB, PHB, SYS"),
        ({"infiniband": ""}, "is not true, false, the beginning of the names of adapters"),
        ({"timeout": 0}, "is not a number above 0"),
    ],
    ids=str,
)
def test_mistakes_are_told(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(JobFileError) as raised:
        resolve_mapping({**JOB, "nccl": keys}, "job.yaml", {}, [])
    assert words in str(raised.value)
