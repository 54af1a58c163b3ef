"""How a job's state is spread over its members: who writes which part of it, what is compared, how it is taken up again
and who copies it from whom."""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from quorate.checkpoint.manifest import Boxes
from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.generation import Generation
from quorate.replica.device import CPU, Device
from quorate.replica.replica import Replica
from quorate.task.progress import Progress

Gather = Callable[[bytes], tuple[bytes, ...]]
"""What each member tells, in their order."""

Parts = tuple[tuple[str, ...], ...]
"""The names of the tensors in each part. The first writer writes the first part; there may be fewer than writers."""


@dataclass(frozen=True)
class HeldState:
    """The state after a step, as far as one member holds it. Its tensors are those that training goes on to change.

    `encoded` is the tree of the state, and the tensors of it that this member writes. `compared` are the tensors that
    others hold too and must hold alike, by names for people; those in `weights` make up the weights digest. They are on
    `device`. Where it `is_whole`, every member holds all; otherwise the tree of the state is that of all together.
    `of_lanes` are tensors of the lanes that this member hosts, which go another way to whoever hosts them next.
    `settings` are those of the optimizers, which every member has alike.
    """

    encoded: Encoded
    compared: dict[str, torch.Tensor]
    weights: frozenset[str]
    device: Device = CPU
    is_whole: bool = True
    of_lanes: frozenset[str] = frozenset()
    settings: dict[str, str] = field(default_factory=dict)

    def at(self, progress: Progress) -> "HeldState":
        """The same, with what became known of the steps up to it since its tensors were copied."""
        told = encode(progress.to_dict()).skeleton
        skeleton = {"dict": self.encoded.skeleton["dict"] | {"progress": told}}
        return replace(self, encoded=Encoded(skeleton, self.encoded.tensors))

    @property
    def common(self) -> Encoded:
        """What is copied to a member that is behind."""
        if not self.of_lanes:
            return self.encoded
        tensors = {name: tensor for name, tensor in self.encoded.tensors.items() if name not in self.of_lanes}
        return Encoded(self.encoded.skeleton, tensors)


class StateLayout(Protocol):
    """Each member has one. The checkpointer and the state copy call it, between two steps; all members come to the same
    parts and the same donors without asking each other.

    `state` is what this member holds. `parts` says which tensors each of so many writers writes: every tensor of the
    state once, by one that holds it. `load` takes up what this member holds of a state: of a whole one, by a
    checkpoint, or of that of its donor. `boxes` says which part of each tensor of a checkpoint is read for this member;
    None where that is all of them. `donors` says from whom each member that is behind copies its state, both by ring
    position. `weights_digest` is of what all members hold together: all of them call it, after the last step.
    """

    def state(self, progress: Progress) -> HeldState: ...

    def parts(self, held: HeldState, writers: int) -> Parts: ...

    def load(self, encoded: Encoded) -> Progress: ...

    @property
    def boxes(self) -> Boxes | None: ...

    def donors(self, generation: Generation) -> Mapping[int, int]: ...

    def weights_digest(self, gather: Gather) -> str: ...


@dataclass(frozen=True)
class Replicated:
    """Every member holds all of it: each writes a share, and any of them can be the donor."""

    replica: Replica

    def state(self, progress: Progress) -> HeldState:
        encoded = encode({"replica": self.replica.state(), "progress": progress.to_dict()})
        weights = frozenset(name for name, _ in self.replica.tensors())
        settings = self.replica.optimizers.settings.values()
        return HeldState(encoded, self.replica.state_tensors(), weights, self.replica.device, settings=settings)

    def parts(self, held: HeldState, writers: int) -> Parts:
        """Parts of about equal size: the largest tensor that is left goes to the writer that has least."""
        tensors = held.common.tensors
        return shared_out(tensors, [[] for _ in range(max(1, min(writers, len(tensors))))])

    def load(self, encoded: Encoded) -> Progress:
        state = decode(encoded.skeleton, encoded.tensors)
        progress = Progress.from_dict(state["progress"])
        self.replica.before_load(progress)
        self.replica.load(state["replica"])
        return progress

    @property
    def boxes(self) -> Boxes | None:
        return None

    def donors(self, generation: Generation) -> Mapping[int, int]:
        """The first of the most advanced, for everybody who is not."""
        return {generation.position(worker): generation.donor for worker in generation.behind}

    def weights_digest(self, gather: Gather) -> str:  # noqa: ARG002
        return self.replica.weights_digest()


def shared_out(tensors: Mapping[str, torch.Tensor], parts: list[list[str]]) -> Parts:
    """Add tensors to parts, all of which have as much already, or nothing."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    # By how many as well: tensors without elements must not leave a part empty.
    least = [(0, 0, index) for index in range(len(parts))]
    for size, name in sorted((-size, name) for name, size in sizes.items()):
        load, count, index = least[0]
        parts[index].append(name)
        heapq.heapreplace(least, (load - size, count + 1, index))
    return tuple(tuple(part) for part in parts)
