"""A worker's life: build, register, meet the neighbours, train, report, leave."""

import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.endpoint import Listeners
from quorate.core.digests import content_digest
from quorate.core.errors import (
    RunError,
)
from quorate.core.generation import LEFT, WAITING, Role, WorkerStatus, name_of
from quorate.core.gpus import use_gpu
from quorate.core.log_records import Place, current_place, log_by_stderr
from quorate.core.masking import register_secrets, secrets_in
from quorate.core.processes import show_as
from quorate.core.timing import Timing
from quorate.core.user_code import announcing, is_attached
from quorate.data.datasets import is_stream
from quorate.data.fingerprint import Fingerprint, asked_of_child, fingerprint_in_child
from quorate.data.sampler import Source, refuse_short
from quorate.data.samples import Samples
from quorate.data.streams import preserved_generators
from quorate.observe.events import LogMessage
from quorate.replica.device import Device, canary, digests
from quorate.replica.replica import Replica, check_repeatable
from quorate.spec.job import JobSpec
from quorate.storage.identity_file import write_identity
from quorate.storage.run_folder import RunFolder
from quorate.strategies.kinds import sharding_of
from quorate.task.imported_anew import swapped_modules, unheard
from quorate.task.progress import Progress
from quorate.task.source import task_source
from quorate.task.task import HostedLoop, Task, configure
from quorate.training.activity import Activity, Tracer
from quorate.training.checkpointer import Checkpointer
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import encode_cursor
from quorate.worker.assembly import (
    SessionParts,
    build_samples,
    check_evaluable,
    checkpointer_of,
    device_for,
    evaluation_plan,
)
from quorate.worker.assignment import Assignment
from quorate.worker.coordinator_link import GrpcLink
from quorate.worker.heartbeats import Backlog, PaceMeter
from quorate.worker.membership import Membership
from quorate.worker.membership_view import Dismissed
from quorate.worker.session import LoopTrainer, WorkerSession
from quorate.worker.status import BUILDING, REGISTERING, RESTORING, StatusPage, status_file

log = logging.getLogger(__name__)

COMPILE_CACHE = ".compile"
"""Beside the runs: compiled kernels, for all of them."""
SAVING_PATIENCE = 5.0
"""Seconds that a worker which leaves gives to a checkpoint that is being saved."""


def start_log(assignment: Assignment) -> None:
    """Log to standard error, which goes the way of what the worker prints to the logs of the run."""
    register_secrets([*assignment.secrets, *secrets_in(assignment.job)])
    place = Place(name_of(assignment.slot), Path(assignment.run).name, assignment.slot)
    log_by_stderr(place, assignment.job["log_level"])
    show_as(place.process, place.run)


