"""The scripts themselves, in this process: what they measure, and that they notice a wrong sum."""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import servers
from benchmarks.allreduce import SHM, TCP, AllReduce
from benchmarks.blocks import Blocks
from benchmarks.cases import CASES, data_of, endless, loader_of, loss_of
from benchmarks.exchange import exchange_all, part_of, sum_of
from benchmarks.laps import Laps, Training
from benchmarks.own import allreduce as own_allreduce
from benchmarks.own import push_pull as own_push_pull
from benchmarks.own import startup as stopwatch
from benchmarks.own import step as own_step
from benchmarks.peers import gloo_allreduce, hand_written_step, no_exchange_scaling
from benchmarks.peers.grpc_push_pull import main as grpc_main
from benchmarks.push_pull import ask
from benchmarks.scaling import Scaling
from benchmarks.selection import Crowd
from benchmarks.startup import PLAIN, QUORATE, TORCHRUN, Startup
from benchmarks.store import fresh_store
from benchmarks.system import System

Run = Callable[[Callable[[], None], dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Give a script an order; what it answers."""

    def answered(main: Callable[[], None], order: dict[str, Any]) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["script", json.dumps({**order, "folder": str(tmp_path)})])
        main()
        readings: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["readings"]
        return readings

    return answered


@pytest.mark.parametrize(
    ("main", "system", "processes"),
    [(own_allreduce.main, SHM, 3), (own_allreduce.main, TCP, 2), (gloo_allreduce.main, gloo_allreduce, 2)],
)
def test_every_all_reduce_measures_each_size(
    run: Run, main: Callable[[], None], system: System, processes: int, tmp_path: Path
) -> None:
    order = AllReduce([processes], [1024, 8192], [system], repeats=4).turns()[0].order
    found = run(main, order)
    assert [(each["case"], each["bytes"], each["processes"], len(each["ms"])) for each in found] == [
        ("1 KB", 1024, processes, 4),
        ("8 KB", 8192, processes, 4),
    ]
    assert all(0 < ms < 60_000 for each in found for ms in each["ms"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("main", "system"),
    [(own_push_pull.main, servers.SHM), (own_push_pull.main, servers.TCP), (grpc_main, servers.GRPC)],
)
def test_every_push_and_pull_measures_each_size(run: Run, main: Callable[[], None], system: System) -> None:
    found = run(main, servers.Servers([1024, 2**20 + 4], [system], repeats=4).turns()[0].order)
    assert [(each["bytes"], each["processes"], len(each["ms"])) for each in found] == [(1024, 2, 4), (2**20 + 4, 2, 4)]
    assert all(0 < ms < 60_000 for each in found for ms in each["ms"])


def test_values_that_do_not_come_back_are_noticed() -> None:
    class Silent:
        def fill(self, value: float) -> None: ...

        def push_and_pull(self) -> None: ...

        def extremes(self) -> tuple[float, float]:
            return 0.0, 1.0

    with pytest.raises(RuntimeError, match=r"repetition 0 is \(0.0, 1.0\), and not 1.0"):
        list(ask(Silent(), 1))


class Forgetful:
    """Two processes whose sum is one repetition late."""

    def __init__(self) -> None:
        self.sums = [0.0]

    def fill(self, value: float) -> None:
        self.sums.append(3 * value)  # process 1 adds twice as much

    def reduce(self) -> None: ...

    def extremes(self) -> tuple[float, float]:
        return self.sums[-2], self.sums[-2]


def test_a_wrong_sum_is_noticed() -> None:
    with pytest.raises(RuntimeError, match=r"the sum of repetition 0 is 0.0 to 0.0 where all of it must be 3.0"):
        exchange_all({"processes": 2, "repeats": [1]}, 0, lambda _: Forgetful())


def test_parts_change_from_repetition_to_repetition() -> None:
    assert [part_of(1, repetition) for repetition in range(3)] == [2.0, 4.0, 6.0]
    assert sum_of(3, 1) == 2.0 + 4.0 + 6.0


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_trained(name: str) -> None:
    case = CASES[name]
    batch = next(endless(loader_of(case, 2 * case.batch_size)))
    assert [len(part) for part in batch] == [case.batch_size] * 2
    assert torch.isfinite(loss_of(case.build(), batch))
    assert all(torch.equal(one, other) for one, other in zip(data_of(case, 4)[3], data_of(case, 4)[3], strict=True))


def test_the_hand_written_loop_takes_all_steps(tmp_path: Path) -> None:
    laps = Laps(Blocks(2, 5))
    hand_written_step.train(Training(CASES["tiny-mlp"], laps, str(tmp_path)))
    assert tuple(laps.seconds) == laps.blocks.ends
    assert min(laps.blocks.ms(laps.seconds)) > 0


def test_the_step_of_a_real_job_is_read_from_its_events(run: Run) -> None:
    (found,) = run(own_step.main, {"system": "quorate", "case": "tiny-mlp", "warm_up": 2, "steps": 10})
    assert len(found["ms"]) == 10
    assert min(found["ms"]) > 0
    details = found["details"]
    assert sum(details[f"{part}_ms"] for part in ("data", "compute", "exchange", "apply", "other")) == pytest.approx(
        details["mean_ms"]
    )


def test_processes_without_exchange_share_the_lanes_of_a_step(run: Run) -> None:
    order = {**Scaling([Crowd(2)], lanes=3, steps_per_worker=1).turns()[0].order, "case": "tiny-mlp"}
    (found,) = run(no_exchange_scaling.main, order)
    assert (found["processes"], len(found["ms"])) == (2, 1)
    assert found["ms"][0] > 0


def test_the_first_step_of_torchrun_is_complete_when_it_is_so_everywhere(tmp_path: Path) -> None:
    order = {**Startup([TORCHRUN]).turns()[0].order, "folder": str(tmp_path)}
    command, moment = stopwatch.COMMANDS["torchrun"](order)
    assert moment("12.5\n13.25\n") == 13.25
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert find_spec(command[-1]) is not None


def test_the_first_step_of_a_job_is_that_of_its_events(tmp_path: Path) -> None:
    order = {**Startup([QUORATE]).turns()[0].order, "folder": str(tmp_path)}
    command, moment = stopwatch.COMMANDS["quorate"](order)
    (tmp_path / "events.jsonl").write_text('{"kind": "step", "step": 1, "time": 7.5}\n')
    assert moment(json.dumps({"folder": str(tmp_path)})) == 7.5
    assert json.loads((tmp_path / "startup.yaml").read_text())["lanes"] == 2
    assert command[-2:] == ["--workers", "2"]


def test_a_command_that_fails_has_no_first_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        stopwatch.COMMANDS, "plain-python", lambda _: ([sys.executable, "-c", "raise SystemExit(3)"], float)
    )
    with pytest.raises(SystemExit, match="ended with code 3"):
        run(stopwatch.main, Startup([PLAIN]).turns()[0].order)


def test_a_store_is_gone_when_it_is_not_needed_any_more(tmp_path: Path) -> None:
    with fresh_store(str(tmp_path)) as store:
        store.touch()
    assert not store.exists()
