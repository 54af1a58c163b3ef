"""What a worker is told when it starts, and the hook by which it can be disturbed on purpose."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from quorate.core.addresses import LOOPBACK, Network
from quorate.storage.run_folder import RunFolder
from quorate.task.run_mode import RunMode
from quorate.wire.handshake import Identity

Tell = Callable[[int, str, int | None], None]
"""Says which step, phase and lane a worker is in."""


class WorkerHook(Protocol):
    """Whoever disturbs a worker on purpose. A worker has one only where its assignment names one.

    Its methods are called by the thread that trains, which they may hold up, or end: when the replica is built, whose
    tensors `state` gives by name; when a generation of these workers begins, of which `is_ending` is true when it shall
    end at the next step boundary; when the worker begins with a phase, and has said so; and when it has computed a
    lane, whose gradient lies in these tensors. `stretch` is asked when it has done with a phase: it may stay in it for
    longer, and says by how many seconds.
    """

    def on_built(self, state: Callable[[], Mapping[str, Any]]) -> None: ...

    def on_generation(self, members: Collection[int], is_ending: Callable[[], bool]) -> None: ...

    def on_phase(self, step: int, phase: str, lane: int | None) -> None: ...

    def on_lane(self, gradients: Sequence[Any]) -> None: ...

    def stretch(self, phase: str, seconds: float) -> float: ...


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
            "identity": None if fields["identity"] is None else Identity(**fields["identity"]),
        }
        return cls(**fields | told)

    def make_hook(self, tell: Tell) -> WorkerHook | None:
        """The hook that it names; imported only here, so that a worker without one never loads it."""
        if not self.hook:
            return None
        hook: WorkerHook = resolve_name(self.hook)(self, tell)
        return hook
