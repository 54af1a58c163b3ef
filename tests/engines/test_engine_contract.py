"""What every engine does, as its supervisor needs it."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from command import PATIENCE, await_condition
from memory_engine import MemoryEngine
from quorate.core.errors import QuorateError
from quorate.core.failure import Failure
from quorate.engines.engine import (
    Engine,
    Exited,
    Interrupted,
    Notice,
    Preparation,
    Ready,
    SettingUp,
    Started,
    Unprepared,
)
from quorate.engines.local import LocalEngine
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment

TASK = """
import os, signal, time
import quorate

class Obedient(quorate.Task):
    exits_with: int | None = None

    def model(self):
        if self.exits_with is not None:
            os._exit(self.exits_with)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no coordinator that would let it go
        time.sleep(3600)

    def datasets(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
"""


@dataclass(frozen=True)
class Case:
    """An engine, how it is made to fail, whether a process of its is there, and what it has told."""

    engine: Engine
    interrupt: Callable[[], None]
    is_there: Callable[[int], bool]
    notices: list[Notice] = field(default_factory=list)

    def until(self, kind: type[Any], fits: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next notice of a kind that fits; those before it are forgotten."""

        def look() -> Notice | None:
            self.notices.extend(self.engine.poll(0.05))
            found = next((one for one in self.notices if isinstance(one, kind) and fits(one)), None)
            if found is not None:
                del self.notices[: self.notices.index(found) + 1]
            return found

        return await_condition(f"{kind}", look, PATIENCE)


@contextlib.contextmanager
def local(folder: Path, task: str = "task.py:Obedient") -> Iterator[Case]:
    (folder / "task.py").write_text(TASK)
    (folder / "logs").mkdir()
    preparation = Preparation(f"{folder}/{task}", {}, "", [str(folder)], 0, 1, True)
    engine = LocalEngine(RunFolder(folder), preparation)

    def interrupt() -> None:
        os.kill(engine._fork_server._process.pid, signal.SIGKILL)

    with contextlib.closing(engine):
        yield Case(engine, interrupt, lambda pid: Path(f"/proc/{pid}").exists())


@contextlib.contextmanager
def in_memory(_: Path, task: str = "") -> Iterator[Case]:
    engine = MemoryEngine(Failure("TaskError", f"there is no {task}", exit_code=2) if task else None)
    with contextlib.closing(engine):
        yield Case(engine, engine.interrupt, lambda pid: pid in engine.running.values())


@contextlib.contextmanager
def on_a_host(folder: Path, task: str = "task.py:Obedient") -> Iterator[Case]:
    from memory_cluster import MemoryCluster
    from quorate.engines.ray.engine import ClusterEngine
    from quorate.engines.ray.places import ClusterSettings

    (folder / "task.py").write_text(TASK)
    (folder / "logs").mkdir()
    preparation = Preparation(f"{folder}/{task}", {}, "", [str(folder)], 0, 1, True)
    cluster = MemoryCluster({"node": 2})
    engine = ClusterEngine(RunFolder(folder), preparation, cluster, ClusterSettings())

    def interrupt() -> None:
        local_engine = cluster.links["node"].agent._engine
        assert isinstance(local_engine, LocalEngine)
        os.kill(local_engine._fork_server._process.pid, signal.SIGKILL)

    with contextlib.closing(engine):
        yield Case(engine, interrupt, lambda pid: Path(f"/proc/{pid}").exists())


KINDS = pytest.mark.parametrize("kind", [local, in_memory, on_a_host])


def assignment(folder: Path, slot: int, **params: Any) -> Assignment:
    job = JobSpec(task="task.py:Obedient", lanes=2, batch_size=2, steps=1, params=params)
    return Assignment(str(folder), slot, 2, "t", job.model_dump(mode="json"), "", "127.0.0.1:1", "token")


@KINDS
def test_a_worker_starts_is_set_up_and_ends_when_it_is_killed(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path) as case:
        assert case.engine.capacity().cores >= 1
        case.until(Ready)
        case.engine.start(assignment(tmp_path, 1))
        started = case.until(Started)
        assert started.slot == 1
        assert case.is_there(started.pid)
        setup = case.until(SettingUp, lambda notice: notice.phase == "model()")
        assert (setup.slot, setup.pid) == (1, started.pid)
        case.engine.kill(1, started.pid)
        exited = case.until(Exited)
        assert (exited.slot, exited.pid, exited.code) == (1, started.pid, -signal.SIGKILL)
        assert not case.is_there(started.pid)
        case.engine.kill(1, started.pid)  # it is gone, and so is its number
        assert [notice for notice in case.engine.poll(0.05) if not isinstance(notice, SettingUp)] == []


@KINDS
def test_a_worker_that_ends_by_itself_is_told_with_its_code_and_another_takes_its_place(
    kind: Any, tmp_path: Path
) -> None:
    with kind(tmp_path) as case:
        case.until(Ready)
        case.engine.start(assignment(tmp_path, 0, exits_with=7))
        first = case.until(Exited)
        assert (first.slot, first.code) == (0, 7)
        case.engine.start(assignment(tmp_path, 0))
        assert case.until(Started).pid != first.pid


@KINDS
def test_a_worker_that_is_asked_to_leave_ends_by_itself(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path) as case:
        case.until(Ready)
        pids = []
        for slot in (0, 1):
            case.engine.start(assignment(tmp_path, slot))
            pids.append(case.until(Started).pid)
            case.until(SettingUp, lambda notice: notice.phase == "model()")
        case.engine.terminate(0, pids[1])  # the process of another place: nobody is asked

        def ask() -> Exited | None:  # again, where it was not listening yet
            case.engine.terminate(1, pids[1])
            return next((notice for notice in case.engine.poll(0.05) if isinstance(notice, Exited)), None)

        exited = await_condition("its end", ask, PATIENCE)
        assert (exited.slot, exited.pid) == (1, pids[1])
        assert exited.code in (0, -signal.SIGTERM), "it was not killed"
        assert case.is_there(pids[0])
        case.engine.terminate(1, pids[1])
        assert [notice for notice in case.engine.poll(0.05) if isinstance(notice, Exited)] == []


@KINDS
def test_closing_ends_whoever_is_left(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path) as case:
        case.until(Ready)
        for slot in (0, 1):
            case.engine.start(assignment(tmp_path, slot))
        pids = [case.until(Started).pid for _ in range(2)]
        assert all(map(case.is_there, pids))
        case.engine.close()
        assert not any(map(case.is_there, pids))
        case.engine.close()


@KINDS
def test_an_engine_that_fails_tells_so_then_the_exits_and_goes_on(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path) as case:
        case.until(Ready)
        case.engine.start(assignment(tmp_path, 0))
        pid = case.until(Started).pid
        case.interrupt()
        assert case.until(Interrupted).reason
        exited = case.until(Exited)
        assert (exited.slot, exited.pid, exited.code) == (0, pid, -signal.SIGKILL)
        case.engine.start(assignment(tmp_path, 0))
        assert case.until(Started).pid != pid
        assert not [notice for notice in case.notices if isinstance(notice, Ready)], "told once"


@KINDS
def test_a_task_that_cannot_be_had_is_told(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path, "task.py:Missing") as case:
        failure = case.until(Unprepared).failure
        assert failure.exit_code == 2
        assert "Missing" in failure.message


def appointment(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "logs").mkdir(exist_ok=True)
    return {"run": str(folder), "lanes": 1, "workers": 1, "failure_timeout": 1.0, "token": "word", **changes}


@KINDS
def test_a_coordinator_listens_ends_when_it_is_killed_and_another_follows_at_its_address(
    kind: Any, tmp_path: Path
) -> None:
    with kind(tmp_path) as case:
        first = case.engine.start_coordinator(appointment(tmp_path))
        address = first.await_answer()["address"]
        assert first.is_alive
        first.kill()
        assert not first.is_alive
        assert f"pid {first.pid}" in first.departure
        assert "SIGKILL" in first.departure
        first.close(patience=0)
        port = int(address.rpartition(":")[2])
        second = case.engine.start_coordinator(appointment(tmp_path, port=port))
        assert second.await_answer(PATIENCE)["address"] == address
        second.close(patience=PATIENCE)
        assert not second.is_alive
        assert "SIGKILL" not in second.departure, "it was let go"


@KINDS
def test_a_coordinator_that_cannot_begin_says_why(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path) as case:
        child = case.engine.start_coordinator(appointment(tmp_path, mesh=[2, 1]))
        with pytest.raises(QuorateError, match="mesh"):
            child.await_answer()
        child.close(patience=PATIENCE)
