"""Compressed gradients in the real loop, without a coordinator: how well digits are learnt, and how fast steps are over
a slow cable."""

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it; before the fork, it is imported once for both
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from benchmarks.cable import plug_in
from benchmarks.compress import BYTES, LANES, LEARNT, WORKERS, compression_of
from benchmarks.gang import Seat, run_gang
from benchmarks.told import answer, read_order, reading
from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.core.generation import Generation, GenerationId, Member
from quorate.lanes.chunks import host_lanes
from quorate.observe.event import Event
from quorate.observe.seldom_events import GradientsCompressed
from quorate.replica.device import CPU
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress
from quorate.task.task import Task, configure
from quorate.training.activity import Activity
from quorate.wire.handshake import Credentials
from quorate.worker.assembly import Assembly, Hooks, SessionParts, build_samples, checkpointer_of

TRAINED = 1437


class Digits(quorate.Task):
    """Handwritten digits of 8×8 pixels, by plain SGD: a momentum of the optimizer would be counted twice."""

    width: int = 256

    def model(self) -> nn.Module:
        """Three layers."""
        return nn.Sequential(
            nn.Linear(64, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, 10),
        )

    def datasets(self) -> Any:
        """Four fifths are learnt, the rest is asked for."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        parts = order[:TRAINED], order[TRAINED:]
        return tuple(TensorDataset(images[part], classes[part]) for part in parts)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Cross entropy."""
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> Any:
        """Plain."""
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        """How many are right."""
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


