"""Batches arrive in the order of the plan, the same from any number of loader processes, and so does bad news."""

import contextlib
import ctypes
import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quorate.data.loader as loader_module
from children import in_child
from command import await_condition
from quorate.core.errors import HelperLost, JobError, OutOfMemory, UserCodeError
from quorate.core.processes import children_of
from quorate.data.collate import collate
from quorate.data.feed import Feed
from quorate.data.loader import Loader
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, Samples, batch_of

REQUESTS = [Request(Source.TRAINING, epoch, indices) for epoch in (0, 1) for indices in ((3, 1), (0,), (2, 4, 5))]


class Noisy:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(3) * float(numpy.random.rand()), "i": index, "threads": torch.get_num_threads()}


class Calling:
    """Calls a function for sample 4."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return self.act() if index == 4 else index


@contextlib.contextmanager
def feeding(
    dataset: Any,
    loader_workers: int,
    threads: int = 1,
    collate_with: Any = collate,
    requests: Iterable[Request] = REQUESTS,
    **options: Any,
) -> Iterator[Feed]:
    samples = Samples({Source.TRAINING: dataset, Source.VALIDATION: dataset}, collate_with, 5)
    feed = Feed(samples, iter(requests), loader_workers, threads, **options)
    try:
        yield feed
    finally:
        feed.close()


def take_two(feed: Feed) -> None:
    for request in REQUESTS[:2]:
        feed.next(request)


def batches(loader_workers: int, threads: int = 1) -> list[dict[str, torch.Tensor]]:
    with feeding(Noisy(), loader_workers, threads) as feed:
        return [feed.next(request).content for request in REQUESTS]


def same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a)


def test_batches_are_the_same_with_and_without_loader_processes() -> None:
    none, two = batches(0), batches(2)
    assert [batch["i"].tolist() for batch in none] == [list(request.indices) for request in REQUESTS]
    assert same(none, two)
    assert not torch.equal(none[0]["x"], none[3]["x"]), "each epoch draws anew"


def test_batches_travel_where_dev_shm_is_read_only() -> None:
    def check() -> None:
        try:
            take_dev_shm_away()
        except OSError:
            os._exit(CANNOT)
        assert same(batches(0), batches(2))
        with feeding(Calling(lambda: torch.ones(100_000)), 1, collate_with=lambda samples: samples) as feed:
            *_, last = [feed.next(request).content for request in REQUESTS[:3]]
        assert last[1].sum() == 100_000

    code = in_child(check)
    if code == CANNOT:
        pytest.skip("no mount namespace can be had here")
    assert code == 0


CANNOT = 77
NEW_MOUNTS, READ_ONLY, PRIVATE = 0x20000, 1, 0x44000


def take_dev_shm_away() -> None:
    """Mount what nobody can write to over it, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(NEW_MOUNTS),
        libc.mount(None, b"/", None, PRIVATE, None),
        libc.mount(b"none", b"/dev/shm", b"tmpfs", READ_ONLY, None),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), "no mount of one's own")
    with pytest.raises(OSError, match="Read-only"):
        Path("/dev/shm/anything").touch()


def test_fetching_uses_one_thread_whatever_the_lane_uses() -> None:
    def check() -> None:
        torch.set_num_threads(2)
        without = batches(0, threads=2)
        assert torch.get_num_threads() == 2
        assert {int(count) for batch in without for count in batch["threads"]} == {1}

    assert in_child(check) == 0
    with_loaders = batches(2, threads=2)
    assert {int(count) for batch in with_loaders for count in batch["threads"]} == {1}


def test_threads_are_restored_after_a_sample_that_raises() -> None:
    def check() -> None:
        torch.set_num_threads(2)
        with feeding(Calling(lambda: 1 / 0), 0, threads=2) as feed:
            take_two(feed)
            with contextlib.suppress(UserCodeError):
                feed.next(REQUESTS[2])
        assert torch.get_num_threads() == 2

    assert in_child(check) == 0


