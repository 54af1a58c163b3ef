import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command import await_condition
from memory_engine import MemoryEngine
from quorate.core.addresses import Network
from quorate.engines.engine import Exited, Preparation, Ready, Started
from quorate.engines.output_pump import OpenLog
from quorate.engines.ray import host
from quorate.engines.ray.host import AgentFailed, HostAgent, LogLines, Report, Scratch, WorkersEnded
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

PREPARATION = Preparation("t:T", {}, "", [], 0, 1, True)


class RememberingEngine(MemoryEngine):
    """Knows what it was made of and asked for."""

    def __init__(self, run: RunFolder, preparation: Preparation, network: Network, open_log: OpenLog) -> None:
        super().__init__()
        self.run, self.network = run, network
        self.log = open_log("worker3", {"process": "worker 3"})
        self.asked: list[Assignment] = []

    def start(self, assignment: Assignment) -> None:
        self.asked.append(assignment)
        super().start(assignment)


class Listener:
    """Asks an agent, acknowledging what has come."""

    def __init__(self, agent: HostAgent) -> None:
        self.agent = agent
        self.arrived = 0
        self.reports: list[Report] = []

    def until(self, kind: type[Any], fits: Callable[[Any], bool] = lambda _: True) -> Any:
        def look() -> Report | None:
            for number, report in self.agent.next(self.arrived, 0.05):
                self.arrived = number
                self.reports.append(report)
            return next((one for one in self.reports if isinstance(one, kind) and fits(one)), None)

        return await_condition(f"{kind}", look)


@contextlib.contextmanager
def agent_of(engines: list[RememberingEngine]) -> Iterator[HostAgent]:
    def make(run: RunFolder, preparation: Preparation, network: Network, open_log: OpenLog) -> RememberingEngine:
        engines.append(RememberingEngine(run, preparation, network, open_log))
        return engines[-1]

    agent = HostAgent("run-0001", Network("127.0.0.1", host="node-1"), make)
    try:
        yield agent
    finally:
        agent.close()


def assignment(run: str = "/elsewhere/run-0001") -> Assignment:
    return Assignment(run, 3, 1, "t", {"params": {}}, "", "127.0.0.1:1", "token")


def test_a_worker_has_a_folder_of_its_host_and_keeps_the_run_that_all_hosts_reach() -> None:
    engines: list[RememberingEngine] = []
    with agent_of(engines) as agent:
        listener = Listener(agent)
        agent.tell("prepare", PREPARATION)
        listener.until(Ready)
        agent.tell("start", assignment())
        assert listener.until(Started).slot == 3
        (engine,) = engines
        (asked,) = engine.asked
        assert asked.storage == "/elsewhere/run-0001"
        assert asked.run == str(engine.run.path)
        assert engine.run.logs.is_dir()
        assert engine.network.host == "node-1"
    assert not engine.run.path.parent.exists(), "nothing is left on the host"


def test_what_was_not_acknowledged_is_told_again_and_what_was_is_not() -> None:
    with agent_of([]) as agent:
        agent.tell("prepare", PREPARATION)
        first = await_condition("a report", lambda: agent.next(0, 0.05))
        assert agent.next(0, 0.05)[: len(first)] == first
        listener = Listener(agent)
        listener.until(Ready)
        agent.tell("start", assignment())
        listener.until(Started)
        assert agent.next(listener.arrived, 0.0) == []


def test_a_worker_that_is_killed_is_reported_and_the_end_of_all_is_said() -> None:
    with agent_of([]) as agent:
        listener = Listener(agent)
        agent.tell("prepare", PREPARATION)
        agent.tell("start", assignment())
        pid = listener.until(Started).pid
        agent.tell("kill", 3, pid)
        assert listener.until(Exited).pid == pid
        agent.tell("end_workers")
        listener.until(WorkersEnded)


def test_what_is_logged_on_the_host_is_reported_before_the_end_of_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "AT_ONCE", 100)
    engines: list[RememberingEngine] = []
    with agent_of(engines) as agent:
        listener = Listener(agent)
        agent.tell("prepare", PREPARATION)
        listener.until(Ready)
        for number in range(200):
            engines[0].log.append(f"line {number}")
        agent.tell("end_workers")
        listener.until(WorkersEnded)
        told = [one for one in listener.reports if isinstance(one, LogLines)]
        assert {one.log for one in told} == {"worker3"}
        assert b"".join(one.text for one in told).decode() == "".join(f"line {number}\n" for number in range(200))


def test_what_a_launcher_does_not_take_is_left_out_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "UNDERWAY", 300)
    engines: list[RememberingEngine] = []
    with agent_of(engines) as agent:
        agent.tell("prepare", PREPARATION)
        await_condition("its engine", lambda: engines)
        for number in range(5):
            engines[0].log.append(f"line {number}".ljust(200))
        listener = Listener(agent)
        listener.until(LogLines, lambda one: b"line 1" in one.text)
        assert agent.next(listener.arrived, 0.0) == []
        engines[0].log.append("and on")
        assert b"3 lines are missing here" in listener.until(LogLines, lambda one: b"missing" in one.text).text
        assert listener.until(LogLines, lambda one: b"and on" in one.text)


def test_an_agent_that_fails_ends_what_it_has_and_says_so() -> None:
    engines: list[RememberingEngine] = []
    with agent_of(engines) as agent:
        listener = Listener(agent)
        agent.tell("prepare", PREPARATION)
        agent.tell("start", assignment())
        listener.until(Started)
        engines[0].poll = lambda _: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        assert "ZeroDivisionError" in listener.until(AgentFailed).reason
        assert not engines[0].running
        assert not engines[0].run.path.exists()


def test_what_an_agent_that_was_killed_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "quorate-host-left"
    (left / "run-0001").mkdir(parents=True)
    first = Scratch()
    second = Scratch()
    assert not left.exists()
    assert first.path.is_dir(), "of one that lives"
    assert first.path != second.path
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