class Wide(quorate.Task):
    """A model that takes long to send and no time to compute."""

    side: int = 1200

    def model(self) -> nn.Module:
        """One large layer, of which a batch uses every weight."""
        return nn.Sequential(nn.Linear(self.side, self.side), nn.Tanh(), nn.Linear(self.side, 1))

    def datasets(self) -> Any:
        """A few samples."""
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(16, self.side, generator=generator), torch.randn(16, 1, generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Squared error."""
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> Any:
        """Plain."""
        return torch.optim.SGD(model.parameters(), lr=1e-3)


class Steps(Activity):
    """An activity that keeps when each step began."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.began: list[float] = []

    def begin_step(self, step: int) -> None:
        """A step begins."""
        super().begin_step(step)
        self.began.append(perf_counter())


def train(
    task: type[Task], spec: JobSpec, endpoint: Callable[[Listeners], Endpoint], host: str, folder: str
) -> tuple[Progress, Steps, list[Event]]:
    """One job on this worker: how far it came, when its steps began, and what was told."""
    CPU.pin(spec.threads, spec.deterministic)
    configured = configure(task, spec.params, "the benchmark", spec.seed)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        checkpoints = CheckpointFolder(Path(own))
        parts = SessionParts(
            spec, configured, Replica(configured, spec), build_samples(configured, spec), {}, checkpoints
        )
        listeners = Listeners.bind(host, shares_memory=False)
        meeting = endpoint(listeners)
        connection = parts.strategy.connect(meeting)
        listeners.close()
        activity, told = Steps(), list[Event]()
        hooks = Hooks(publish=told.append, check_lease=_pass, activity=activity)
        checkpointer = checkpointer_of(parts, publish=_pass, check_lease=_pass, check_commit=_pass)
        loop = Assembly(
            parts, meeting.generation, meeting.credentials.worker, connection, Progress(), checkpointer, hooks
        ).loop()
        # A checkpoint is no part of what is measured.
        loop.checkpointer.save = _pass  # type: ignore[method-assign, assignment]
        try:
            loop.run()
        finally:
            loop.feed.close()
            loop.strategy.close()
    return loop.progress, activity, told


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    answer(*(learn(order) if order["case"] == LEARNT else exchange(order)))


def learn(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Each way of compression with each seed: bits do not depend on the workers, so one hosts all lanes."""
    readings = []
    for system in order["systems"]:
        ms, accuracies, sizes = [], [], (0, 0)
        for seed in order["seeds"]:
            spec = JobSpec.model_validate(
                {
                    "task": "benchmark:Digits",
                    "lanes": LANES,
                    "batch_size": 64,
                    "epochs": order["epochs"],
                    "seed": seed,
                    "evaluate": {"every": "end"},
                    "strategy": {"kind": "ring", "compress": compression_of(system)},
                }
            )
            progress, steps, told = train(Digits, spec, _alone, "127.0.0.1", order["folder"])
            ms.append(1000 * (steps.began[-1] - steps.began[0]) / (len(steps.began) - 1))
            accuracies.append(100 * progress.metrics["accuracy"])
            sizes = _sizes(told) or sizes
        details = {"accuracy": statistics.mean(accuracies), "worst_accuracy": min(accuracies)}
        if sizes[0]:
            details |= {"lane_bytes": sizes[0], "dense_bytes": sizes[1], BYTES: sizes[1] / sizes[0]}
        readings.append(reading(LEARNT, 1, ms, details=details, system=system))
    return readings


def exchange(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of two workers that are joined by a slow cable, each way of compression in turn."""
    token = secrets.token_urlsafe(16)
    everyone = run_gang(WORKERS, lambda seat: _work(seat, order, token))
    readings = []
    for system in order["systems"]:
        # A step is over when its slower worker begins the next.
        began = [max(times) for times in zip(*(worker[system]["began"] for worker in everyone), strict=True)]
        ms = [1000 * (after - before) for before, after in pairwise(began)][order["warm_up"] :]
        details = {
            f"{way}_bytes_per_step": statistics.mean(worker[system][way] for worker in everyone)
            for way in ("sent", "received")
        }
        readings.append(reading(order["case"], WORKERS, ms, details=details, system=system))
    return readings


def _work(seat: Seat, order: dict[str, Any], token: str) -> dict[str, Any]:
    host = plug_in(seat, order["mbit"])
    ended = {}
    for number, system in enumerate(order["systems"], 1):
        spec = JobSpec.model_validate(
            {
                "task": "benchmark:Wide",
                "lanes": WORKERS,
                "batch_size": 4,
                "steps": order["warm_up"] + order["steps"] + 1,
                "links": "tcp",
                "strategy": {"kind": "ring", "compress": compression_of(system)},
            }
        )

        def meet(listeners: Listeners, number: int = number) -> Endpoint:
            addresses = seat.gather(listeners.network.address)
            members = tuple(
                Member(worker, addresses[worker], lanes) for worker, lanes in enumerate(host_lanes(WORKERS, WORKERS))
            )
            return _endpoint(
                Generation(GenerationId(1, number), members), seat.position, listeners, token, order["limit"]
            )

        before = _counted()
        _, steps, _ = train(Wide, spec, meet, host, order["folder"])
        sent, received = (after - old for old, after in zip(before, _counted(), strict=True))
        ended[system] = {"began": steps.began, "sent": sent / len(steps.began), "received": received / len(steps.began)}
    return ended


def _counted() -> tuple[int, int]:
    """Bytes that this namespace's cable has carried, from here and to here: acknowledgements and headers too."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "cable":
            numbers = [int(number) for number in counts.split()]
            return numbers[8], numbers[0]
    raise RuntimeError("there is no cable")


def _alone(listeners: Listeners) -> Endpoint:
    member = Member(0, listeners.network.address, range(LANES))
    return _endpoint(Generation(GenerationId(1, 1), (member,)), 0, listeners, "alone", 600.0)


def _endpoint(generation: Generation, worker: int, listeners: Listeners, token: str, limit: float) -> Endpoint:
    over = time.monotonic() + limit
    left = lambda: over - time.monotonic()  # noqa: E731
    return Endpoint(generation, Credentials(token, worker, generation.id), listeners, left, left, silence=limit)


def _sizes(told: list[Event]) -> tuple[int, int] | None:
    events = [event for event in told if isinstance(event, GradientsCompressed)]
    return (events[0].lane_bytes, events[0].lane_bytes_dense) if events else None


def _pass(*_: object) -> None:
    """Nobody listens, and nobody forbids anything."""


if __name__ == "__main__":
    main()
