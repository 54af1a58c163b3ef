"""What Gloo and NCCL say becomes: who, which sum, which peer, and what to check. NCCL is a script here."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from quorate.collectives.connect import connect
from quorate.core.errors import JobError, LinkError, PeerLost
from quorate.core.generation import Member
from quorate.strategies.gangs.nccl import Ending, explain, gist
from quorate.strategies.gangs.process_group import ProcessGroup
from strategies.test_strategy_contract import Kind, endpoints, error_of

MEMBERS = [Member(worker, f"10.0.0.{host}:4000", range(0)) for worker, host in ((4, 1), (5, 1), (7, 2))]
IN = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77"
REMOTE = f"""{IN}, remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
"""
SYSTEM = f"""{IN}, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"""
USAGE = f"""{IN}, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
"""
INTERNAL = f"""{IN}, internal error - please report this issue to the NCCL developers, NCCL version 2.28.9
ncclInternalError: Internal check failed.
Last error:
"""
CUDA = f"""{IN}, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""
DUPLICATE = f"{USAGE}Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 34000"
WATCHDOG = (
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
)
IBV = "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR"


@pytest.mark.parametrize(
    ("text", "happened", "check"),
    [
        (DUPLICATE, "worker 7 and worker 4 were given the same GPU (bus 34000)", "CUDA_VISIBLE_DEVICES"),
        (f"{INTERNAL}Bootstrap : no socket interface found", "no network interface", "nccl.interface"),
        (
            f"{INTERNAL}ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)",
            "no network interface",
            "nccl.interface",
        ),
        (
            f"{REMOTE}socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer",
            "the connection to worker 7 (10.0.0.2) has ended",
            "log of that worker",
        ),
        (
            f"{REMOTE}socketProgress: Connection closed by remote peer node2<42830>",
            "the connection to node2 has ended",
            "log of that worker",
        ),
        (
            f"{REMOTE}NET/IB : Got completion from peer 10.0.0.1<39138> with error 12, opcode 0, len 0, vendor err 129",
            "InfiniBand or RoCE has lost workers 4 or 5 (10.0.0.1) (status 12)",
            "nccl.infiniband: false",
        ),
        (f"{SYSTEM}{IBV}", "(ibv_modify_qp: 110 Connection timed out)", "locked memory"),
        (
            f"{SYSTEM}socketStartConnect: Connect to 10.0.0.2<45763> failed : Connection refused",
            "no connection to worker 7 (10.0.0.2) could be made: Connection refused",
            "firewall",
        ),
        (f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-x (size 5)", "shared memory", "--shm-size"),
        (SYSTEM, "a call to the system", "nccl.debug: INFO"),
        (f"{CUDA}Cuda failure 2 'out of memory'", "no memory left", "batch_size"),
        (f"{CUDA}Cuda failure 719 'unspecified launch failure'", "this worker's GPU has failed", "Xid"),
        (WATCHDOG, "ALLREDUCE was not done within 600000 ms", "nccl.timeout"),
        (REMOTE, "the connection to another worker has ended", "network"),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:10895",
            "the connection to worker 7 (10.0.0.2) has ended",
            "log of that worker",
        ),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:25266: Connection reset",
            "the connection to worker 7 (10.0.0.2) has ended",
            "log of that worker",
        ),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv "
            "operation to complete",
            "a worker did not come in time",
            "reach each other",
        ),
        ("what nobody has seen yet", "it is not known why", "nccl.debug"),
    ],
    ids=lambda value: str(value).splitlines()[-1][:40],
)
def test_each_text_says_what_happened_and_what_to_check(text: str, happened: str, check: str) -> None:
    explained = explain(text, MEMBERS)
    assert happened in explained.happened
    assert check in explained.check


def test_the_line_that_says_most_is_kept() -> None:
    assert gist(DUPLICATE).startswith("Duplicate GPU detected")
    assert (
        gist("\nConnection closed by peer [10.0.0.2]:10895\nframe #0") == "Connection closed by peer [10.0.0.2]:10895"
    )
    assert gist("") == "nothing"


class Work:
    """What NCCL gives for a sum that has failed."""

    def __init__(self, text: str) -> None:
        self._text = text

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        if self._text:
            raise RuntimeError(self._text)


