"""A job whose workers live on namespaces: started beside the test, which cuts and heals while it trains."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad_networks import BadNetworks
from command import await_condition
from quorate.coordinator.places import Outcome
from quorate.core.addresses import LOOPBACK
from quorate.core.failure import JobFailed
from quorate.engines.local import COORDINATOR, LocalEngine
from quorate.spec.load import load_job
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch, Supervisor
from quorate.worker.status import read_status, status_file

WORKERS = 3
STEPS = 400
FAILURE_TIMEOUT = 2.0
LEASE = FAILURE_TIMEOUT * 0.8
PAUSE = 0.04  # for each lane

TASK = f"""
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import quorate

HURRY = Path(__file__).with_name("hurry")


class Points:
    def __init__(self):
        self.inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum()


class Unhurried(quorate.Task):
    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def datasets(self):
        return Points()

    def loss(self, model, batch):
        if not HURRY.exists():
            time.sleep({PAUSE})
        inputs, targets = batch
        return F.mse_loss(model(inputs).squeeze(-1), targets)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""

JOB = {
    "name": "unhurried",
    "task": "task.py:Unhurried",
    "lanes": 4,
    "workers": WORKERS,
    "batch_size": 8,
    "steps": STEPS,
    "failure_timeout": FAILURE_TIMEOUT,
    "checkpoint": {"every": 10, "keep": 3},
}

Happening = dict[str, Any]


class NamespacedJob:
    """A run of the job, from its start to its end, however it ends."""

    def __init__(self, folder: Path, namespaces: BadNetworks | None, **keys: Any) -> None:
        self.namespaces = namespaces
        self._hurry = folder / "hurry"
        file = folder / "job.yaml"
        file.write_text(json.dumps(JOB | keys))
        resolved = load_job(file, {}, [])
        self.run = RunFolder.create(folder / "runs", "unhurried")
        launch = Launch(self.run, resolved.spec, keys.get("workers", WORKERS), resolved.source)
        self._signals = Signals()
        network_of = (lambda _: LOOPBACK) if namespaces is None else namespaces.network_of
        engine = LocalEngine(self.run, launch.preparation, network_of)
        self._supervisor = Supervisor(engine, launch, lambda event: None, lambda facts: None, self._signals)
        self.outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            self.outcome = self._supervisor.run()
        except JobFailed as failed:
            self.outcome = Outcome(failed.failure, {})

    def events(self, kind: str, after: float = 0.0) -> list[Happening]:
        """What was told of this kind, and happened after a moment."""
        file = self.run.events_file
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        told = (json.loads(line) for line in lines if line)
        return [event for event in told if event["kind"] == kind and event["time"] > after]

    def await_event(
        self,
        kind: str,
        after: float = 0.0,
        fits: Callable[[Happening], bool] = lambda event: True,
        within: float = 60.0,
    ) -> Happening:
        """The first of this kind after a moment that fits."""

        def look() -> Happening | None:
            found = next((event for event in self.events(kind, after) if fits(event)), None)
            assert found or self._thread.is_alive(), f"the job has ended: {self.outcome}"
            return found

        return await_condition(f"{kind} after {after}", look, within)

    def await_generation(self, workers: set[int], after: float, within: float = 60.0) -> Happening:
        """The first generation of exactly these workers after a moment."""
        return self.await_event("generation", after, lambda event: members(event) == workers, within)

    def await_step(self, at_least: int) -> Happening:
        return self.await_event("step", fits=lambda event: event["step"] >= at_least)

    def steps_of_workers(self) -> list[int]:
        """How far each of them is, also those who cannot tell the coordinator."""
        pages = [read_status(status_file(self.run, slot)) for slot in range(WORKERS)]
        return [0 if page is None else page.step for page in pages]

    def finish(self, within: float = 60.0) -> Outcome:
        """Hurry to the end."""
        self._hurry.touch()
        self._thread.join(within)
        assert not self._thread.is_alive(), f"the job does not end: {self.events('generation')[-1:]}"
        assert self.outcome is not None
        return self.outcome

    def close(self) -> None:
        """End what a failed test has left running."""
        self._signals.received += [signal.SIGINT, signal.SIGINT]
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        self._hurry.unlink(missing_ok=True)


def members(generation: Happening) -> set[int]:
    return {member["worker"] for member in generation["members"]}


@contextlib.contextmanager
def in_namespaces(folder: Path) -> Iterator[NamespacedJob]:
    """The job on three namespaces, under way; afterwards nothing of it is left."""
    with BadNetworks(WORKERS) as namespaces:
        cable, networks = (
            namespaces.cable,
            {namespace_of(namespaces.network_of(place).namespace) for place in (COORDINATOR, 0, 1, 2)},
        )
        job = NamespacedJob(folder, namespaces)
        try:
            yield job
        finally:
            job.close()
    assert cable
    await_condition("the end of the cable", lambda: not Path("/sys/class/net", cable).exists(), 60.0)
    await_condition("the end of the namespaces", lambda: not holders(networks), 60.0)


def namespace_of(path: str) -> str:
    """Its number, as the kernel writes it: net:[4026531840]."""
    return str(Path(path).readlink())


def holders(namespaces: set[str]) -> list[str]:
    """All that keeps one of these namespaces: processes in it, descriptors of it, and mounts."""
    links = [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]
    found = []
    for link in links:
        with contextlib.suppress(OSError):  # it is gone meanwhile
            found += [str(link)] if str(link.readlink()) in namespaces else []
    mounts = Path("/proc/self/mountinfo").read_text()
    return found + [name for name in namespaces if name in mounts]


def wait_until(moment: float) -> None:
    """For a fault that lasts a given time."""
    time.sleep(max(0.0, moment - time.time()))
