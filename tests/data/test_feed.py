"""Batches arrive in the order of the plan, the same from any number of loader processes, and so does bad news."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from command import await_condition
from quorate.core.errors import JobError, UserCodeError
from quorate.data.collate import collate
from quorate.data.feed import Feed, batch_of
from quorate.data.reading import Request, Source
from quorate.data.samples import Fetched, Samples

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
def feeding(dataset: Any, loader_workers: int, threads: int = 1, collate_with: Any = collate) -> Iterator[Feed]:
    samples = Samples({Source.TRAINING: dataset, Source.VALIDATION: dataset}, collate_with, 5)
    feed = Feed(samples, iter(REQUESTS), loader_workers, threads)
    try:
        yield feed
    finally:
        feed.close()


def batches(loader_workers: int, threads: int = 1) -> list[dict[str, torch.Tensor]]:
    with feeding(Noisy(), loader_workers, threads) as feed:
        return [feed.next(request).content for request in REQUESTS]


def in_child(act: Any) -> int:
    """The exit code of a forked process that does this: thread counts and handlers stay out of the test process."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            act()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a)


def test_batches_are_the_same_with_and_without_loader_processes() -> None:
    none, two = batches(0), batches(2)
    assert [batch["i"].tolist() for batch in none] == [list(request.indices) for request in REQUESTS]
    assert same(none, two)
    assert not torch.equal(none[0]["x"], none[3]["x"]), "each epoch draws anew"


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
            feed.next(REQUESTS[0])
            feed.next(REQUESTS[1])
            with contextlib.suppress(UserCodeError):
                feed.next(REQUESTS[2])
        assert torch.get_num_threads() == 2

    assert in_child(check) == 0


def torn() -> int:
    raise ValueError("torn page")


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_exception_in_a_sample_is_the_users_with_its_index_and_line(loader_workers: int) -> None:
    with feeding(Calling(torn), loader_workers) as feed:
        feed.next(REQUESTS[0])
        feed.next(REQUESTS[1])
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
def test_a_loader_process_that_dies_is_a_clear_error(end: Any) -> None:
    expected = r"loader process failed \(loader_workers: 1\): \w+"
    with feeding(Calling(end), 1) as feed, pytest.raises(JobError, match=expected) as raised:
        # It fetches ahead, so it may die while an earlier batch is waited for.
        for request in REQUESTS[:3]:
            feed.next(request)
    assert not isinstance(raised.value, UserCodeError)


def test_a_loader_process_that_dies_does_not_interrupt_what_the_worker_is_doing() -> None:
    with feeding(Lingering(), 1) as feed:
        pid = int(feed.next(REQUESTS[0]).content[0])
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone(pid)
        torch.rand(2)  # the user's loss, say
        with pytest.raises(JobError, match=r"loader process failed \(loader_workers: 1\): \w+"):
            for request in REQUESTS[1:]:
                feed.next(request)


def test_a_batch_that_cannot_be_sent_between_processes_is_a_clear_error() -> None:
    """Left to itself the loader's queue drops it, and the worker waits for ever."""

    def with_lock(samples: Any) -> Any:
        return threading.Lock()

    with feeding(Noisy(), 1, collate_with=with_lock) as feed, pytest.raises(UserCodeError, match="pickle"):
        feed.next(REQUESTS[0])


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
    over = time.monotonic() + 4
    while Path(f"/proc/{pid}").exists() and time.monotonic() < over:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return True
        select.select([], [], [], 0.01)
    return not Path(f"/proc/{pid}").exists()


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
        time.sleep(8)
        os.write(self.sender, b"0 ")
        return index


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
def test_closing_removes_shared_memory_that_a_killed_loader_has_left() -> None:
    """torch makes it by a name, which it takes away at once; whoever is killed in between does not."""

    def leave() -> int:
        Path(f"/dev/shm/torch_{os.getpid()}_left_1").touch()
        return os.getpid()

    with feeding(Calling(leave), 1) as feed:
        for request in REQUESTS[:3]:
            loader = int(feed.next(request).content.max())
        left = Path(f"/dev/shm/torch_{loader}_left_1")
        assert left.exists()
    assert not left.exists()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
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


def test_the_next_feed_does_not_take_loaders_that_were_ended_for_dead_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is slow to die does so when the next feed looks whether its own are alive."""
    with feeding(Lingering(), 2) as ended:
        pids = {int(ended.next(request).content[0]) for request in REQUESTS[:3]}
        kept = [loader._answers[0] for loader in ended._loaders]  # as for as long as letting go of one takes
        with monkeypatch.context() as patch:
            patch.setattr(BaseProcess, "kill", lambda _: None)
            patch.setattr(BaseProcess, "join", lambda *_: None)
            ended.close()
    with feeding(Noisy(), 2) as feed:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await_condition("dead children", lambda: all(map(is_dead_child, pids)))
        assert feed.next(REQUESTS[0]).content["i"].tolist() == [3, 1]
        assert all(map(is_dead_child, pids)), "they were there to be seen"
    kept.clear()
    assert all(wait_until_gone(pid) for pid in pids)


def is_dead_child(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


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
    assert b"0" not in os.read(told, 1000).split(), "before anything was read"
    os.close(told)
    os.close(tell)


def test_a_slow_answer_is_waited_for_and_comes_in_its_order() -> None:
    """Longer than between two looks."""
    looks: list[int] = []

    def slowly() -> int:
        time.sleep(0.5)
        return 4

    dataset = Calling(slowly)
    feed = Feed(Samples({Source.TRAINING: dataset}, collate, 5), iter(REQUESTS), 2, 1, check=lambda: looks.append(1))
    try:
        assert [feed.next(request).content.tolist() for request in REQUESTS] == [list(r.indices) for r in REQUESTS]
    finally:
        feed.close()
    assert looks, "it was slow"


def test_a_batch_tells_those_of_its_samples_that_are_not_bad() -> None:
    batch = batch_of(Fetched(Request(Source.TRAINING, 0, range(1000)), None, tuple(range(1, 1000, 2))))
    assert batch.samples.tolist() == list(range(0, 1000, 2))
    assert not batch.is_empty
    assert batch_of(Fetched(Request(Source.TRAINING, 0, (4, 2)), None, (4, 2))).is_empty


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