class Worker:
    """One worker process, from its assignment to its exit code."""

    def __init__(
        self, assignment: Assignment, task_type: type[Task], on_error: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._assignment, self._on_error = assignment, on_error
        self._task_type = task_type
        self._spec = JobSpec.model_validate(assignment.job)
        self._run = assignment.stored
        self._page = StatusPage(status_file(RunFolder(Path(assignment.run)), assignment.slot))
        self._timing = Timing(self._spec.failure_timeout)
        self._device: Device | None = None
        self._checkpointer: Checkpointer | None = None
        self._close_monitor: Callable[[], None] | None = None
        self._pace = PaceMeter()
        # On several hosts the next one may listen elsewhere.
        find = partial(self._run.read_address, assignment.token) if assignment.storage else None
        link = GrpcLink(assignment.coordinator, assignment.token, assignment.identity, find)
        newest = self._run.incarnations.newest
        patience = self._timing.absence if assignment.storage else math.inf
        self._membership = Membership(
            link, self._timing, self._status, self._pace.take, newest_incarnation=newest, patience=patience
        )
        self._backlog = Backlog(self._membership.publish, self._timing)
        self._hook = assignment.make_hook(self._page.write)
        self._beats = count()
        self._write_status = self._page.write if self._hook is None else self._tell_hook
        stretch = None if self._hook is None else self._hook.stretch
        self._activity = Activity(self._write_status, self._page.write_samples, self._pace.add_step, stretch)
        self._tell_place()
        trace = None if self._spec.track is None else self._spec.track.trace
        self._tracer = (
            None
            if trace is None
            else Tracer(trace.every, assignment.slot, self._membership.publish, self._membership.clock_offset)
        )

    def leave_when_terminated(self) -> None:
        """Of a process that is this worker alone: have SIGTERM ask it to leave."""
        # A machine that is taken away warns first: the worker completes its step, and the others go on without it.
        signal.signal(signal.SIGTERM, lambda *_: self._membership.ask_to_leave())
        # Loaders are told to end by the same signal, and do.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))

    @property
    def lane(self) -> int | None:
        """The lane that is being computed."""
        return self._activity.lane

    def live(self) -> int:
        """Train, and tell the coordinator how it ended; the exit code of the process."""
        try:
            with self._mlflow_of_task():
                code = self._live()
            if self._checkpointer is not None:
                # After all is told: what ends a job is not kept back by a checkpoint that is being saved.
                self._checkpointer.close(SAVING_PATIENCE)
            if self._close_monitor is not None:
                self._close_monitor()
            self._membership.flush_last()  # that this one was saved
            if code == LEFT and self._checkpointer is not None and self._checkpointer.divergence is not None:
                # The last save of one that was let go has found it.
                return int(self._trouble().report(self._checkpointer.divergence))
            return code
        finally:
            self._membership.close()

    def _mlflow_of_task(self) -> contextlib.AbstractContextManager[None]:
        track = self._spec.track if self._assignment.mode.is_training else None
        if track is None or not track.mlflow:
            return contextlib.nullcontext()
        from quorate.worker.task_mlflow import mlflow_of_job

        return mlflow_of_job(track, self._run)

    def _live(self) -> int:
        try:
            self._task_type.beside(self._train) if issubclass(self._task_type, HostedLoop) else self._train()
            return 0
        except Dismissed as reason:
            log.info("%s", reason)
            return LEFT
        except Exception as error:
            self._on_error(error)
            trouble = self._trouble()
            code: int = trouble.told(error)
            self._checkpointer = trouble.checkpointer
            return code

    def _trouble(self) -> Any:
        from quorate.worker.trouble import Trouble  # most workers have none

        return Trouble(self._assignment, self._membership, self._activity, self._device, self._checkpointer)

    def _tell_place(self) -> None:
        """Have what is logged say where the worker is."""
        place = current_place()
        if place is not None:
            view, page, activity = self._membership.view, self._page, self._activity
            place.moving = lambda: {"generation": view.generation_name, "step": page.status.step}
            place.lane = lambda: activity.lane

    def _status(self) -> WorkerStatus:
        status = self._page.status
        # Both grow by themselves, so their sum changes whenever the worker comes further.
        moves = self._page.moves + self._activity.moves
        if is_attached():  # whoever stands at a breakpoint is not held up
            moves += next(self._beats)
        return WorkerStatus(status.step, status.phase, moves, self._activity.waits_for)

    def _tell_hook(self, step: int, phase: str, lane: int | None = None) -> None:
        assert self._hook is not None
        self._page.write(step, phase, lane)
        self._hook.on_phase(step, phase, lane)

    def _train(self) -> None:
        assignment, membership = self._assignment, self._membership
        with announcing(self._page.write_setup):
            parts, progress = self._build()
        if self._hook is not None:
            self._hook.on_built(parts.replica.state_tensors)
        network = assignment.network
        shares_memory = self._spec.links == "auto" and self._spec.encrypt is not True
        listeners = Listeners.bind(network.address, shares_memory=shares_memory, engine_host=network.host)
        with contextlib.closing(listeners):
            tensors = digests(parts.replica.common_tensors(), parts.replica.device)
            registration = pb.RegisterRequest(
                slot=assignment.slot,
                pid=os.getpid(),
                host="/".join(filter(None, (socket.gethostname(), network.host[:8]))),
                ring_address=listeners.network.address,
                local_address=listeners.local_address,
                facts=parts.environment,
                tensors=[pb.TensorDigest(name=name, digest=digest) for name, digest in tensors.items()],
                cursor=encode_cursor(progress.cursor),
            )
            self._page.write_setup(REGISTERING)
            membership.register(registration)
            self._tell_what_runs(parts.replica)
            self._watch_system(parts)
            self._write_status(progress.cursor.step, WAITING, None)
            self._checkpointer = checkpointer_of(
                parts,
                publish=membership.publish,
                check_lease=membership.check_lease,
                check_commit=membership.check_commit,
                flush_events=membership.flush,
                activity=self._activity,
                tracer=self._tracer,
                generation=lambda: membership.view.generation_id,
                restored=None if assignment.checkpoint is None else progress.cursor,
            )
            trainer = LoopTrainer(
                parts,
                progress,
                listeners,
                membership,
                self._backlog,
                self._hook,
                self._activity,
                self._write_status,
                assignment,
                self._timing,
                self._checkpointer,
                self._tracer,
            )
            WorkerSession(assignment.slot, trainer, membership, self._backlog, self._write_status).complete()

    def _tell_what_runs(self, replica: Replica) -> None:
        """Once, by the first worker, where much was chosen that the job does not say."""
        assignment = self._assignment
        if replica.device.is_host or assignment.slot or assignment.is_replacement or not assignment.mode.is_training:
            return
        self._membership.publish(LogMessage(level="info", message=f"computes on {replica.what_runs()}"))

    def _watch_system(self, parts: SessionParts) -> None:
        """Tell what this worker and its machine use, if somebody is to see it."""
        track = self._spec.track
        if track is None or not track.is_on or not self._assignment.mode.is_training:
            return
        from quorate.observe.system import SystemMonitor

        membership, page = self._membership, self._page
        monitor = SystemMonitor(
            self._assignment.slot,
            self._run.path,
            track.system,
            membership.publish,
            step=lambda: page.status.step,
            for_host=lambda: membership.view.is_lowest_of_host,
            device_memory=parts.memory.take,
        )
        monitor.start()
        self._close_monitor = monitor.close

    def _build(self) -> tuple[SessionParts, Progress]:
        spec = self._spec
        self._write_status(0, BUILDING, None)
        self._activity.phase = BUILDING
        if self._assignment.gpus:
            use_gpu(self._assignment.gpus)
        device = self._device = device_for(spec, self._assignment.slot, self._run.path.parent / COMPILE_CACHE)
        device.pin(spec.threads, spec.deterministic)
        task = self._configure()
        sharding = None
        if self._assignment.mode.is_training:
            place = device.zeros(0, torch.uint8).device
            sharding = sharding_of(spec, self._assignment.slot, self._assignment.workers, place)
        replica = Replica(task, spec, device, sharding)
        if self._assignment.workers == 1 and replica.sharding is None:
            # By a task of its own: what the first one keeps from building its model would hide the difference.
            with swapped_modules({}), unheard():
                check_repeatable(self._configure(), spec, replica)
        samples = self._samples(task)
        self._page.write_setup("fingerprint")
        machine = device.facts(spec.threads, spec.deterministic) | {"canary": canary(device)}
        data = fingerprint_in_child(samples)
        environment = machine | {
            "task source": task_source(self._task_type).digest,
            "layout": content_digest(replica.layout().encode()),
            **data.facts,
        }
        identity = self._identity(task, replica, samples, machine, data)
        # A part of a model computes nothing before the others are there; and a breakpoint in metrics() is for the
        # evaluations of the job.
        tries = self._assignment.slot == 0 and self._assignment.mode.is_training and not is_attached()
        if tries and replica.sharding is None:
            self._page.write_setup("metrics()")
            plan = evaluation_plan(spec, samples)
            if plan.samples or spec.evaluate.metric or spec.early_stop or replica.optimizers.reacts:
                from quorate.training.evaluation import sanity_check_evaluation

                sanity_check_evaluation(task, replica, samples, plan)
        folder = CheckpointFolder.of_job(self._run.checkpoints, spec.checkpoint)
        role, mode = Role.of(self._assignment.slot), self._assignment.mode
        parts = SessionParts(
            spec, task, replica, samples, environment, folder, role, mode, self._assignment.lane_memory
        )
        _ = parts.strategy  # what it refuses of the task is told before anybody waits for this worker
        if isinstance(task, HostedLoop) and device.compiles:
            device.uncompile(replica.model)  # a compiler cannot follow two that take turns
        if device.compiles:
            self._page.write_setup("compile")
            self._try_compiled(parts)
            if role is not Role.WORKER:
                device.free_unused()  # a server computes nothing else by the model
            environment |= device.facts(spec.threads, spec.deterministic)
        progress = self._restore(parts)
        if identity is not None:  # and nothing was refused
            write_identity(self._run, identity)
        return parts, progress

    def _identity(
        self, task: Task, replica: Replica, samples: Samples, machine: Mapping[str, str], data: Fingerprint
    ) -> dict[str, Any] | None:
        """What the first worker writes down of what the bits of the run depend on; None in all others.

        A process of its own finds it, where it can have what this one has: a sample that ends whoever reads it is for
        the step that needs it to name.
        """
        assignment = self._assignment
        if assignment.slot or not assignment.mode.is_training:
            return None
        if assignment.is_replacement:
            from quorate.worker.identify import identifies_run

            if not identifies_run(assignment, self._spec):
                return None

        def find() -> dict[str, Any]:
            from quorate.worker.identify import identity_of_run  # in a worker on a host by the process alone

            return identity_of_run(assignment, task, replica, samples, machine, data)

        if is_attached() or not replica.device.is_host:
            with preserved_generators():
                return find()
        found, ending = asked_of_child(find)
        return found or {"unknown": f"the process that looked for it {ending}"}

    def _samples(self, task: Task) -> Samples:
        """What the job reads. Raises TaskError where it does not suffice for what the job is to do."""
        mode = self._assignment.mode
        samples = build_samples(task, self._spec, mode.data)
        training = samples.datasets[Source.TRAINING]
        if is_stream(training) and mode.is_training:
            training.bookmarks = self._run.path / "streams"
        if mode.is_training and type(task).order is Task.order:
            refuse_short(self._spec, len(training))  # before anything that takes long
        check_evaluable(task, samples, mode)
        return samples

    def _try_compiled(self, parts: SessionParts) -> None:
        """A model that cannot be compiled is computed as it is written, unless the job asks for more."""
        from quorate.cuda.compile_trial import first_micro_batch, why_not_compiled

        is_asked, evaluates_only = self._spec.compile is True, parts.mode.evaluates_only
        batch = None if evaluates_only else first_micro_batch(parts.samples, parts.sampler)
        if batch is not None:
            # Who asks for it may know that there are few shapes, however they change.
            tried = batch._replace(varies="") if is_asked else batch
            why = why_not_compiled(parts.task, parts.replica, tried)
        else:
            why = None if is_asked else "it could not be tried on a batch before the first step"
        if why is None:
            return
        if is_asked:
            raise RunError(f"the model cannot be compiled: {why}. Set `compile: false`.")
        parts.replica.device.uncompile(parts.replica.model)
        if evaluates_only:
            return
        log.warning("the model is not compiled: %s", why)
        # All workers find the same, so one tells it.
        if self._assignment.slot == 0 and not self._assignment.is_replacement:
            self._membership.publish(LogMessage(level="warning", message=f"the model is not compiled: {why}"))

    def _configure(self) -> Task:
        spec = self._spec
        return configure(self._task_type, spec.params, self._assignment.job_source, spec.seed, spec)

    def _restore(self, parts: SessionParts) -> Progress:
        # Steps that were done in smaller pieces, as memory had run out, are redone like that from any checkpoint.
        known = self._run.read_micro_batches()
        if self._assignment.checkpoint is None:
            return Progress(micro_batches=known)
        from quorate.worker.restore import restore

        self._write_status(0, RESTORING, None)
        progress, warnings = restore(self._assignment, self._spec, parts)
        for warning in warnings:
            log.warning("%s", warning)
            # All workers find the same, so one tells it.
            if self._assignment.slot == 0 and not self._assignment.is_replacement:
                self._membership.publish(LogMessage(level="warning", message=warning))
        return progress.knowing(known)
