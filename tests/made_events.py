"""Events as a file would tell them: of a kind by its name, with as few fields as a test needs."""

import time as clock
from typing import Any

from quorate.core.failure import Failure
from quorate.core.spans import Span
from quorate.observe.event import DeviceMemoryUse, Event
from quorate.observe.events import (
    BlocksPlaced,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    CoordinatorReplaced,
    CopyFailed,
    CopyRecovered,
    EvaluationDone,
    GenerationFormed,
    HeldBlocks,
    HostedLanes,
    LinksMeasured,
    LogMessage,
    MemoryRanOut,
    Resized,
    RolledBack,
    RunBegan,
    RunFailed,
    RunFinished,
    RunStopped,
    ShardReading,
    SkippedStep,
    StateCopied,
    StepCompleted,
    TrainingBlocks,
    WorkerLost,
    event_of,
)
from quorate.observe.seldom_events import (
    GpuLoad,
    GradientsCompressed,
    MachineLoad,
    StalenessObserved,
    StepTraced,
    SystemSampled,
)

STEP = StepCompleted(
    step=3,
    time=12.5,
    epoch=0,
    losses={"make": 0.1 + 0.2, "judge": None},
    learning_rates={"make": 0.1, "judge": 0.2},
    gradient_norms={"make": 1e-310, "judge": 2.0},
    samples=32,
    samples_per_second=123.4,
    data_s=0.25,
    compute_s=0.5,
    exchange_s=0.0,
    apply_s=0.125,
    ledger="ab" * 16,
    own_order=True,
    dropped=(4, 5),
    planned="cd" * 16,
    longest_data_s=0.375,
    draws=True,
    log={"accuracy": 0.5},
    bad_samples=2,
    bad=((7, 8),),
    warnings=("sample 7 is left out",),
    loss_scale=1024.0,
    overflow=True,
    skipped=SkippedStep((1,), (9, 10)),
)
BLOCKS = TrainingBlocks(3, 500, ShardReading(True, False, False, True, 10, 20), "index.quorate", "ab")
EVERY: list[Event] = [
    RunBegan(
        time=1.0,
        from_step=0,
        total_steps=8,
        steps_per_epoch=4,
        epoch_length=32,
        dataset_samples=32,
        lanes=2,
        data=BLOCKS,
    ),
    GenerationFormed(
        time=2.0,
        generation="1.1",
        lanes=2,
        members=(HostedLanes(0, "a:1", (0,)), HostedLanes(1, "a:2", (1,))),
        from_step=0,
        behind=(),
    ),
    BlocksPlaced(
        step=4,
        time=2.5,
        generation="1.2",
        blocks=3,
        bytes=48,
        servers=(HeldBlocks(1_000_000, 2, 1, 32), HeldBlocks(1_000_001, 2, 2, 40)),
        pushed=144,
        pulled=96,
    ),
    StateCopied(step=4, time=3.0, generation="1.2", bytes=10, seconds=0.5),
    STEP,
    EvaluationDone(step=4, time=4.0, metrics={"accuracy": 0.5}, best=False, bad_samples=1, bad=((2, 2),)),
    CheckpointSaved(step=4, time=5.0, path="p", bytes=3, seconds=1, copied_s=0.1, written_s=0.1, added_s=0.0, parts=2),
    CheckpointFailed(step=4, time=6.0, reason="the disk is full"),
    CheckpointSkipped(step=4, time=6.0, reason="busy"),
    MemoryRanOut(step=5, time=6.5, lanes=(1,), micro_batches=4, samples=8, reason="OutOfMemoryError: 2 GiB"),
    CheckpointCopied(step=4, time=7.0, place="/far", checkpoint="step-4", bytes=3, seconds=0.5),
    CopyFailed(step=4, time=7.0, place="/far", checkpoint="step-4", reason="no", missing=1, tries=2),
    CopyRecovered(time=8.0, place="/far", seconds=3.0),
    WorkerLost(step=5, time=9.0, worker=1, cause="WorkerLost", message="gone", phase="compute", detect_s=0.1),
    RolledBack(step=4, time=9.5),
    CoordinatorReplaced(time=10.0, incarnation=2, present=2),
    Resized(time=11.0, before=2, workers=3, reason="one more is tried"),
    RunStopped(time=12.0, reason="interrupted"),
    RunFailed.of(Failure("UserCodeError", "no", worker=1, step=5, samples=(1, 2), culprits=(3,))),
    RunFinished(time=13.0, weights_digest="ab", result={"steps": 8}),
    SystemSampled(
        step=5,
        time=13.5,
        worker=1,
        host="a",
        cpu_percent=98.5,
        memory_bytes=2**29,
        threads=9,
        device_memory=DeviceMemoryUse(2**34, 2**35, 2**37),
        machine=MachineLoad(50.0, 2**30, 2**32, 1e6, 2e6, 0.0, 3e6, 2**33, 2**34),
        gpus=(GpuLoad(0, "NVIDIA H200", 97.0, 2**35, 2**37, 61.0, 512.5), GpuLoad(1)),
    ),
    LinksMeasured(step=0, time=13.7, generation="1.1", worker=0, peer=1, round_trip_s=2.5e-5, bytes_per_step=4096),
    GradientsCompressed(
        step=1,
        time=13.75,
        generation="1.1",
        worker=0,
        lane_bytes=120,
        lane_bytes_dense=4096,
        sent_bytes=360,
        received_bytes=360,
        sent_bytes_dense=8192,
    ),
    StalenessObserved(time=13.8, step=20, from_step=10, updates={"0": 31, "2": 9}, gap=1, bound=4),
    LogMessage(time=14.0, level="info", message="hello"),
    StepTraced(
        time=15.0,
        step=7,
        generation="1.2",
        worker=1,
        first=2,
        began=14.5,
        clock_offset=-0.2,
        clock_uncertainty=0.001,
        spans=(Span("step", 0.0, 0.5, -1, {}), Span("data", 0.1, 0.2, 0, {"lane": 3})),
    ),
]
"""One of each kind."""


def make_event(
    kind: str, step: int | None = None, fields: dict[str, Any] | None = None, time: float | None = None
) -> Event:
    """One event; the fields are as a record has them."""
    place = {} if step is None else {"step": step}
    return event_of({"kind": kind, "time": clock.time() if time is None else time, **place, **(fields or {})})


def fields_of(told: Event) -> dict[str, Any]:
    """What a record has of an event beside its kind, version, time and step."""
    return {name: value for name, value in told.to_record().items() if name not in ("kind", "version", "time", "step")}