class Scripted:
    """Stands for NCCL: one text for each sum, empty where it succeeds. It takes its time to abort."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)
        self.is_aborting = threading.Event()
        self.may_end = threading.Event()
        self.aborts = 0

    def allreduce(self, _: list[torch.Tensor], __: Any) -> Work:
        return Work(next(self._texts))

    def abort(self) -> None:
        self.aborts += 1
        self.is_aborting.set()
        self.may_end.wait()


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    """Two workers, 10 and 11, that are connected."""
    with ExitStack() as stack:

        def join(endpoint: Any) -> ProcessGroup:
            links, _ = connect(endpoint, ())
            stack.callback(links.close)
            return ProcessGroup(endpoint, links, torch.device("cpu"))

        with ThreadPoolExecutor(2) as threads:
            joined = list(threads.map(join, endpoints(Kind("ddp", 2), stack)))
        for group in joined:
            stack.callback(group.close)
        yield joined


def in_both(groups: list[ProcessGroup], work: Callable[[ProcessGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, groups))


def scripted(group: ProcessGroup, *texts: str) -> Scripted:
    backend = Scripted(*texts)
    backend.may_end.set()
    group.__dict__.update(_backend=backend, _is_host=False)
    return backend


def error_in_second_sum(group: ProcessGroup, text: str) -> BaseException | None:
    scripted(group, "", text)
    group.begin_step(12)
    for _ in range(2):
        group.begin_sum(torch.zeros(3))
    return error_of(group.wait)


def test_an_error_names_the_worker_the_sum_and_the_step(groups: list[ProcessGroup]) -> None:
    text = f"{REMOTE}socketProgressOpt: Call to recv from 127.0.0.1<33759> failed : Connection reset by peer"
    first, second = in_both(groups, lambda group: error_in_second_sum(group, text))
    assert type(first) is type(second) is LinkError
    assert str(first).startswith(
        "sum 2 of step 12 by NCCL among workers 10, 11 has failed on worker 10: the connection"
    )
    assert "on worker 11" in str(second)
    assert "NCCL said: socketProgressOpt: Call to recv" in str(second)


def test_what_would_happen_again_ends_the_job(groups: list[ProcessGroup]) -> None:
    errors = in_both(groups, lambda group: error_in_second_sum(group, DUPLICATE.replace("rank 2", "rank 1")))
    assert all(isinstance(error, JobError) and not isinstance(error, LinkError) for error in errors)
    assert "worker 11 and worker 10 were given the same GPU" in str(errors[0])


def test_whoever_is_gone_is_named_by_our_own_links(groups: list[ProcessGroup]) -> None:
    groups[1]._links.close()
    error = error_in_second_sum(groups[0], REMOTE)
    assert isinstance(error, PeerLost)
    assert error.worker == 11


def test_a_sum_of_gloo_that_a_worker_leaves_is_explained(groups: list[ProcessGroup]) -> None:
    """With Gloo's own text: the links of both still stand when the group of one is gone."""
    groups[1].close()
    told = threading.Event()

    def work(group: ProcessGroup) -> BaseException | None:
        if group is groups[1]:
            told.wait()
            return error_of(lambda: group._links.gather(group._step, 15, b""))
        group.begin_step(3)
        group.begin_sum(torch.zeros(3))
        original = group.translated
        group.translated = lambda error: (told.set(), original(error))[1]  # type: ignore[method-assign,func-returns-value]
        return error_of(group.wait)

    error, _ = in_both(groups, work)
    assert str(error).startswith("sum 1 of step 3 by Gloo among workers 10, 11 has failed on worker 10: the connection")
    assert "(127.0.0.1) has ended" in str(error)


def test_an_abort_that_hangs_keeps_nobody_waiting(groups: list[ProcessGroup]) -> None:
    backend = scripted(groups[0])
    backend.may_end.clear()
    groups[0].abort()
    groups[0].abort()
    assert backend.is_aborting.wait(60)
    groups[0].close()
    assert backend.aborts == 1
    backend.may_end.set()


def test_a_group_that_fails_to_end_is_let_go_of() -> None:
    class Broken:
        def abort(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    held: list[Any] = [object()]
    assert Ending(Broken()).wait(held, 60)
    assert not held
