"""One digest on any number of workers, for tasks that would give many if anything were done carelessly."""

import functools
import random
import tempfile
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives import reduction, shared_memory
from quorate.lanes import chunks
from quorate.lanes.chunks import host_lanes
from quorate.task.task import Task
from quorate.wire import shared_link

pytestmark = pytest.mark.usefixtures("unmeasured")


@dataclass(frozen=True)
class Case:
    """A task and the keys that matter to it."""

    task: type[Task]
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.task.__name__, *(f"{key}={value}" for key, value in self.keys.items())])


CASES = [
    Case(tasks.Regression),
    Case(tasks.Momentum, {"clip_norm": 0.5}),
    Case(tasks.Adam, {"schedule": {"kind": "cosine", "warmup": 3}}),
    Case(tasks.Adam, {"accumulate": 3, "batch_size": 30}),
    Case(tasks.BatchNormAndDropout, {"batch_size": 21, "epochs": 2, "evaluate": {"every": 2}}),
    Case(tasks.TinyTransformer, {"clip_norm": 1.0, "schedule": {"kind": "linear", "warmup": 2, "final": 0.1}}),
    Case(tasks.FrozenAndUnused),
    Case(tasks.SometimesUsed),
    Case(tasks.RandomTransform, {"loader_workers": 0}),
    Case(tasks.RandomTransform, {"loader_workers": 2}),
    Case(tasks.Momentum, {"batch_size": 23, "last_batch": "keep", "epochs": 2}),
    Case(tasks.BatchNormAndDropout, {"batch_size": 16, "last_batch": "keep", "epochs": 2}),
    Case(tasks.TwoOptimizers),
    Case(tasks.NoisyOptimizer),
    Case(tasks.ConstantBuffers, {"batch_size": 16, "last_batch": "keep", "epochs": 2}),
    Case(tasks.LaneZeroBuffer),
    Case(tasks.IndexBackward, {"threads": 2}),
    Case(tasks.IndexBackward, {"threads": 2, "loader_workers": 1}),
    Case(tasks.DrawsWhileBuilding),
    Case(tasks.NAdamInFloat64),
    Case(tasks.MultiStep),
    Case(tasks.Plateau, {"evaluate": {"every": 1}}),
    Case(tasks.LeavesEvaluationMode),
    Case(tasks.KeepsItsModel),
    Case(tasks.WorksInPlace, {"epochs": 3}),
    Case(tasks.LazyFile, {"loader_workers": 2, "batch_size": 200}),
    Case(tasks.SharedBuffer),
    Case(tasks.RefinesLater),
    Case(tasks.NormedWeights),
    Case(tasks.RunningMean, {"evaluate": {"every": 1}}),
    Case(tasks.AveragesInside),
    Case(tasks.ScheduledLoss),
    Case(tasks.Plateau, {"average": {"decay": 0.9, "evaluate": True}, "evaluate": {"every": 1}}),
    Case(tasks.Streamed, {"batch_size": 18, "last_batch": "keep", "epochs": 2}),
    Case(tasks.Bookmarked, {"batch_size": 18, "epochs": 2, "accumulate": 2}),
]


WORKERS = {4: (3, 4), 5: (3, 5)}
"""For so many lanes, the numbers of workers that are compared with one; two are among those that take over."""

HOSTS = {(4, 3): "AAB", (8, 4): "AABB"}
"""For so many lanes and workers, the hosts that these run on; elsewhere they all run on one."""

OVER_TCP = {(5, 3)}
"""For so many lanes and workers, no memory is shared although they run on one host."""


@functools.cache
def alone(number: int, lanes: int = 4, bucket_mb: float | None = None) -> gang.Ended:
    """A case on one worker, to which many are compared."""
    keys: dict[str, Any] = {} if bucket_mb is None else {"bucket_mb": bucket_mb}
    with tempfile.TemporaryDirectory() as folder:
        return trained(CASES[number].task, Path(folder), lanes=lanes, **CASES[number].keys, **keys)


