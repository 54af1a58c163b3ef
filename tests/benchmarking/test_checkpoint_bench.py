"""The checkpoint benchmark: its arithmetic, its floor, its memory, and every way to save once."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from benchmarks import saving
from benchmarks.cases import data_of, loss_of, optimizer_of, sized_case
from benchmarks.checkpoint import QUORATE, SMALLEST, SYSTEMS, Checkpoint, disk_needed
from benchmarks.disk import Mount, check_disk, files_in, forget, mount_of, read_raw, write_raw
from benchmarks.memory import MemoryWatch, family_of, memory_of_family, peak_memory
from benchmarks.own.checkpoint import trained_of
from benchmarks.peers.dcp_async_checkpoint import DcpAsync
from benchmarks.peers.dcp_checkpoint import Dcp
from benchmarks.peers.dcp_stager_checkpoint import DcpStager
from benchmarks.peers.safetensors_checkpoint import SafeTensors
from benchmarks.peers.torch_save_checkpoint import TorchSave
from benchmarks.row import Reading, Row, compared, rows_of
from benchmarks.run import Options, measure
from benchmarks.saves import ADDED, COMMITTED, LOADED, LOADED_AGAIN, RAW, Cost, Costs, Floor, Loads, Save, save_readings
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from quorate.core.errors import RequestError
from quorate.observe.events import CheckpointSaved, StepCompleted
from schemas import validate

MB = 2**20
STEP = 0.125
"""Seconds: exact in binary, as all sums of it."""


def moments(*seconds: float) -> list[float]:
    found = [0.0]
    for each in seconds:
        found.append(found[-1] + each)
    return found


# --- what a save adds


def test_the_steps_during_a_save_are_held_against_as_many_undisturbed_ones() -> None:
    ended = moments(*[STEP] * 4, 0.25, STEP, 0.1875, *[STEP] * 4)
    (cost,) = Costs.of(ended, [Save(began=ended[4], ended=ended[6] + 0.01, committed=0.3)]).saves
    assert cost.added_ms == pytest.approx(125 + 62.5)
    assert cost.step_ratio == pytest.approx((0.25 + 0.125 + 0.1875) / 0.375)


def test_a_save_that_the_loop_waits_for_disturbs_one_step() -> None:
    ended = moments(*[STEP] * 4, 1.125, *[STEP] * 4)
    costs = Costs.of(ended, [Save(ended[4], ended[4] + 1.0, 1.0)])
    assert costs.saves[0].added_ms == pytest.approx(1000)
    assert costs.step_ms == 125


def test_what_hits_every_other_step_is_no_fault_of_the_save() -> None:
    ended = moments(*[STEP, 0.25] * 3, STEP, 0.25, *[STEP, 0.25] * 3)
    (cost,) = Costs.of(ended, [Save(ended[6], ended[8], 0.3)]).saves
    assert cost.added_ms == pytest.approx(0)


def test_saves_without_an_end_leave_nothing_to_compare_with() -> None:
    ended = moments(*[STEP] * 4)
    with pytest.raises(ValueError, match="no step was undisturbed"):
        Costs.of(ended, [Save(ended[0], ended[-1] + 1, 1.0)])


def test_a_save_longer_than_any_calm_is_held_against_the_longest_calm() -> None:
    ended = moments(*[STEP] * 2, *[0.25] * 4, *[STEP] * 2)
    (cost,) = Costs.of(ended, [Save(ended[2], ended[6], 1.0)]).saves
    assert cost.added_ms == pytest.approx(500)


# --- readings and judgement


def readings(
    *, added: float = 5.0, write: float = 1.0, load: float = 1.0, memory: float = 1.0, waited: float = 0.004
) -> list[dict[str, Any]]:
    ended = moments(*[STEP] * 9)
    saves = [Save(ended[4], ended[4] + STEP, committed=write, waited=waited)]
    costs = Costs(125.0, [Cost(added, 1 + added / 1000)])
    floor = Floor(writes=[1.0], reads=[1.0], reads_again=[0.5])
    return save_readings(500 * MB, costs, saves, Loads([load], [load / 2]), floor, memory)


def rows(told: list[dict[str, Any]]) -> list[Row]:
    found = rows_of("checkpoint", [Reading.of("quorate", fields) for fields in told])
    return compared(found, frozenset({"quorate"}), Checkpoint().label)


def test_a_script_tells_of_its_system_and_of_the_disk() -> None:
    found = rows(readings(write=1.2))
    assert [(row.case, row.system) for row in found] == [
        (ADDED, "quorate"),
        *((case, system) for case in (COMMITTED, LOADED, LOADED_AGAIN) for system in ("quorate", RAW)),
    ]
    assert found[1].details["of_raw"] == pytest.approx(1.2)
    assert found[0].details["waited_ms"] == 4.0
    assert Checkpoint().label(found[1]) == "500 MB: until committed"
    assert Checkpoint().remarks(found[0]) == {
        "waited": "4.0 ms",
        "step": "125 ms",
        "during": "1.005×",
        "memory": "1.00×",
    }
    assert [Checkpoint().remarks(row) for row in found[1:3]] == [{"of raw": "1.20×"}, {}]


def test_noise_that_makes_a_save_look_like_a_gift_is_told_but_no_time() -> None:
    found = rows(readings(added=-3.0))[0]
    assert (found.ms, found.details["added_ms"]) == (0.0, -3.0)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, []),
        ({"added": 60.0}, ["steps during a save ÷ undisturbed ones"]),
        ({"waited": 0.02}, ["ms that training waits for a save"]),
        ({"write": 1.3}, ["until committed ÷ raw write and fsync"]),
        ({"load": 1.6}, ["load and verify from the disk ÷ raw read", "load and verify from the page cache ÷ raw read"]),
        ({"memory": 1.1}, ["extra memory ÷ state, 5 % being for buffers"]),
    ],
)
def test_every_figure_has_its_target(figures: dict[str, float], missed: list[str]) -> None:
    found = judge(TARGETS, "checkpoint", rows(readings(**figures)), 2)
    assert len(found) == 6
    assert [each.target.text.removeprefix("500 MB: ") for each in found if each.verdict == "missed"] == missed
    assert not judge(TARGETS, "checkpoint", rows(readings()), 1), "without an idle core nothing can happen meanwhile"


def test_a_state_of_another_size_is_not_what_the_targets_are_about() -> None:
    small = [{**fields, "bytes": 20 * MB} for fields in readings()]
    assert {each.verdict for each in judge(TARGETS, "checkpoint", rows(small), 2)} == {"not measured"}


def test_a_state_that_is_too_small_is_refused() -> None:
    with pytest.raises(RequestError, match=r"--size: 8 MB is too small.*Give 16 MB or more"):
        Checkpoint(8 * MB)


# --- the events of a run


def test_the_events_of_a_run_tell_its_saves() -> None:
    steps = [StepCompleted(step=step, time=float(step)) for step in range(1, 41)]
    told = [
        CheckpointSaved(step=10, time=11.5, seconds=1.25),
        CheckpointSaved(step=20, time=22.5, seconds=2.25, added_s=0.003),
        CheckpointSaved(step=40, time=41.0, seconds=0.5),
    ]
    samples = [(2.0, 900), (5.0, 160), (10.5, 150), (12.0, 155), (30.0, 999)]
    trained = trained_of([*steps, *told], samples, calm=100)
    assert trained.saves == [Save(10.0, 11.5, 1.25), Save(20.0, 22.5, 2.25, 0.003)]
    assert trained.extra_memory == 60, "also what was taken before the save was due"
    assert trained.counted == trained.saves[1:]
    assert trained.costs.step_ms == 1000
    with pytest.raises(SystemExit, match="no save in the middle"):
        trained_of(steps, samples, calm=100)


# --- memory


def test_the_peak_is_the_most_in_a_time_and_at_the_next_look() -> None:
    samples = [(0.5, 9000), (1.5, 100), (2.5, 120), (3.5, 300), (4.5, 9000)]
    assert peak_memory(samples, began=1.0, ended=2.0) == 120
    assert peak_memory(samples, began=1.0, ended=2.5) == 300
    assert peak_memory(samples, began=2.6, ended=2.7) == 300, "nobody looked in between"
    with pytest.raises(ValueError, match="too busy to measure"):
        peak_memory(samples, began=5.0, ended=6.0)


def test_the_memory_of_a_family_has_that_of_its_children_and_counts_what_is_shared_once() -> None:
    taken = 64 * MB
    code = f"b = bytearray({taken}); print(flush=True); input()"
    before = memory_of_family(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in family_of(os.getpid())
        assert taken * 0.9 < memory_of_family(os.getpid()) - before < taken * 2
        child.communicate(b"\n")
    assert memory_of_family(child.pid) == 0


def test_shared_memory_is_seen_and_the_watch_looks_once_more_when_it_is_over() -> None:
    seen: list[int] = []
    block = 32 * MB
    shared = mmap.mmap(-1, block)

    def over() -> bool:
        if len(seen) == 2:
            shared.write(b"\1" * block)
        seen.append(0)
        return len(seen) == 4

    watch = MemoryWatch(over, clock=lambda: float(len(seen)))
    watch.start()
    watch.join(60)
    assert [moment for moment, _ in watch.samples] == [1.0, 2.0, 3.0, 4.0]
    assert peak_memory(watch.samples, 3.0, 4.0) - peak_memory(watch.samples[:2], 0.0, 2.0) > 0.9 * block
    shared.close()


# --- the disk

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:20 / /dev/shm rw - tmpfs tmpfs rw
24 22 0:21 / /tmp\\040two rw shared:3 - tmpfs tmpfs rw
25 22 254:1 / /data rw shared:4 master:2 - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("folder", "mount"),
    [
        ("/var/tmp", Mount(Path("/"), "ext4")),
        ("/dev/shm/a/b", Mount(Path("/dev/shm"), "tmpfs")),
        ("/dev/shmem", Mount(Path("/"), "ext4")),
        ("/tmp two", Mount(Path("/tmp two"), "tmpfs")),
        ("/data", Mount(Path("/data"), "xfs")),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(folder: str, mount: Mount) -> None:
    assert mount_of(Path(folder), MOUNTS) == mount


def test_what_is_mounted_over_something_hides_it() -> None:
    again = MOUNTS + "26 25 0:30 / /data rw - tmpfs tmpfs rw\n"
    assert mount_of(Path("/data/x"), again) == Mount(Path("/data"), "tmpfs")


def test_a_folder_in_memory_is_refused() -> None:
    with pytest.raises(RequestError, match=r"/dev/shm, is in memory \(tmpfs at /dev/shm\).*Set TMPDIR"):
        check_disk(Path("/dev/shm"), 1)


def test_a_disk_that_is_too_full_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.disk.mount_of", lambda *_: Mount(Path("/"), "ext4"))
    with pytest.raises(RequestError, match=r"has [\d,]+ bytes left, and the benchmark writes up to [\d,]{20,}"):
        check_disk(tmp_path, 2**62)
    check_disk(tmp_path, 1)
    assert disk_needed(MB, 1) == 5 * MB
    assert disk_needed(MB, 6) == 8 * MB


def test_a_raw_write_leaves_nothing_and_a_raw_read_reads_all(tmp_path: Path) -> None:
    assert write_raw(tmp_path, memoryview(bytes(5 * MB + 3))) > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "inner").mkdir()
    for name, content in (("a", b"12345"), ("inner/b", os.urandom(5 * MB + 3)), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    files = files_in(tmp_path)
    assert [file.name for file in files] == ["a", "empty", "b"]
    assert files_in(files[0]) == files[:1]
    forget(files)
    assert read_raw(files) > 0


# --- the state, and the ways to save it


@pytest.mark.parametrize("size", [16 * MB, 37 * MB, 64 * MB])
def test_the_state_has_the_size_that_was_asked_for(size: int) -> None:
    case = sized_case(size)
    model = case.build()
    optimizer = optimizer_of(model)
    loss = loss_of(model, list(data_of(case, 2).tensors))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert torch.isfinite(loss)
    momenta = [tensor for fields in optimizer.state_dict()["state"].values() for tensor in fields.values()]
    found = sum(tensor.nbytes for tensor in (*model.state_dict().values(), *momenta))
    assert found == pytest.approx(size, rel=0.003)


def test_a_save_has_room_before_the_next() -> None:
    assert saving.steps_between_saves(0.01) == saving.FEWEST_STEPS
    assert saving.steps_between_saves(2.0) == 60
    assert saving.total_steps(20, 4) == 120


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [TorchSave, SafeTensors, Dcp, DcpAsync, DcpStager])
def test_every_way_commits_a_state_that_can_be_loaded(way: Callable[[], saving.Way], tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = optimizer_of(model)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    kept = model.weight.detach().clone()
    checkpointer, path = way(), tmp_path / "saved"
    checkpointer.begin(state, path)
    checkpointer.settle()
    with torch.no_grad():
        model.weight.zero_()
    checkpointer.close()
    assert checkpointer.committed is not None
    loaded: Any = checkpointer.load(state, path)
    if loaded is None:
        weight = state["model"]["weight"]
    else:
        weight = loaded["model"]["weight"] if "model" in loaded else loaded["model.weight"]
    assert torch.equal(weight, kept), "the state must be the one that was there when the save began"


class Instant:
    """A way that saves nothing, and is done when it is told."""

    def __init__(self) -> None:
        self.committed: float | None = None
        self.paths: list[Path] = []

    def begin(self, state: saving.State, path: Path) -> None:
        assert set(state) == {"model", "optimizer"}
        self.paths.append(path)
        path.write_bytes(b"1" * 4096)
        self.committed = perf_counter()

    def settle(self) -> None: ...

    def load(self, state: saving.State, path: Path) -> object:
        return state and path.read_bytes()

    def close(self) -> None: ...


def test_the_loop_saves_once_more_than_counts(tmp_path: Path) -> None:
    way = Instant()
    loop = saving.SavingLoop(way, SMALLEST, tmp_path)
    trained = loop.train(every=20, saves=2)
    assert [path.name for path in way.paths] == ["step-20", "step-40", "step-60"]
    assert (len(trained.moments), len(trained.saves), len(trained.counted)) == (80, 3, 2)
    assert [save.began for save in trained.saves] == [trained.moments[step - 1] for step in (20, 40, 60)]
    path, load = loop.last_save()
    assert (path.name, load()) == ("step-60", b"1" * 4096)


def test_a_save_that_is_still_running_when_the_next_is_due_ends_the_measurement(tmp_path: Path) -> None:
    class Endless(Instant):
        def begin(self, state: saving.State, path: Path) -> None:
            super().begin(state, path)
            self.committed = None

    with pytest.raises(SystemExit, match="still running when the next one was due"):
        saving.SavingLoop(Endless(), SMALLEST, tmp_path).train(every=4, saves=2)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("unmeasured")
def test_every_system_saves_and_loads() -> None:
    report = measure(Checkpoint(20 * MB, saves=1), Options(rounds=1))
    assert report.absences == []
    found = {(line.row.case, line.row.system) for line in report.lines}
    names = [system.name for system in SYSTEMS]
    assert found == {
        *((ADDED, name) for name in names),
        *((case, name) for case in (COMMITTED, LOADED, LOADED_AGAIN) for name in (*names, RAW)),
    }
    ours = {line.row.case: line.row for line in report.lines if line.row.system == QUORATE.name}
    assert ours[ADDED].details["step_ms"] > 0
    assert all(ours[case].details["of_raw"] > 0 for case in (COMMITTED, LOADED, LOADED_AGAIN))
    validate("bench", json.loads(json.dumps(report.to_document())))
