"""A job on forked workers over real links, without coordinator and fork_server: a run takes a fraction of a second.

Because the workers are forked from the test, whatever the test patches is patched in them too.
"""

import io
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.core.failure import Failure
from quorate.core.generation import FIRST_SERVER, Generation, GenerationId, Member, Role, server_id
from quorate.data.fingerprint import fingerprint_in_child
from quorate.lanes.chunks import host_lanes
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.replica.device import CPU, digests
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.spec.rules import checked_job
from quorate.strategies.kinds import sharding_of
from quorate.task.progress import Progress
from quorate.task.run_mode import RunMode
from quorate.task.task import Task, configure
from quorate.training.activity import Activity
from quorate.training.strategy import StepRequest
from quorate.wire.handshake import Credentials
from quorate.worker.assembly import TRAINING, Assembly, Hooks, SessionParts, build_samples, checkpointer_of
from quorate.worker.session import DIGEST_INDEX
from warm import measure_no_more
from wire.pairs import on_host

TOKEN = "a token for tests"


@dataclass(frozen=True)
class Ended:
    """How a gang ended: what each worker holds, or the first worker's failure."""

    ending: str
    digests: list[str]
    progress: dict[str, Any]
    losses: list[float]
    norms: list[dict[str, float]]
    tensors: dict[str, str]
    failures: list[Failure]
    log: str
    """How the workers met, in their own words."""

    @property
    def digest(self) -> str:
        assert not self.failures, self.failures[0]
        assert len(set(self.digests)) == 1, f"the workers ended with different weights: {self.digests}"
        return self.digests[0]

    @property
    def failure(self) -> Failure:
        """The failure that explains the others."""
        assert self.failures, "the job was expected to fail, but it did not"
        return next((f for f in self.failures if f.kind not in ("PeerLost", "FrameError")), self.failures[0])


def job(task: type[Task], **keys: Any) -> JobSpec:
    """A small job of a task; keys as in a job file."""
    defaults: dict[str, Any] = {"lanes": 4, "batch_size": 12, "steps": 6, "seed": 11}
    if "epochs" in keys:
        del defaults["steps"]
    return checked_job({"task": f"{task.__module__}:{task.__qualname__}", **defaults, **keys})