def digest(case: Case, lanes: int, workers: int, folder: Path) -> str:
    """Over TCP, in shared memory and on a mixed ring by turns, so that every case is compared over all of them."""
    hosts = HOSTS.get((lanes, workers), "")
    links = "tcp" if (lanes, workers) in OVER_TCP else "auto"
    ended = trained(case.task, folder, Shape(workers, links=links, hosts=hosts), lanes=lanes, **case.keys)
    assert ("in shared memory" in ended.log) == (workers > 1 and links == "auto")
    assert ("over TCP" in ended.log) == (workers > 1 and (links == "tcp" or bool(hosts)))
    return ended.digest


def quick_for(numbers: Container[int], among: Iterable[int] = range(len(CASES))) -> pytest.MarkDecorator:
    """These cases each time, the others among the long tests."""
    cases = [
        pytest.param(number, id=CASES[number].name, marks=() if number in numbers else pytest.mark.long)
        for number in among
    ]
    return pytest.mark.parametrize("number", cases)


@quick_for({0, 12})
def test_any_number_of_workers_gives_one_digest(number: int, tmp_path: Path) -> None:
    assert_one_digest(number, 4, tmp_path)


@quick_for({4, 16, 33})
def test_any_number_of_workers_gives_one_digest_on_five_lanes(number: int, tmp_path: Path) -> None:
    """Over TCP too, and with lanes that do not divide evenly."""
    assert_one_digest(number, 5, tmp_path)


def assert_one_digest(number: int, lanes: int, tmp_path: Path) -> None:
    several = {workers: digest(CASES[number], lanes, workers, tmp_path / str(workers)) for workers in WORKERS[lanes]}
    assert set(several.values()) == {alone(number, lanes).digest}, several


