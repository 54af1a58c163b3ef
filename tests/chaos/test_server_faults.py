"""Faults for parameter servers: how they are written, what cannot happen, and when their moment comes."""

import pytest

from quorate.chaos.script import Act, FaultError, Whom, check_script, parse_fault, random_script
from quorate.core.generation import Role, server_id


@pytest.mark.parametrize(
    "text",
    [
        "kill server 1 at step 20",
        "kill server 0 at step 20 in apply after 5ms",
        "stop server 1 at step 15 for 3s",
        "term server 0 at step 5",
        "starve server 0 at step 5",
        "cut server 1 at step 10 for 8s",
        "add server at step 12",
        "remove server at step 20",
    ],
)
def test_a_fault_of_a_server_is_written_as_it_is_read(text: str) -> None:
    fault = parse_fault(text)
    assert str(fault) == text
    check_script([fault], workers=2, steps=30, lanes=4, servers=2)


@pytest.mark.parametrize(
    ("text", "servers", "why"),
    [
        ("kill server 0 at step 2", 0, "the job has no servers; only `strategy: parameter-server` has"),
        ("kill server 2 at step 2", 2, "there is no server 2; the job has servers 0 to 1"),
        ("kill server 1 at step 2", 1, "there is no server 1; the job has server 0 only"),
        ("remove server at step 2", 1, "the job has one server by then, and needs it"),
        ("kill server 0 at step 2 in forward", 1, "servers host no lane, and have no phase forward"),
        ("kill server 0 at step 40", 1, "there is no step 40; the job has 30 steps"),
    ],
)
def test_what_cannot_happen_to_a_server_is_refused(text: str, servers: int, why: str) -> None:
    with pytest.raises(FaultError, match=why):
        check_script([parse_fault(text)], workers=2, steps=30, lanes=4, servers=servers)


@pytest.mark.parametrize("text", ["slow server 0 2x from step 3", "flip server 0 at step 3"])
def test_what_is_not_for_servers_is_not_understood(text: str) -> None:
    with pytest.raises(FaultError, match="server"):
        parse_fault(text)


def test_servers_that_were_added_can_be_killed_and_removed() -> None:
    script = ["add server at step 2", "kill server 1 at step 4", "remove server at step 6"]
    check_script([parse_fault(line) for line in script], workers=2, steps=30, lanes=4, servers=1)


def test_a_step_of_a_server_begins_with_its_exchange() -> None:
    fault = parse_fault("kill server 1 at step 20")
    assert fault.worker == server_id(1)
    assert not fault.is_due(19, "exchange")
    assert fault.is_due(20, "exchange")
    assert not fault.is_due(20, "apply")


def test_chance_chooses_servers_where_there_are_any() -> None:
    faults = random_script(7, 400, 3, 8.0, 4, servers=2)
    check_script(faults, workers=3, steps=400, lanes=4, servers=2)
    served = [fault for fault in faults if fault.worker is not None and Role.of(fault.worker) is Role.SERVER]
    assert {fault.act for fault in served} >= {Act.KILL, Act.STOP}
    assert any(fault.whom is Whom.SERVER for fault in faults)
    assert any(fault.worker is not None and fault.worker < 3 for fault in faults)