def torn() -> int:
    raise ValueError("torn page")


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_exception_in_a_sample_is_the_users_with_its_index_and_line(loader_workers: int) -> None:
    with feeding(Calling(torn), loader_workers) as feed:
        take_two(feed)
        with pytest.raises(
            UserCodeError, match=r"^ValueError: torn page \(in sample 4 of the training set\)$"
        ) as raised:
            feed.next(REQUESTS[2])
    assert 'raise ValueError("torn page")' in raised.value.traceback


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_an_exception_in_collate_says_so(loader_workers: int) -> None:
    def refuse(samples: Any) -> Any:
        raise TypeError("cannot stack")

    with (
        feeding(Noisy(), loader_workers, collate_with=refuse) as feed,
        pytest.raises(UserCodeError, match=r"cannot stack \(in collate\(\)\)"),
    ):
        feed.next(REQUESTS[0])


@pytest.mark.parametrize(
    "end", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["exits", "is killed"]
)
@pytest.mark.parametrize("loader_workers", [1, 2])
def test_the_death_of_a_loader_is_told_with_the_samples_that_it_died_of(end: Any, loader_workers: int) -> None:
    with feeding(Calling(end), loader_workers) as feed:
        # It fetches ahead, and may be dead by now; what it has answered counts all the same.
        assert [feed.next(request).content.tolist() for request in REQUESTS[:2]] == [[3, 1], [0]]
        with pytest.raises(HelperLost) as raised:
            feed.next(REQUESTS[2])
    ending = "exited with code 3" if "3" in str(end.__code__.co_consts) else "was killed by SIGKILL"
    assert re.match(rf"its loader process \d+ {ending}\.", raised.value.message)
    assert raised.value.message.endswith("It was to read samples 2, 4, 5 of the training set.")
    assert ("when memory runs out" in raised.value.message) == ("SIGKILL" in ending)


def test_a_process_that_a_loader_has_forked_does_not_hide_its_death() -> None:
    """It holds the loader's end of the socket for as long as it lives."""
    told, tell = os.pipe()

    def leave_a_child() -> int:
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(tell, str(child).encode())
        os._exit(3)

    with feeding(Calling(leave_a_child), 1) as feed:
        take_two(feed)
        with pytest.raises(HelperLost, match="exited with code 3"):
            feed.next(REQUESTS[2])
    os.kill(int(os.read(told, 100)), signal.SIGKILL)
    os.close(told)
    os.close(tell)


def test_a_loader_that_cannot_answer_any_more_is_as_good_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_everything() -> int:
        os.closerange(3, 4096)
        signal.pause()
        return 0

    monkeypatch.setattr(loader_module, "_GRACE", 0.1)
    with feeding(Calling(close_everything), 1) as feed:
        take_two(feed)
        with pytest.raises(HelperLost, match=r"its loader process \d+ has closed its end of the socket\."):
            feed.next(REQUESTS[2])


def test_a_loader_that_somebody_else_has_reaped_is_gone() -> None:
    with feeding(Calling(lambda: os._exit(3)), 1) as feed:
        assert isinstance(feed._reader, loader_module.Loaders)
        pid = feed._reader.processes[0].pid
        take_two(feed)
        os.waitpid(pid, 0)
        with pytest.raises(HelperLost, match=rf"its loader process {pid} is gone\."):
            feed.next(REQUESTS[2])