@quick_for({4}, among=(1, 4, 5))
def test_two_hosts_of_two_workers_give_the_digest_of_one_worker(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smaller than most frames, which thus go through shared memory in pieces.
    monkeypatch.setattr(shared_link, "SLOT", 64)
    assert digest(CASES[number], 8, 4, tmp_path / "mixed") == alone(number, 8).digest


@pytest.mark.long
@quick_for({4, 12}, among=(1, 3, 4, 7, 12))
def test_overlap_does_not_change_the_bits(number: int, tmp_path: Path) -> None:
    """With buckets so small that most parameters have one of their own."""
    case = CASES[number]

    def train(workers: int, overlap: bool, hosts: str = "") -> str:
        shape = Shape(workers, links="auto" if hosts else "tcp", hosts=hosts)
        folder = tmp_path / f"{shape} {overlap}"
        ended = trained(case.task, folder, shape, lanes=4, overlap=overlap, bucket_mb=0.0002, **case.keys)
        assert ("while the backward pass" in ended.log) == (overlap and workers > 1)
        return ended.digest

    assert len({train(1, True), train(2, False), train(2, True), train(3, True), train(3, True, "AAB")}) == 1


@pytest.mark.parametrize("task", [tasks.RandomTransform, tasks.LazyFile, tasks.WorksInPlace, tasks.Streamed])
def test_loader_workers_do_not_change_the_bits(task: type[Task], tmp_path: Path) -> None:
    none, two = (Case(task, {"loader_workers": count, "batch_size": 40}) for count in (0, 2))
    assert digest(none, 4, 2, tmp_path / "none") == digest(two, 4, 2, tmp_path / "two")


def test_loader_workers_do_not_change_the_metrics(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 1, "evaluate": {"every": 1, "metric": "batches"}}
    bests = []
    for count in (0, 1):
        ended = trained(tasks.CountsInCollate, tmp_path / str(count), loader_workers=count, **keys)
        assert ended.digest
        bests.append(ended.progress["best"])
    assert bests[0] == bests[1]


def test_a_longer_job_passes_through_the_end_of_a_shorter_one(tmp_path: Path) -> None:
    """The evaluation that is there only because a job ends has no effect on the rate, nor on what is the best."""
    keys: dict[str, Any] = {"evaluate": {"every": 3}, "batch_size": 20}
    trained(tasks.Plateau, tmp_path / "extended", Shape(2), steps=4, **keys)
    extended = trained(tasks.Plateau, tmp_path / "extended", Shape(3), steps=9, **keys)
    at_once = trained(tasks.Plateau, tmp_path / "at_once", steps=9, **keys)
    assert extended.digest == at_once.digest
    assert extended.progress == at_once.progress


@pytest.mark.parametrize("every", [3, "end"])
def test_the_best_of_an_extended_job_is_that_of_a_job_of_its_length(every: int | str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluate": {"every": every, "metric": "steps"}, "checkpoint": {"keep": 1}}
    task, folder = tasks.BestAtStepFour, tmp_path / "extended"
    short = trained(task, folder, Shape(2), steps=4, **keys)
    assert short.progress["best"] == {"value": 0.0, "step": 4}
    if every == 3:
        # What a longer job has for its best is kept, though it is neither the newest nor the best here.
        assert [info.cursor.step for info in CheckpointFolder(folder / "checkpoints").list()] == [3, 4]
    extended = trained(task, folder, Shape(2), steps=9, **keys)
    at_once = trained(task, tmp_path / "at_once", Shape(2), steps=9, **keys)
    assert extended.progress == at_once.progress
    assert extended.progress["best"]["step"] == (3 if every == 3 else 9)


RESUMED = {1, 3, 4, 5, 7, 9, 12, 13, 20, 26, 28, 29, 30, 31, 32, 33, 34}
"""Cases that keep something of their own over a resume. Those that are left out are like one of these, or are run by
tests of loaders, servers and captured lanes each time."""


@quick_for(RESUMED)
def test_interrupted_and_resumed_on_another_number_of_workers(number: int, tmp_path: Path) -> None:
    case, undisturbed = CASES[number], alone(number)
    chance = random.Random(case.name)
    first, second = chance.sample((2, chance.choice((1, 3, 4))), 2)
    stopped_at = chance.randint(1, 3)
    stopped = trained(case.task, tmp_path, Shape(first), stop_at=stopped_at, **case.keys)
    assert stopped.ending == "interrupted"
    assert stopped.progress["cursor"][0] == stopped_at
    resumed = trained(case.task, tmp_path, Shape(second), **case.keys)
    assert resumed.ending == "complete"
    assert resumed.digest == undisturbed.digest
    assert resumed.progress == undisturbed.progress
    assert stopped.losses + resumed.losses == undisturbed.losses


def test_interrupted_where_an_evaluation_is_due_evaluates_when_resumed(tmp_path: Path) -> None:
    task, folder = tasks.BatchNormAndDropout, tmp_path / "interrupted"
    keys: dict[str, Any] = {"evaluate": {"every": 2}}
    undisturbed = trained(task, tmp_path / "undisturbed", Shape(2), **keys)
    assert trained(task, folder, Shape(3), stop_at=2, **keys).progress["cursor"] == [2, 0]
    resumed = trained(task, folder, Shape(2), **keys)
    assert resumed.progress == undisturbed.progress
    assert resumed.digest == undisturbed.digest


def test_another_seed_gives_another_digest(tmp_path: Path) -> None:
    """Otherwise equal digests would prove nothing."""
    one, other = (Case(tasks.Regression, {"seed": seed}) for seed in (1, 2))
    assert digest(one, 4, 1, tmp_path / "one") != digest(other, 4, 1, tmp_path / "other")


def test_a_broken_order_of_summation_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual mistake: begin with the first lane of a worker, wherever the chunk's own first lane is."""
    digests = set()
    for workers in range(1, 5):
        hosting = host_lanes(4, workers)

        def by_worker(chunk: int, lanes: int, hosting: tuple[range, ...] = hosting) -> tuple[int, ...]:
            host = next(hosted for hosted in hosting if (chunk + 1) % lanes in hosted)
            return tuple((host.start + distance) % lanes for distance in range(lanes))

        for module in (chunks, reduction, shared_memory):
            monkeypatch.setattr(module, "summation_order", by_worker)
        # Of many values: a few may be rounded alike in every order.
        digests.add(digest(Case(tasks.TinyTransformer), 4, workers, tmp_path / str(workers)))
    assert len(digests) > 1
