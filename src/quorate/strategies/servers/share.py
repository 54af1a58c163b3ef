"""What one member of a job with servers holds of its state.

The state is what every member holds alike (progress, buffers, schedules, settings and frozen parameters: its *base*),
and *blocks*, each a trained parameter with its average and with what its optimizer keeps of it. A server holds some
blocks. A worker holds the values of all, as it has pulled them, and nothing of an optimizer.

Where servers answer with compressed deltas, workers have values that lag behind. Those are everybody's model: they are
what is evaluated, compared and exported. A server has them for its parameters, too, and beside them the *exact* values,
which its optimizer updates.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.generation import Generation, Role
from quorate.replica.optimizer_state import kept_of, load_settings, take_state, unfuse_all_if_torn
from quorate.replica.replica import AVERAGED, Replica
from quorate.replica.state_layout import HeldState, Parts, Replicated
from quorate.strategies.compression.residuals import LANES, Residuals
from quorate.strategies.servers.dealing import UnitRecord
from quorate.task.progress import Progress
from quorate.training.strategy import Agreement

EXACT, UPDATED = "exact", "updated"
"""Under which names exact values, and which blocks were ever updated, are in a state."""


@dataclass
class Pending:
    """A step that a server could complete when its generation ended: all others could, too.

    `complete` does, with the norms that all had agreed on, from the progress before it.
    """

    step: int
    complete: Callable[[Mapping[str, float], Progress], Progress]


@dataclass
class Share:
    """A member's share, by the numbers of its blocks in `replica.trainable`.

    `held` are those that it has, and `placed` those that it is to have in its generation; it is the `primary` of some,
    whose values it gives to workers and writes to checkpoints. `number` says which of the `servers` it is; none is a
    worker's, or that of a server that leaves. `writer` says which it is of all who may write a part of a checkpoint.
    `units` tells which units of work are in it, where they are applied one by one. Blocks `by_rows` have sparse
    gradients. `by_deltas` are the blocks of whose
    values workers are told by compressed deltas; the `exact` ones are here. `residuals` are what lanes hold back of
    their gradients. `updated` has a bit for each block that was ever updated, on whichever server.
    `as_they_lie`: blocks travel in the order of their memory, as the ring has their gradients, and norms add up in it.
    `pending` is the step that is under way, `norms` are those of the last one that was completed.
    """

    replica: Replica
    role: Role
    held: set[int] = field(default_factory=set)
    placed: frozenset[int] = frozenset()
    primary: tuple[int, ...] = ()
    number: int | None = None
    writer: int | None = None
    servers: int = 1
    units: UnitRecord | None = None
    by_rows: frozenset[int] = frozenset()
    by_deltas: frozenset[int] = frozenset()
    residuals: Residuals | None = None
    exact: dict[int, torch.Tensor] = field(default_factory=dict)
    updated: int = 0
    as_they_lie: bool = False
    pending: Pending | None = None
    norms: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.role is not Role.WORKER:
            self.held = set(range(len(self.replica.trainable)))
            self._take_exact(self.held, {})
        else:
            self._forget_optimizer_state()
        if self.units is not None:
            self.units.reset(0, self.held)

    @property
    def is_server(self) -> bool:
        return self.role is not Role.WORKER

    def drop_surplus(self) -> None:
        """Let go of what others hold now."""
        self.drop(self.held - self.placed)

    def drop(self, blocks: Collection[int]) -> None:
        """Hold these no longer."""
        for block in blocks:
            take_state(self.replica.optimizers, self.parameter(block), {})
        self.held -= set(blocks)
        self.exact = {block: value for block, value in self.exact.items() if block in self.held}
        if self.units is not None:
            self.units.keep_only(self.held)

    def begin_update(self, agreed: Agreement) -> None:
        """Before a step changes blocks anywhere: have optimizers choose their kernels as one that has all would."""
        if agreed.present & ~self.updated and self.updated:
            trained = [(1 << block, parameter) for block, (_, parameter) in enumerate(self.replica.trainable)]
            given = {parameter for bit, parameter in trained if agreed.present & bit}
            unfuse_all_if_torn(self.replica.optimizers, given, {p for bit, p in trained if self.updated & bit})

    def commit(self, step: int, agreed: Agreement) -> None:
        """The step is completed here: what lanes hold back after it counts. A void one leaves everything as it was."""
        if agreed.is_void:
            return
        self.updated |= agreed.present
        if self.residuals is not None:
            self.residuals.commit(step)

    def parameter(self, block: int) -> torch.nn.Parameter:
        return self.replica.trainable[block][1]

    def base(self, progress: Progress) -> dict[str, Any]:
        """What every member holds alike, as a tree."""
        state, trained = self.replica.state(), {name for name, _ in self.replica.trainable}
        tensors = {
            name: tensor
            for name, tensor in state["tensors"].items()
            if name not in trained and name.removesuffix(AVERAGED) not in trained
        }
        settings = {name: {"state": {}, **_settings(of)} for name, of in state["optimizers"].items()}
        base = {
            "replica": state | {"tensors": tensors, "optimizers": settings},
            "progress": progress.to_dict(),
            UPDATED: self.updated,
        }
        return base if self.residuals is None else base | {LANES: {"applied": self.residuals.applied}}

    def blocks(self, blocks: Iterable[int], *, values_only: bool = False) -> dict[str, Any]:
        """Some blocks as a tree of the same form; `values_only` without what optimizers keep."""
        replica = self.replica
        places = {} if values_only else replica.optimizers.places()
        averages = {} if replica.average is None else dict(replica.average.tensors())
        tensors: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, Any]] = {name: {"state": {}} for name in replica.optimizers.by_name}
        for block in sorted(blocks):
            name, parameter = replica.trainable[block]
            tensors[name] = parameter.detach()
            if (averaged := f"{name}{AVERAGED}") in averages:
                tensors[averaged] = averages[averaged]
            if parameter in places:
                optimizer, number = places[parameter]
                if state := kept_of(replica.optimizers, parameter):
                    states[optimizer]["state"][number] = state
        tree: dict[str, Any] = {"replica": {"tensors": tensors, "optimizers": states}}
        exact = {} if values_only else {b: self.exact[b] for b in sorted(blocks) if b in self.exact}
        return tree | ({EXACT: {replica.trainable[b][0]: value for b, value in exact.items()}} if exact else {})

    def load_base(self, tree: dict[str, Any]) -> Progress:
        state = tree["replica"]
        self._load_tensors(state["tensors"])
        load_settings(self.replica.optimizers, state)
        self.updated = tree[UPDATED]
        if self.residuals is not None:
            self.residuals.stand_at(tree[LANES]["applied"])
        return Progress.from_dict(tree["progress"])

    def load_blocks(self, tree: dict[str, Any], blocks: Collection[int]) -> None:
        """Take up blocks, values only where they come without the rest; a server holds them from now on."""
        state, optimizers = tree["replica"], self.replica.optimizers
        self._load_tensors(state["tensors"])
        if not self.is_server:
            return
        places = optimizers.places()
        for block in blocks:
            parameter = self.parameter(block)
            if parameter in places:
                name, number = places[parameter]
                take_state(optimizers, parameter, state["optimizers"][name]["state"].get(number, {}))
        self.held |= set(blocks)
        self._take_exact(blocks, tree.get(EXACT, {}))

    def load(self, tree: dict[str, Any]) -> Progress:
        """Take up a whole state, such as that of a checkpoint."""
        self.replica.load(tree["replica"])
        states = (kept_of(self.replica.optimizers, parameter) for _, parameter in self.replica.trainable)
        self.updated = sum(1 << block for block, state in enumerate(states) if state)
        if self.is_server:
            self.held = set(range(len(self.replica.trainable)))
            self._take_exact(self.held, tree.get(EXACT, {}))
        else:
            self._forget_optimizer_state()
        progress = Progress.from_dict(tree["progress"])
        if self.units is not None:
            self.units.reset(progress.cursor.step, self.held)
        return progress

    def compared(self) -> dict[str, torch.Tensor]:
        """What this member has of the state, by names for people, for others to compare with what they have."""
        trainable, held = self.replica.trainable, self.held if self.is_server else range(len(self.replica.trainable))
        left_out = {name for block, (name, _) in enumerate(trainable) if block not in held}
        # Of what is not held, optimizers keep nothing.
        named = self.replica.state_tensors().items()
        exact = {f"{trainable[block][0]} (exact)": value for block, value in self.exact.items()}
        return {name: tensor for name, tensor in named if name.removesuffix(AVERAGED) not in left_out} | exact

    def _take_exact(self, blocks: Iterable[int], saved: Mapping[str, torch.Tensor]) -> None:
        """Where none were saved, those that workers have."""
        for block in self.by_deltas.intersection(blocks):
            name, parameter = self.replica.trainable[block]
            # Laid out like the parameter: the optimizer updates it there.
            self.exact[block] = parameter.detach().clone()
            if name in saved:
                self.exact[block].copy_(saved[name])

    def _forget_optimizer_state(self) -> None:
        """Some optimizers, such as Adagrad, have one before their first step."""
        for _, parameter in self.replica.trainable:
            take_state(self.replica.optimizers, parameter, {})

    def _load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        replica = self.replica
        parameters = dict(replica.parameters)
        averages = {} if replica.average is None else dict(replica.average.tensors())
        buffers = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in parameters:
                    parameters[name].copy_(tensor)
                elif name in averages:
                    averages[name].copy_(tensor)
                else:
                    buffers[name] = tensor
        replica.buffers.commit(buffers)


@dataclass(frozen=True)
class OnServers(Replicated):
    """Servers write one part each; the first of them writes the base, too. Workers write what their lanes have held
    back, if a job has that, in parts behind those of the servers."""

    share: Share

    def state(self, progress: Progress) -> HeldState:
        share, replica = self.share, self.replica
        tree: dict[str, Any] = share.blocks(share.primary)
        if share.number == 0:
            tree = joined(share.base(progress), tree)
            del tree[UPDATED]  # whoever has the whole state sees it there
        replica.device.synchronize()
        encoded, of_lanes = encode(tree), frozenset[str]()
        if share.residuals is not None:
            # The first writer's word counts where several say the same: all say all of it.
            encoded, of_lanes = share.residuals.joined_to(encoded)
        weights = frozenset(name for name, _ in replica.tensors())
        known = encoded, share.compared(), weights, replica.device
        settings = replica.optimizers.settings.values()
        return HeldState(*known, is_whole=False, of_lanes=of_lanes, settings=settings)

    def parts(self, held: HeldState, writers: int) -> Parts:
        """Of its own alone: what the others write is theirs to know."""
        share, own = self.share, tuple(held.encoded.tensors)
        has_lanes = share.residuals is not None and share.residuals.applied > 0
        count = writers if has_lanes else share.servers
        return tuple(own if number == share.writer else () for number in range(count))

    def load(self, encoded: Encoded) -> Progress:
        if self.share.residuals is not None:
            encoded = self.share.residuals.taken_from(encoded)
        return self.share.load(decode(encoded.skeleton, encoded.tensors))

    def donors(self, generation: Generation) -> Mapping[int, int]:  # noqa: ARG002
        """Blocks have holders of their own: the strategy moves them."""
        return {}


def writing_order(generation: Generation) -> list[int]:
    """The members, by position, in the order in which they write a checkpoint: servers first, whose state it is; those
    that leave behind those that stay."""
    roles = (Role.SERVER, Role.RETIRING, Role.WORKER)
    members = enumerate(generation.members)
    return [position for position, _ in sorted(members, key=lambda one: (roles.index(one[1].role), one[0]))]


def joined(one: Any, other: Any) -> Any:
    """Two trees in one; what both have is alike."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one
    return one | {key: joined(one[key], value) if key in one else value for key, value in other.items()}


def _settings(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "state"}
