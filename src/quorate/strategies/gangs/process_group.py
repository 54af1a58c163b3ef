"""A `torch.distributed` process group of the members of one generation: Gloo on hosts, NCCL on GPUs.

No environment variable and no port is asked for: members tell each other where they are over the links that they have.
The group is nobody's default group, and the next generation makes another in its place.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Store, TCPStore, Work

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.reduction import Reduction
from quorate.core.errors import GenerationOver, JobError, LeaseExpired, LinkError
from quorate.core.generation import Member, name_of, names_of
from quorate.cuda.reduction import Wrapped
from quorate.strategies.gangs.nccl import Ending, explain, gist

log = logging.getLogger(__name__)

STORE_INDEX, BLAME_INDEX = 14, 15
"""Tell apart what is gathered: where members are, and whether all of them are still there."""

GLANCE = timedelta(milliseconds=50)
"""Between two looks at whether the generation is over, for those who wait for a sum."""

CONNECTING = timedelta(seconds=5)
"""All have just heard of each other over their links: whoever does not come within this time has stopped since."""

PATIENCE = timedelta(days=1)
"""How long a sum may take by itself: the lease and the coordinator say sooner who is waited for in vain."""


class GatheredStore(Store):
    """What Gloo writes down for the others before it connects, passed on by one `gather` when it first reads. All
    members of the generation take part, and each reads what those `among` whom it is have written."""

    def __init__(self, step: int, links: Reduction, among: Sequence[int]) -> None:
        super().__init__()
        self._step = step
        self._links = links
        self._among = among
        self._own: dict[str, bytes] = {}
        self._known: dict[str, bytes] | None = None

    def set(self, key: str, value: Any) -> None:
        self._own[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if self._known is None:
            own = json.dumps({name: value.hex() for name, value in self._own.items()}).encode()
            told = self._links.gather(self._step, STORE_INDEX, own)
            written = [json.loads(told[position]) for position in self._among]
            self._known = {name: bytes.fromhex(value) for each in written for name, value in each.items()}
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        for key in keys:
            self.get(key)


class ProcessGroup:
    """Sums tensors over the members of a generation, in whichever order its backend adds: the same bits on all of them,
    and the same again on as many. `timeout`: the seconds that NCCL may take for a sum.

    Sums are begun in the same order by all, from any thread, and waited for together. `abort` ends the wait. A group
    that is asked for other collectives is asked for no sums.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        links: Reduction,
        device: torch.device,
        timeout: float | None = None,
        among: Sequence[int] | None = None,
    ) -> None:
        everybody, self._step = endpoint.generation.members, endpoint.generation.cursor.step
        among = range(len(everybody)) if among is None else among
        members = [everybody[position] for position in among]
        self._among = among
        self._position = among.index(endpoint.position)
        self._members = members
        self._links = links
        self._lease = endpoint.lease
        # It raises when the generation is over: while members connect, nobody else would end the wait for a sum.
        self._check = endpoint.deadline
        self._begun: list[Work] = []
        self._error: Exception | None = None
        self._backend: Any = None
        self._ending: Ending | None = None
        self._at, self._sums, self._done = self._step, 0, 0
        self._doing = "the connection after step"
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._is_host = device.type == "cpu"
        self._is_patient = False
        self._patience = PATIENCE if timeout is None or self._is_host else timedelta(seconds=timeout)
        try:
            make = self._gloo if self._is_host else self._nccl
            store, backend = make(members, len(members))
            group = dist.ProcessGroup(store, self._position, len(members))
            kind = dist.ProcessGroup.BackendType.GLOO if self._is_host else dist.ProcessGroup.BackendType.NCCL
            group._register_backend(torch.device(device.type), kind, backend)
        except RuntimeError as error:
            raise self.translated(error) from None
        self._backend = backend
        self._group: dist.ProcessGroup | None = group
        log.info("%s joins %s", "Gloo" if self._is_host else "NCCL", names_of(member.worker for member in members))

    def _gloo(self, members: Sequence[Member], size: int) -> tuple[Store, Any]:
        store = GatheredStore(self._step, self._links, self._among)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        own = members[self._position].address.rpartition(":")[0]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own.strip("[]"))]
        options._timeout, options._threads = CONNECTING, 2
        return store, dist.ProcessGroupGloo(store, self._position, size, options)

    def _nccl(self, members: Sequence[Member], size: int) -> tuple[Store, Any]:
        """NCCL asks its store whenever it needs a communicator: the first member has one, on a port that is free."""
        host, is_first = members[0].address.rpartition(":")[0].strip("[]"), self._position == 0
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_first else None
        port = b"" if store is None else str(store.port).encode()
        told = self._links.gather(self._step, STORE_INDEX, port)[self._among[0]]
        if store is None:
            store = TCPStore(host, int(told), is_master=False, timeout=CONNECTING)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._patience
        return store, dist.ProcessGroupNCCL(store, self._position, size, options)

    @property
    def group(self) -> dist.ProcessGroup:
        """For what needs torch's own."""
        assert self._group is not None, "it is closed"
        return self._group

    def begin_step(self, step: int) -> None:
        """The sums that are begun from now on are those of this step, as errors call them."""
        self._at, self._sums, self._done = step, 0, 0

    def begin_sum(self, tensor: torch.Tensor) -> None:
        """Begin to add this tensor up over all members, in its place. What is wrong is raised by `wait`."""
        if self._error is not None or self._is_over.is_set():
            return
        self._sums += 1
        options = AllreduceOptions()
        options.timeout = self._patience
        try:
            self._begun.append(self._backend.allreduce([tensor], options))
        except RuntimeError as error:
            self._error = error

    def begin(self, collective: str, *arguments: Any) -> Work:
        """Begin any of torch's collectives, by its name; whoever waits for the work can be interrupted."""
        if self._is_over.is_set():
            raise GenerationOver("the links of this generation are closed")
        self._doing = f"{collective} of step"
        if self._is_host and not self._is_patient:
            # Whoever calls it gives no time of its own, and that for connecting would make an end of who is slow.
            self._backend._set_default_timeout(self._patience)
            self._is_patient = True
        if not self._is_host:
            _ask_for_work(arguments)
        try:
            work: Work = getattr(self.group, collective)(*arguments)
        except RuntimeError as error:
            raise self.translated(error) from None
        if not self._is_host:
            # NCCL does one after the other, so that the last tells of all; and each holds the tensors that it gives.
            self._begun = [work]
            return work
        self._begun = [*(other for other in self._begun if not other.is_completed()), work]
        return GuardedWork(self, work)

    def complete(self) -> None:
        """Return when every collective that was begun is there; raise LinkError where one never will be. Whoever waits
        for one on a GPU has only told its stream to: with an abort, that goes on with whatever lies there."""
        # Gloo's were waited for: a second time, some write their result again, over what was made of it.
        if not self._is_host:
            self.wait()
        if self._is_over.is_set():
            raise GenerationOver("the links of this generation are closed")

    def wait_for(self, work: Work) -> None:
        """Return when a work is done; raise LinkError where it never will be."""
        try:
            self._await(work)
        except RuntimeError as error:
            raise self.translated(error) from None
        if self._is_over.is_set():
            raise GenerationOver("the links of this generation were closed while a collective was under way")
        if self._is_host:
            # Some of Gloo's never say that they are complete, and each holds the tensors that it was given.
            self._begun = [other for other in self._begun if other is not work]

    def sum(self, tensor: torch.Tensor) -> None:
        """Add this tensor up over all members, in its place, and wait for it."""
        self.begin_sum(tensor)
        self.wait()

    def wait(self) -> None:
        """Return when all sums that were begun are there; raise LinkError where they never will be."""
        try:
            while self._begun and self._error is None:
                self._await(self._begun[0])
                self._begun.pop(0)
                self._done += 1
        except RuntimeError as error:
            self._error = error
        if self._is_over.is_set():
            raise GenerationOver("the links of this generation were closed while gradients were summed")
        if self._error is not None:
            raise self.translated(self._error) from None

    def _await(self, work: Work) -> None:
        while not work.is_completed():
            if self._is_over.is_set():
                return
            self._check()
            if self._lease() <= 0:
                raise LeaseExpired("the lease ended while gradients were summed")
            if self._is_host:
                if _is_done_soon(work):
                    return
            else:
                time.sleep(0.0002)
        work.wait()

    def translated(self, error: Exception) -> JobError:
        """What its backend says, in our words. Our own links know better who is gone: they are asked first."""
        text, backend = str(error), "Gloo" if self._is_host else "NCCL"
        own, others = self._members[self._position].worker, names_of(member.worker for member in self._members)
        which = f"sum {self._done + 1} of step {self._at}" if self._sums else f"{self._doing} {self._at}"
        explained = explain(text, self._members)
        message = (
            f"{which} by {backend} among {others} has failed on {name_of(own)}: {explained.happened}. "
            f"{explained.check} {backend} said: {gist(text)}"
        )
        try:
            self._links.gather(self._step, BLAME_INDEX, b"")
        except LinkError as lost:
            log.info("%s", message)
            return lost
        finally:
            self._links.close()
        return JobError(message[0].upper() + message[1:]) if explained.is_final else LinkError(message)

    def abort(self) -> None:
        """End the wait of whoever waits. Any thread may call it, any number of times."""
        self._is_over.set()
        with self._lock:
            if not self._is_host and self._backend is not None and self._ending is None:
                self._ending = Ending(self._backend)

    def close(self) -> None:
        """Let go of the group. Where a member hangs, a sum of Gloo stays begun until that is gone: a thread sees to its
        end. NCCL's are aborted, by another thread."""
        self.abort()
        begun = [*self._begun]
        held: list[Any] = [self._backend, self._group, *begun]
        is_begun = self._is_host and any(not work.is_completed() for work in begun)
        self._backend, self._group = None, None
        begun.clear()
        self._begun.clear()
        self._error = None
        if self._ending is not None:
            self._ending.wait(held)
        elif is_begun:
            threading.Thread(target=held.clear, name="quorate-process-group-end", daemon=True).start()
        else:
            held.clear()


class GuardedWork(Work):
    """A collective under way, which is waited for as long as the generation lasts."""

    def __init__(self, group: ProcessGroup, work: Work) -> None:
        super().__init__()
        self._group = group
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        self._group.wait_for(self._work)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def get_future(self) -> Any:
        return self._work.get_future()


class GroupLinks(Wrapped):
    """The links of a generation, and with them its process groups: who closes one ends the waits of all."""

    def __init__(self, links: Reduction, *groups: ProcessGroup) -> None:
        super().__init__(links)
        self._groups = groups

    def close(self) -> None:
        for group in self._groups:
            group.abort()
        super().close()


def _ask_for_work(arguments: Sequence[Any]) -> None:
    """Whoever calls a collective and is to wait gets nothing from NCCL that tells how it has ended: so it is called as
    if nobody was, and who called it waits for the work."""
    for options in arguments:
        if hasattr(options, "asyncOp"):
            options.asyncOp = True


def _is_done_soon(work: Work) -> bool:
    """Gloo wakes whoever waits as soon as the sum is there, and raises where the time is over. It also raises what is
    wrong with a sum: whoever finds it complete asks once more, since it may have come just after the time was over."""
    with suppress(RuntimeError):
        return work.wait(GLANCE)
    return False