def train(
    task: type[Task],
    spec: JobSpec,
    workers: int,
    folder: Path,
    *,
    stop_at: int | None = None,
    sabotage: Callable[[int, Any], None] | None = None,
    hosts: str = "",
    mode: RunMode = TRAINING,
) -> Ended:
    """Train on forked workers, and on the servers of the strategy. With a checkpoint in `folder`, go on from it.

    `stop_at`: the last worker asks to stop in the exchange of that step. `sabotage(position, loop)` runs in each
    worker before its loop. `hosts`: a letter for the host of each worker, and then of each server, as if they ran on
    several. What is collected is what workers have.
    """
    pids, conversations = [], []
    for position in range(workers + spec.strategy.server_count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _child(task, spec, workers, position, theirs, folder, stop_at, sabotage, mode)
        theirs.close()
        pids.append(pid)
        conversations.append(ours.makefile("rw"))
        ours.close()
    addresses = [conversation.readline().rstrip("\n").split(" ") for conversation in conversations]
    for host, address in zip(hosts, addresses if hosts else [], strict=True):
        address[1] = on_host(host, address[1])
    for conversation in conversations:
        conversation.write(json.dumps(addresses) + "\n")
        conversation.close()
    for pid in pids:
        os.waitpid(pid, 0)
    return _collect(folder, workers, len(pids))


def _collect(folder: Path, workers: int, members: int) -> Ended:
    told = []
    for position in range(members):
        file = folder / f"worker-{position}.json"
        assert file.exists(), f"worker {position} died without a word"
        told.append(json.loads(file.read_text()))
        file.unlink()
    log = "".join(one.get("log", "") for one in told)
    failures = [Failure.from_dict(one["failure"]) for one in told if "failure" in one]
    whole = [one for one in told[:workers] if "failure" not in one]
    if failures:
        return Ended("failed", [one["digest"] for one in whole], {}, [], [], {}, failures, log)
    first, all_digests = whole[0], [one["digest"] for one in whole]
    return Ended(
        first["ending"], all_digests, first["progress"], first["losses"], first["norms"], first["tensors"], [], log
    )


def _child(
    task: type[Task],
    spec: JobSpec,
    workers: int,
    position: int,
    parent: socket.socket,
    folder: Path,
    stop_at: int | None,
    sabotage: Callable[[int, Any], None] | None,
    mode: RunMode,
) -> None:
    activity = Activity(lambda *_: None)
    if spec.strategy.is_gang:
        from quorate.strategies.gangs import process_group

        process_group.CONNECTING = timedelta(seconds=60)  # on a busy machine all of them come, but late
    if position > 0:
        measure_no_more()
    try:
        listeners = Listeners.bind("127.0.0.1", shares_memory=spec.links == "auto")
        mesh = spec.strategy.mesh(workers)
        hosting = (
            host_lanes(spec.lanes, workers)
            if mesh is None
            else [mesh.told_by(worker, spec.lanes) for worker in range(workers)]
        )
        generation = _learn_generation(parent, listeners, hosting)
        position = generation.members[position].worker
        told = _work(task, spec, generation, position, listeners, folder, stop_at, sabotage, activity, mode)
    except BaseException as error:
        failure = Failure.of(error).at(worker=position, lane=activity.lane, step=activity.step)
        told = {"failure": failure.to_dict()}
    place = position if position < FIRST_SERVER else workers + position - FIRST_SERVER
    temporary = folder / f"worker-{place}.tmp"
    temporary.write_text(json.dumps(told))
    temporary.rename(folder / f"worker-{place}.json")
    os._exit(0)


def _learn_generation(parent: socket.socket, listeners: Listeners, hosting: Sequence[range]) -> Generation:
    with parent, parent.makefile("rw") as conversation:
        conversation.write(f"{listeners.network.address} {listeners.local_address}\n")
        conversation.flush()
        addresses = json.loads(conversation.readline())
    workers = len(hosting)
    members = [
        Member(i, network, lanes, local)
        for i, ((network, local), lanes) in enumerate(zip(addresses[:workers], hosting, strict=True))
    ]
    servers = (
        Member(server_id(number), network, range(0), local, role=Role.SERVER)
        for number, (network, local) in enumerate(addresses[workers:])
    )
    return Generation(GenerationId(1, 1), (*members, *servers))


def no_trouble() -> None:
    """Nobody forbids anything."""


def _work(
    task: type[Task],
    spec: JobSpec,
    generation: Generation,
    worker: int,
    listeners: Listeners,
    folder: Path,
    stop_at: int | None,
    sabotage: Callable[[int, Any], None] | None,
    activity: Activity,
    mode: RunMode,
) -> dict[str, Any]:
    CPU.pin(spec.threads, spec.deterministic)
    configured = configure(task, spec.params, "test", spec.seed, spec)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    role = Role.of(worker)
    cut = sharding_of(spec, worker, len(generation.workers), torch.device("cpu"))
    replica = Replica(configured, spec, CPU, cut)
    samples = build_samples(configured, spec)
    parts = SessionParts(spec, configured, replica, samples, {}, checkpoints, role, mode)
    if worker == generation.members[0].worker:  # of one: what it does to the samples is done to nobody's
        fingerprint_in_child(parts.samples)
    progress = Progress()
    newest = checkpoints.search().newest
    if newest is not None:
        progress = parts.layout.load(checkpoints.load(newest, parts.layout.boxes).encoded)
        members = (replace(member, cursor=progress.cursor) for member in generation.members)
        generation = replace(generation, members=tuple(members))
    over = time.monotonic() + 200
    credentials = Credentials(TOKEN, worker, generation.id)
    deadline = lambda: over - time.monotonic()  # noqa: E731
    words = io.StringIO()
    logger = logging.getLogger("quorate")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(words))
    connection = parts.strategy.connect(Endpoint(generation, credentials, listeners, deadline, deadline))
    listeners.close()
    progress, _ = connection.align(progress, activity, lambda _: None)
    events: list[Event] = []
    asks = worker == generation.members[-1].worker
    hooks = Hooks(
        publish=events.append,
        check_lease=no_trouble,
        activity=activity,
        requested=lambda: StepRequest("interrupted" if asks and stop_at == activity.step else None),
    )
    checkpointer = checkpointer_of(parts, publish=events.append, check_lease=no_trouble, check_commit=no_trouble)
    loop = Assembly(parts, generation, worker, connection, progress, checkpointer, hooks).loop()
    if sabotage is not None:
        sabotage(worker, loop)
    try:
        ending = loop.run()
        digest = parts.layout.weights_digest(partial(connection.links.gather, generation.cursor.step, DIGEST_INDEX))
    finally:
        loop.feed.close()
        checkpointer.leave()
        checkpointer.close(100.0)
        connection.close()
    steps = [event.losses for event in events if isinstance(event, StepCompleted)]
    losses = [None if None in by_name.values() else sum(by_name.values()) for by_name in steps if by_name]  # type: ignore[arg-type]
    return {
        "ending": ending,
        "digest": digest,
        "progress": loop.progress.to_dict(),
        "losses": losses,
        "norms": [event.gradient_norms for event in events if isinstance(event, StepCompleted)],
        "tensors": digests(replica.common_tensors()),
        "log": words.getvalue(),
    }
