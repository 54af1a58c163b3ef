"""What a worker tells of its machine: true figures, from the worker whose turn it is, and nothing that can stop it."""

import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quorate.observe import system
from quorate.observe.event import Event
from quorate.observe.notices import notice_of
from quorate.observe.progress import Progress
from quorate.observe.seldom_events import GpuLoad, SystemSampled
from quorate.observe.system import Gpus, Rates, SystemMonitor, SystemReading
from recorded_nvml import RecordedNvml


def test_rates_are_per_second_since_the_last_look() -> None:
    rates = Rates()
    assert rates.since_last(100.0, {"sent": 5_000}) == {}
    assert rates.since_last(104.0, {"sent": 9_000, "read": 7}) == {"sent": 1000.0}
    assert rates.since_last(106.0, {"sent": 9_000, "read": 17}) == {"sent": 0.0, "read": 5.0}


def test_a_counter_that_goes_back_tells_nothing_until_the_next_look() -> None:
    rates = Rates()
    rates.since_last(1.0, {"sent": 5_000})
    assert rates.since_last(2.0, {"sent": 10}) == {}
    assert rates.since_last(3.0, {"sent": 30}) == {"sent": 20.0}
    assert rates.since_last(3.0, {"sent": 40}) == {}, "no time has passed"


def test_the_process_and_its_machine_are_told_as_the_system_tells_them(tmp_path: Path) -> None:
    reading = SystemReading(tmp_path)
    told = reading.sample(3, 7, for_host=True)
    assert (told.worker, told.step) == (3, 7)
    assert told.memory_bytes is not None and told.threads is not None and told.cpu_percent is not None
    assert told.memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0 < told.threads <= len(list(Path("/proc/self/task").iterdir())), "a driver may have started one since"
    machine = told.machine
    assert machine is not None
    assert machine.memory_used_bytes is not None and machine.memory_total_bytes is not None
    assert 0 < machine.memory_used_bytes < machine.memory_total_bytes <= psutil.virtual_memory().total
    assert machine.disk_total_bytes == shutil.disk_usage(tmp_path).total
    assert machine.disk_free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert machine.cpu_percent is not None and 0 <= machine.cpu_percent <= 100


def test_who_does_not_speak_for_its_host_tells_only_of_itself(tmp_path: Path) -> None:
    told = SystemReading(tmp_path).sample(1, 7, for_host=False)
    assert (told.machine, told.gpus) == (None, ())
    assert told.memory_bytes


def test_a_run_folder_that_is_gone_has_no_disk_and_all_else_is_told(tmp_path: Path) -> None:
    told = SystemReading(tmp_path / "gone").sample(0, 7, for_host=True)
    assert told.machine is not None
    assert (told.machine.disk_free_bytes, told.machine.disk_total_bytes) == (None, None)
    assert told.machine.memory_total_bytes


def test_gpus_are_told_as_nvml_answers() -> None:
    assert Gpus(RecordedNvml("idle", "busy")).read() == (
        GpuLoad(0, "NVIDIA H200", 0, 644_939_776, 150_754_820_096, 38, 79.904),
        GpuLoad(1, "NVIDIA H200", 100, 1_704_853_504, 150_754_820_096, 61, 690.796),
    )


def test_what_a_gpu_does_not_tell_is_none() -> None:
    (told,) = Gpus(RecordedNvml("busy", silent=("utilization", "milliwatts"))).read()
    assert told == GpuLoad(0, "NVIDIA H200", None, 1_704_853_504, 150_754_820_096, 61, None)
    assert Gpus(RecordedNvml("busy", silent=("handle",))).read() == ()
    assert Gpus(None).read() == ()


def test_gpus_are_among_what_the_lowest_worker_of_a_host_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "load_nvml", lambda: RecordedNvml("busy"))
    assert [gpu.name for gpu in SystemReading(tmp_path).sample(0, 1, for_host=True).gpus] == ["NVIDIA H200"]


def monitor(tmp_path: Path, publish: Callable[[Event], None], step: Callable[[], int] = lambda: 5) -> SystemMonitor:
    return SystemMonitor(2, tmp_path, 0.01, publish, step, lambda: True)


def test_a_monitor_tells_again_and_again_until_it_is_closed(tmp_path: Path) -> None:
    told: queue.Queue[Event] = queue.Queue()
    watching = monitor(tmp_path, told.put)
    watching.start()
    samples = [told.get(timeout=60) for _ in range(3)]
    watching.close()
    assert all(isinstance(each, SystemSampled) and (each.worker, each.step) == (2, 5) for each in samples)
    assert samples[0].time < samples[1].time < samples[2].time
    assert not [thread for thread in threading.enumerate() if thread.name == "system monitor"]


def test_a_monitor_that_fails_says_so_once_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: queue.Queue[Event] = queue.Queue()
    steps = iter(range(4))

    def step() -> int:
        if (number := next(steps, 4)) < 3:
            raise OSError("no such page")
        return number

    watching = monitor(tmp_path, told.put, step)
    watching.start()
    assert [told.get(timeout=60).step for _ in range(2)] == [3, 4]
    watching.close()
    assert [record.message for record in caplog.records] == [
        "the load of this machine cannot be measured now. Training continues."
    ]


def test_nothing_of_it_is_shown_on_a_console() -> None:
    assert notice_of(SystemSampled(worker=0, host="a"), Progress("digits-0001", "runs", 1, 1)) is None