@pytest.mark.parametrize("failing", ["fork", "pidfd_open"])
def test_a_loader_that_cannot_be_started_leaves_none_behind(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two."""
    before, real, calls = children_of(os.getpid()), getattr(os, failing), []

    def once(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(11, "Resource temporarily unavailable")
        return int(real(*arguments))

    monkeypatch.setattr(os, failing, once)
    with pytest.raises(HelperLost, match="could not be started: Resource temporarily unavailable"):
        Feed(Samples({Source.TRAINING: Noisy()}, collate, 5), iter(REQUESTS), 2, 1)
    assert children_of(os.getpid()) == before


class Large:
    """Its samples and its requests are more than a socket takes."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        return index


def test_neither_side_waits_for_the_other_to_read() -> None:
    """The loader sends what fills the socket while as much is asked of it."""
    requests = [Request(Source.TRAINING, 0, range(turn, 100_000)) for turn in range(4)]
    collate_with = lambda many: bytes(8 * len(many))  # noqa: E731 (which lies within the pickle)
    with feeding(Large(), 1, collate_with=collate_with, requests=requests, prefetch=4) as feed:
        assert [len(feed.next(request).content) for request in requests] == [8 * (100_000 - turn) for turn in range(4)]


def test_a_loader_that_fails_for_a_reason_of_ours_says_so() -> None:
    class Failing:
        def __getitem__(self, request: Request) -> Any:
            raise MemoryError if request == REQUESTS[1] else OSError(5, "broken")

    for asked, kind, words in (
        (REQUESTS[1], OutOfMemory, r"its loader process \d+ ran out of memory"),
        (REQUESTS[0], JobError, "A loader process failed: OSError"),
    ):
        failing: Any = Failing()
        loader = Loader(failing, iter([(asked, None)]))
        loader.ask_ahead(2)
        with pytest.raises(kind, match=words):
            loader.take(REQUESTS[0], lambda: None)
        Loader.end([loader])


def test_a_loader_process_that_dies_does_not_interrupt_what_the_worker_is_doing() -> None:
    with feeding(Lingering(), 1) as feed:
        pid = int(feed.next(REQUESTS[0]).content[0])
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone(pid)
        torch.rand(2)  # the user's loss, say
        with pytest.raises(HelperLost, match=rf"its loader process {pid} was killed by SIGKILL"):
            for request in REQUESTS[1:]:
                feed.next(request)


def test_a_batch_that_cannot_be_sent_between_processes_is_a_clear_error() -> None:
    """Left to itself the loader's queue drops it, and the worker waits for ever."""

    def with_lock(samples: Any) -> Any:
        return threading.Lock()

    with feeding(Noisy(), 1, collate_with=with_lock) as feed, pytest.raises(UserCodeError, match="pickle"):
        feed.next(REQUESTS[0])


class Torn:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __setstate__(self, state: Any) -> None:
        raise state["error"]("from my own class")


@pytest.mark.parametrize("error", [EOFError, ConnectionError, OSError, ValueError])
def test_a_batch_that_cannot_be_unpickled_is_the_tasks_error_with_its_traceback(error: type[Exception]) -> None:
    """And not a loader that is lost, whatever is raised; the loader goes on with the next batch."""
    torn = [Torn(error), 1]
    with feeding(Noisy(), 1, collate_with=lambda samples: torn if len(samples) == 2 else len(samples)) as feed:
        with pytest.raises(UserCodeError) as raised:
            feed.next(REQUESTS[0])
        assert feed.next(REQUESTS[1]).content == 1
    assert raised.value.message.startswith(f"{error.__name__}: from my own class")
    assert "could not be unpickled in the worker" in raised.value.message
    assert "__setstate__" in raised.value.traceback


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_dataset_cannot_tell_who_reads_it(loader_workers: int) -> None:
    """Where torch is told of a loader, its collate makes memory by a name in /dev/shm."""
    with feeding(Calling(lambda: 7 if torch.utils.data.get_worker_info() is None else 8), loader_workers) as feed:
        *_, last = [feed.next(request).content for request in REQUESTS[:3]]
    assert last.tolist() == [2, 7, 5]
    assert not last.is_shared()


def test_a_request_out_of_order_is_our_own_mistake() -> None:
    with feeding(Noisy(), 1) as feed, pytest.raises(AssertionError, match="expected"):
        feed.next(REQUESTS[1])


class Lingering:
    """Each sample tells who fetched it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def wait_until_gone(pid: int) -> bool:
    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return await_condition(f"the end of {pid}", is_gone)


def test_closing_ends_the_loader_processes() -> None:
    with feeding(Lingering(), 2) as feed:
        pids = {int(feed.next(request).content[0]) for request in REQUESTS[:3]}
        assert os.getpid() not in pids
    assert all(wait_until_gone(pid) for pid in pids)


class Stuck:
    """Tells who fetches it, and when it has been fetched, a good while later."""

    def __init__(self, sender: int) -> None:
        self.sender = sender

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        os.write(self.sender, f"{os.getpid()} ".encode())
        time.sleep(600)  # it is killed
        os.write(self.sender, b"0 ")
        return index


def test_batches_of_any_size_leave_no_name_in_memory_and_touch_nobody_elses() -> None:
    strangers = Path(f"/dev/shm/torch_{os.getpid()}_1_1")

    def large() -> Any:
        strangers.touch()
        return torch.zeros(1_000_000)

    def named(pids: set[int]) -> set[Path]:
        """Other test runs have theirs there too."""
        return {path for path in Path("/dev/shm").iterdir() if pids & set(map(int, re.findall(r"\d+", path.name)))}

    try:
        before = named({os.getpid()})
        with feeding(Calling(large), 1, collate_with=lambda samples: samples) as feed:
            for request in REQUESTS[:3]:
                feed.next(request)
            pids = {os.getpid(), *children_of(os.getpid())}
            assert named(pids) == before | {strangers}
        assert named(pids) == before | {strangers}
    finally:
        strangers.unlink(missing_ok=True)


def test_closing_does_not_wait_for_loaders_that_are_busy() -> None:
    told, tell = os.pipe()
    with feeding(Stuck(tell), 3) as feed:
        pids: set[int] = set()
        while len(pids) < 3:
            pids |= {int(pid) for pid in os.read(told, 1000).split()}
        feed.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not select.select([told], [], [], 0)[0], "before anything was read"
    assert 0 not in pids
    os.close(told)
    os.close(tell)


def test_whoever_waits_for_a_loader_hears_of_the_end_of_the_generation() -> None:
    told, tell = os.pipe()
    looks = []

    def check() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise JobError("the generation is over")

    feed = Feed(Samples({Source.TRAINING: Stuck(tell)}, collate, 5), iter(REQUESTS), 2, 1, check=check)
    with pytest.raises(JobError, match=r"^the generation is over$"):
        feed.next(REQUESTS[0])
    feed.close()
    os.close(tell)  # a loader that was slow to begin has told nothing at all
    assert b"0" not in os.read(told, 1000).split(), "before anything was read"
    os.close(told)


def test_a_slow_answer_is_waited_for_and_comes_in_its_order() -> None:
    """Longer than between two looks."""
    looks: list[int] = []

    def slowly() -> int:
        time.sleep(0.5)
        return 4

    with feeding(Calling(slowly), 2, check=lambda: looks.append(1)) as feed:
        assert [feed.next(request).content.tolist() for request in REQUESTS] == [list(r.indices) for r in REQUESTS]
    assert looks, "it was slow"


def test_a_batch_tells_those_of_its_samples_that_are_not_bad() -> None:
    batch = batch_of(Batch(Request(Source.TRAINING, 0, range(1000)), None, tuple(range(1, 1000, 2))))
    assert batch.samples.tolist() == list(range(0, 1000, 2))
    assert not batch.is_empty
    assert batch_of(Batch(Request(Source.TRAINING, 0, (4, 2)), None, (4, 2))).is_empty


def test_loader_processes_die_with_a_worker_that_is_killed() -> None:
    told, tell = os.pipe()
    worker = os.fork()
    if worker == 0:
        with feeding(Lingering(), 2) as feed:
            pids = sorted({int(feed.next(request).content[0]) for request in REQUESTS[:3]})
            os.write(tell, f"{pids}".encode())
            signal.pause()
    os.close(tell)
    pids = [int(pid) for pid in os.read(told, 1000).decode().strip("[]").split(",")]
    os.close(told)
    assert pids
    assert worker not in pids
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert all(wait_until_gone(pid) for pid in pids)


def test_all_loaders_are_forked_before_the_plan_runs_code_of_the_task() -> None:
    alive: list[int] = []

    def planned() -> Iterator[Request]:
        alive.append(len(own_children() - before))
        yield from REQUESTS

    before = own_children()
    with feeding(Noisy(), 3, requests=planned()):
        pass
    assert alive == [3]


def own_children() -> set[int]:
    return set(children_of(os.getpid()))
