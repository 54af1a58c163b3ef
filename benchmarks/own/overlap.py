"""Two workers of one lane each, joined by a slow cable: the real loop, with overlap and without, by turns.

They meet as the workers of a generation do, without a coordinator. Every stretch is a job of its own that trains the
same steps from the same seed, so all of them must end with the same bits.
"""

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it; before the fork, it is imported once for both
from torch import nn

from benchmarks.cable import plug_in
from benchmarks.calibration import calibrated, scaled
from benchmarks.cases import CASES, Batch, data_of, loss_of
from benchmarks.gang import Seat, run_gang
from benchmarks.overlap import WORKERS, overlap_readings
from benchmarks.phases import Medians, StepClock, StepPhases, steps_of
from benchmarks.tasks import CaseTask
from benchmarks.told import answer, read_order
from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE, Generation, GenerationId, Member
from quorate.lanes.chunks import host_lanes
from quorate.replica.device import CPU
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress
from quorate.task.task import configure
from quorate.training.activity import Activity
from quorate.wire.handshake import Credentials
from quorate.worker.assembly import Assembly, Hooks, SessionParts, build_samples, checkpointer_of

CASE = "deep-mlp"
BUCKET_MB = 0.26
"""Room for one layer."""
STEPS_PER_EPOCH = 2
REPEATS = 3
REHEARSED = 4
"""Steps of the stretch that is only there to choose the batch."""


_FORWARDS: list[float] = []


class ForwardTask(CaseTask):
    """A case that notes how long each forward pass takes: outside of itself, where lanes may leave nothing."""

    def __init__(self) -> None:
        _FORWARDS.clear()

    @property
    def forwards(self) -> Sequence[float]:
        """Seconds of every forward pass so far."""
        return _FORWARDS

    def loss(self, model: nn.Module, batch: Batch) -> object:
        """The same as everywhere."""
        began = perf_counter()
        loss = super().loss(model, batch)
        _FORWARDS.append(perf_counter() - began)
        return loss


class Diary(Activity):
    """An activity that keeps the times of all steps."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self._steps: list[tuple[float, dict[str, float]]] = []

    def begin_step(self, step: int) -> None:
        """The phases of this step are filled in as they end."""
        super().begin_step(step)
        self._steps.append((perf_counter(), self.seconds))

    def clocks(self, forwards: Sequence[float]) -> list[StepClock]:
        """All steps; a step has one forward pass."""
        return [
            StepClock(began, seconds[DATA], forward, seconds[COMPUTE], seconds[EXCHANGE], seconds[APPLY])
            for (began, seconds), forward in zip(self._steps, forwards, strict=True)
        ]


@dataclass(frozen=True)
class Place:
    """Where a worker trains: its seat, its end of the cable, what was ordered, and how many samples its lane takes."""

    seat: Seat
    host: str
    order: dict[str, Any]
    token: str
    samples: int

    def job(self, overlap: bool, steps: int) -> JobSpec:
        """One stretch of so many steps that count. Its last one only tells when the one before it has ended."""
        batch = WORKERS * self.samples
        return JobSpec.model_validate(
            {
                "task": f"{ForwardTask.__module__}:{ForwardTask.__qualname__}",
                "params": {"case": CASE, "samples": STEPS_PER_EPOCH * batch},
                "lanes": WORKERS,
                "workers": WORKERS,
                "batch_size": batch,
                "steps": self.order["warm_up"] + steps + 1,
                "bucket_mb": BUCKET_MB,
                "links": "tcp",
                "overlap": overlap,
            }
        )

    def endpoint(self, number: int, listeners: Listeners) -> Endpoint:
        """The generation of a stretch, once everybody listens."""
        over = time.monotonic() + self.order["limit"]
        addresses = self.seat.gather(listeners.network.address)
        hosting = host_lanes(WORKERS, WORKERS)
        members = tuple(Member(worker, addresses[worker], hosting[worker], "") for worker in range(WORKERS))
        generation = Generation(GenerationId(1, 1 + number), members)
        credentials = Credentials(self.token, self.seat.position, generation.id)
        return Endpoint(
            generation,
            credentials,
            listeners,
            deadline=lambda: over - time.monotonic(),
            lease=lambda: over - time.monotonic(),
            silence=self.order["limit"],
        )


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    token = secrets.token_urlsafe(16)
    # Each round has other batches, and so other weights: its checkpoints need a folder of their own.
    with tempfile.TemporaryDirectory(dir=order["folder"]) as folder:
        everyone = run_gang(WORKERS, lambda seat: _work(seat, order | {"folder": folder}, token))
    check_bits([digest for worker in everyone for digest in worker["digests"]])
    stretches = [
        (overlap, _steps(order, [worker["clocks"][number] for worker in everyone]))
        for number, overlap in enumerate(order["stretches"])
    ]
    more = {"lane_samples": everyone[0]["samples"], "gradient_bytes": gradient_bytes()}
    answer(*overlap_readings(order["case"], stretches, more))


def check_bits(digests: Sequence[str]) -> None:
    """Overlap is a manner: whatever it does to the time, it must not change the result."""
    if len(set(digests)) != 1:
        raise SystemExit(f"the workers ended with different weights, with overlap and without: {', '.join(digests)}")


def gradient_bytes() -> int:
    """What a lane's gradient takes; with 2 workers of a lane each, a worker sends as much in every step."""
    return sum(parameter.nbytes for parameter in CASES[CASE].build().parameters())


