"""The contract of a state layout, for replicas and for a toy of shards."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gang
from bits.bit_tasks import Adam
from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.digests import weights_digest
from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.replica.device import digests
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Gather, HeldState, Replicated, StateLayout
from quorate.task.progress import Progress
from quorate.task.task import configure

MEMBERS = 4
PROGRESS = Progress().after_step(8)


@dataclass
class Sharded:
    """A toy: two groups of members each hold the whole state, and in a group each member holds one half of it."""

    position: int
    halves: dict[str, torch.Tensor] = field(default_factory=dict)

    boxes = None

    @property
    def half(self) -> int:
        return self.position % 2

    def state(self, progress: Progress) -> HeldState:
        names = {f"half {half}": torch.zeros(3) for half in (0, 1)} | self.halves
        whole = encode({"replica": {"tensors": names}, "progress": progress.to_dict()})
        held = {name: tensor for name, tensor in whole.tensors.items() if name.endswith(f"half {self.half}")}
        return HeldState(Encoded(whole.skeleton, held), {}, frozenset())

    def parts(self, held: HeldState, writers: int) -> tuple[tuple[str, ...], ...]:
        return tuple((f"replica.tensors.half {half}",) for half in (0, 1))[:writers]

    def load(self, encoded: Encoded) -> Progress:
        self.halves = {f"half {self.half}": encoded.tensors[f"replica.tensors.half {self.half}"].clone()}
        return Progress.from_dict(decode(encoded.skeleton["dict"]["progress"], {}))

    def donors(self, generation: Generation) -> Mapping[int, int]:
        behind = {generation.position(worker) for worker in generation.behind}
        holders = [position for position in range(len(generation.members)) if position not in behind]
        return {p: next(h for h in holders if h % 2 == p % 2) for p in behind}

    def weights_digest(self, gather: Gather) -> str:
        own = json.dumps(digests(self.halves.items())).encode()
        return weights_digest({name: digest for told in gather(own) for name, digest in json.loads(told).items()})


def replicated(position: int, *, is_trained: bool) -> StateLayout:
    spec = gang.job(Adam)
    replica = Replica(configure(Adam, spec.params, "test", spec.seed), spec)
    if is_trained:
        for index, (_, parameter) in enumerate(replica.parameters):
            parameter.grad = torch.full_like(parameter, float(index + 1))
        replica.optimizers.update()
    return Replicated(replica)


def sharded(position: int, *, is_trained: bool) -> StateLayout:
    layout = Sharded(position)
    layout.halves = {f"half {layout.half}": torch.full((3,), float(layout.half + 1 if is_trained else 0))}
    return layout


Make = Callable[..., StateLayout]


@pytest.fixture(params=[replicated, sharded])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def bits_of(layout: StateLayout) -> dict[str, str]:
    return digests(layout.state(PROGRESS).encoded.tensors.items())


def test_every_tensor_of_the_state_is_in_one_part_of_one_that_holds_it(make: Make) -> None:
    held = [make(position, is_trained=True).state(PROGRESS) for position in range(MEMBERS)]
    layouts = [make(position, is_trained=True) for position in range(MEMBERS)]
    parts = {layout.parts(each, MEMBERS) for layout, each in zip(layouts, held, strict=True)}
    (agreed,) = parts
    names = [name for part in agreed for name in part]
    assert sorted(names) == sorted({name for each in held for name in each.encoded.tensors})
    assert len(agreed) <= MEMBERS
    for writer, part in enumerate(agreed):
        assert set(part) <= held[writer].encoded.tensors.keys()


def test_what_all_write_is_what_each_loads(make: Make) -> None:
    writers = [make(position, is_trained=True) for position in range(MEMBERS)]
    states = [writer.state(PROGRESS) for writer in writers]
    saved = {
        name: states[writer].encoded.tensors[name].clone()
        for writer, part in enumerate(writers[0].parts(states[0], MEMBERS))
        for name in part
    }
    for position in range(MEMBERS):
        reader = make(position, is_trained=False)
        assert bits_of(reader) != bits_of(writers[position])
        assert reader.load(Encoded(states[0].encoded.skeleton, copy.deepcopy(saved))) == PROGRESS
        assert bits_of(reader) == bits_of(writers[position])


def test_what_is_compared_is_held_alike_by_all_and_covers_the_weights(make: Make) -> None:
    states = [make(position, is_trained=True).state(PROGRESS) for position in range(MEMBERS)]
    compared = [digests(state.compared.items()) for state in states]
    assert compared == [compared[0]] * MEMBERS
    assert all(state.weights <= state.compared.keys() for state in states)


@pytest.mark.parametrize("behind", [(1,), (0, 3), (0, 1), (2, 3)])
def test_whoever_is_behind_has_what_its_donor_holds_after_a_copy(make: Make, behind: tuple[int, ...]) -> None:
    cursors = [Cursor(0 if position in behind else 1) for position in range(MEMBERS)]
    members = tuple(Member(10 + p, "", range(p, p + 1), cursor=cursor) for p, cursor in enumerate(cursors))
    layouts = [make(position, is_trained=position not in behind) for position in range(MEMBERS)]
    donors = layouts[0].donors(Generation(GenerationId(1, 1), members))
    assert sorted(donors) == sorted(behind)
    assert not set(donors.values()) & set(behind)
    for receiver, donor in donors.items():
        held = layouts[donor].state(PROGRESS).encoded
        layouts[receiver].load(Encoded(held.skeleton, copy.deepcopy(held.tensors)))
        assert bits_of(layouts[receiver]) == bits_of(layouts[donor])


def test_all_come_to_one_digest_of_the_weights_which_is_that_of_their_bits(make: Make) -> None:
    def digest(*, is_trained: bool) -> str:
        layouts, told = [make(position, is_trained=is_trained) for position in range(MEMBERS)], list[bytes]()

        def tell(own: bytes) -> tuple[bytes, ...]:
            told.append(own)
            return (own,)

        for layout in layouts:
            layout.weights_digest(tell)
        (one,) = {layout.weights_digest(lambda _: tuple(told)) for layout in layouts}
        return one

    assert digest(is_trained=True) == digest(is_trained=True) != digest(is_trained=False)


def test_nobody_copies_where_nobody_is_behind(make: Make) -> None:
    members = tuple(Member(10 + p, "", range(p, p + 1)) for p in range(MEMBERS))
    assert make(0, is_trained=True).donors(Generation(GenerationId(1, 1), members)) == {}


class TestPartsOfReplicas:
    SIZES = st.dictionaries(st.text(max_size=5), st.integers(0, 100), max_size=40)

    def _parts(self, sizes: dict[str, int], writers: int) -> tuple[tuple[str, ...], ...]:
        tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        layout = Replicated(None)  # type: ignore[arg-type]
        return layout.parts(HeldState(Encoded({}, tensors), {}, frozenset()), writers)

    @settings(max_examples=50)
    @given(SIZES, st.integers(1, 12), st.randoms())
    def test_are_balanced_and_the_same_for_every_writer(self, sizes: dict[str, int], writers: int, random: Any) -> None:
        parts = self._parts(sizes, writers)
        assert sorted(name for part in parts for name in part) == sorted(sizes)
        assert len(parts) == max(1, min(writers, len(sizes)))
        if sizes:
            assert all(parts), "nobody writes an empty file"
            loads = [sum(sizes[name] for name in part) for part in parts]
            assert max(loads) - min(loads) <= max(sizes.values())
        names = list(sizes)
        random.shuffle(names)
        assert self._parts({name: sizes[name] for name in names}, writers) == parts

    def test_without_any_tensor_there_is_one_empty_part(self) -> None:
        assert self._parts({}, 3) == ((),)

    def test_the_largest_is_alone_where_the_rest_is_smaller(self) -> None:
        assert self._parts({"large": 10, "a": 3, "b": 3, "c": 3}, 2) == (("large",), ("a", "b", "c"))
