"""What a worker is told when it starts, and the hook by which it can be disturbed on purpose."""

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quorate.core.networks import LOOPBACK, Network
from quorate.storage.run_folder import RunFolder
from quorate.training.run_mode import RunMode
from quorate.wire.handshake import Identity

Tell = Callable[[int, str, int | None], None]
"""Says which step, phase and lane a worker is in."""


class WorkerHook(Protocol):
    """Whoever disturbs a worker on purpose. A worker has one only where its assignment names one.

    Its methods are called by the thread that trains, which they may hold up, or end.
    """

    def on_built(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """The replica is built; `state` gives its tensors by name."""
        ...

    def on_generation(self, members: Collection[int], is_ending: Callable[[], bool]) -> None:
        """A generation of these workers begins; `is_ending` is true when it shall end at the next step boundary."""
        ...

    def on_phase(self, step: int, phase: str, lane: int | None) -> None:
        """The worker begins with this now, and has said so."""
        ...

    def on_lane(self, gradients: Sequence[Any]) -> None:
        """The worker has computed a lane, and its gradient lies in these tensors."""
        ...

    def stretch(self, phase: str, seconds: float) -> float:
        """The worker has done with a phase; stay in it for longer, and say by how many seconds."""
        ...


@dataclass(frozen=True)
class Assignment:
    """Everything that one worker process needs to know; it travels as JSON from the launcher."""

    run: str
    slot: int
    workers: int
    task: str
    job: dict[str, Any]
    job_source: str
    coordinator: str
    token: str
    checkpoint: str | None = None
    is_replacement: bool = False
    mode: RunMode = field(default_factory=RunMode)
    # Its engine says where it listens.
    network: Network = LOOPBACK
    # The run's folder as every host reaches it, where `run` is only this host's own.
    storage: str = ""
    # The GPUs that are its own, as CUDA_VISIBLE_DEVICES names them; empty where workers of a machine take turns.
    gpus: str = ""
    # Its engine holds the memory, by this descriptor, for what lanes keep; without it that is gone with the worker.
    lane_memory: int | None = None
    # What it shows to the other processes of the job; without one nothing is encrypted.
    identity: Identity | None = field(default=None, repr=False)
    # A dotted name, `package.module:Name`, and what else the hook has to know.
    hook: str = ""
    hook_options: dict[str, Any] = field(default_factory=dict)

    @property
    def stored(self) -> RunFolder:
        """Where the run keeps what outlives this worker."""
        return RunFolder(Path(self.storage or self.run))

    @property
    def secrets(self) -> list[str]:
        """What the worker knows that must not be written down, besides what the job says."""
        return [self.token, *([] if self.identity is None else self.identity.secrets)]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        fields = json.loads(text)
        told = {
            "mode": RunMode(**fields["mode"]),
            "network": Network(**fields["network"]),
            "identity": Identity.from_json(fields["identity"]),
        }
        return cls(**fields | told)

    def make_hook(self, tell: Tell) -> WorkerHook | None:
        """The hook that it names; imported only here, so that a worker without one never loads it."""
        if not self.hook:
            return None
        module, _, name = self.hook.partition(":")
        hook: WorkerHook = getattr(importlib.import_module(module), name)(self, tell)
        return hook