def _work(seat: Seat, order: dict[str, Any], token: str) -> dict[str, Any]:
    host = plug_in(seat, order["mbit"])
    wanted = gradient_bytes() * 8 / (order["mbit"] * 1e6)
    place = _rehearsed(Place(seat, host, order, token, calibrated(_backward(seat), wanted)))
    ended = [_train(place, number, overlap, order["steps"]) for number, overlap in enumerate(order["stretches"], 1)]
    return {
        "samples": place.samples,
        "clocks": [clocks for clocks, _ in ended],
        "digests": [digest for _, digest in ended],
    }


def _backward(seat: Seat) -> Callable[[int], float]:
    """How many seconds a backward pass over so many samples takes, in both processes at once: the slower one counts."""
    model = CASES[CASE].build()

    def once(batch: Batch) -> float:
        model.zero_grad()
        loss = loss_of(model, batch)
        began = perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        return perf_counter() - began

    def seconds_of(samples: int) -> float:
        batch = list(data_of(CASES[CASE], samples).tensors)
        once(batch)
        seat.gather("warm")
        return float(max(seat.gather(statistics.median(once(batch) for _ in range(REPEATS)))))

    return seconds_of


def _rehearsed(place: Place) -> Place:
    """With as many samples as make the backward pass as long as the exchange, both as the loop has them."""
    clocks, _ = _train(place, 0, False, REHEARSED)
    phases = Medians.of(_steps(place.order, place.seat.gather(clocks)))
    return replace(place, samples=scaled(place.samples, phases.exchange_ms / phases.backward_ms))


def _train(place: Place, number: int, overlap: bool, steps: int) -> tuple[list[StepClock], str]:
    """One stretch: the clocks of its steps, and the digest of its weights."""
    spec = place.job(overlap, steps)
    CPU.pin(spec.threads, spec.deterministic)
    task = configure(ForwardTask, spec.params, "the benchmark", spec.seed)
    assert isinstance(task, ForwardTask)
    checkpoints = CheckpointFolder(Path(place.order["folder"]) / f"stretch-{number}")
    parts = SessionParts(spec, task, Replica(task, spec), build_samples(task, spec), {}, checkpoints)
    listeners = Listeners.bind(place.host, shares_memory=False)
    endpoint = place.endpoint(number, listeners)
    connection = parts.strategy.connect(endpoint)
    listeners.close()
    diary = Diary()
    hooks = Hooks(publish=_pass, check_lease=_pass, activity=diary)
    checkpointer = checkpointer_of(parts, publish=_pass, check_lease=_pass, check_commit=_pass)
    loop = Assembly(parts, endpoint.generation, place.seat.position, connection, Progress(), checkpointer, hooks).loop()
    try:
        loop.run()
    finally:
        loop.feed.close()
        loop.strategy.close()
    return diary.clocks(task.forwards), parts.replica.weights_digest()


def _pass(*_: object) -> None:
    """Nobody listens, and nobody forbids anything."""


def _steps(order: dict[str, Any], everyone: Sequence[Sequence[Sequence[float]]]) -> list[StepPhases]:
    """What counts of a stretch, from the clocks of all workers."""
    return steps_of([[StepClock(*clock) for clock in worker] for worker in everyone], order["warm_up"])


if __name__ == "__main__":
    main()
