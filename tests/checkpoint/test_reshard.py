"""States in pieces: what some have written, others read, cut in any other way, or whole."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.memory_store import MemoryStore
from checkpoint.random_cuts import cut, numbered, piece
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Boxes, Manifest
from quorate.checkpoint.pieces import Box, Piece
from quorate.checkpoint.reshard import collected, join_skeletons
from quorate.checkpoint.store import CheckpointFolder, CheckpointStore
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import Encoded, check_written, decode, encode
from quorate.core.errors import CheckpointError
from quorate.replica.device import same_bits
from sealing import cipher

SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)
TYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])


def joined(states: list[Encoded]) -> Encoded:
    skeletons = [json.loads(json.dumps(state.skeleton)) for state in states]
    return Encoded(join_skeletons(skeletons), {n: t for state in states for n, t in state.tensors.items()})


def spread(tree: dict[str, Any], cuts: dict[str, list[Box]], members: int) -> list[Encoded]:
    """What each member holds, where some tensors of a tree are cut, and the rest is everybody's."""
    return [
        encode({key: piece(tree[key], cuts[key][m]) if key in cuts else value for key, value in tree.items()})
        for m in range(members)
    ]


def wanted_of(boxes: dict[tuple[Any, ...], Box], place: tuple[Any, ...], _: tuple[int, ...]) -> Box | None:
    return boxes.get(place)


def put_together(state: Encoded, boxes: Boxes | None = None) -> Any:
    read = collected(state.skeleton, state.tensors.items(), boxes)
    return decode(read.skeleton, read.tensors)


def cut_for(shape: tuple[int, ...], members: int, random: Random) -> list[Box]:
    """One box a member; some are empty."""
    boxes = cut(Box.whole(shape), random, members)
    empty = Box(shape, (0,) * len(shape))
    return (boxes + [empty] * members)[:members] if len(boxes) <= members else [Box.whole(shape), *[empty] * members]


@settings(max_examples=150)
@given(SHAPES, TYPES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_what_is_read_equals_a_slice_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, members: int, random: Random
) -> None:
    tree: dict[str, Any] = {
        "w": numbered(shape, dtype),
        "v": numbered(shape[::-1], dtype),
        "buffer": torch.arange(3),
        "step": 7,
    }
    cuts = {"w": cut_for(shape, members, random)}
    state = joined(spread(tree, cuts, members))
    check_written(state.skeleton, [state.tensors])
    found = put_together(state)
    assert found["step"] == 7
    assert all(same_bits(found[name], tree[name]) for name in ("w", "v", "buffer"))
    # "v" was written by nobody in pieces, and is cut for this reader all the same.
    for wanted in cut(Box.whole(shape), random, 6):
        boxes = {("w",): wanted, ("v",): Box(wanted.offset[::-1], wanted.size[::-1])}
        read = collected(state.skeleton, iter(state.tensors.items()), partial(wanted_of, boxes))
        assert sum(t.numel() for n, t in read.tensors.items() if n != "buffer") == 2 * wanted.volume
        found = decode(read.skeleton, read.tensors)
        for name in ("w", "v"):
            expected = piece(tree[name], boxes[(name,)])
            if not wanted.volume:
                assert not (found[name].values if isinstance(found[name], Piece) else found[name]).numel()
                continue
            assert isinstance(found[name], Piece)
            assert (found[name].shape, found[name].offset) == (expected.shape, expected.offset)
            assert same_bits(found[name].values, expected.values)


HALVES = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
WHOLE = {"w": numbered((4, 3)), "plain": torch.ones(2)}


def test_a_gap_an_overlap_and_another_shape_are_refused_by_the_name_of_the_tensor() -> None:
    one, other = spread(WHOLE, {"w": HALVES}, 2)
    with pytest.raises(CheckpointError, match=r"'w' of shape .* is not whole"):
        check_written(one.skeleton, [one.tensors])
    with pytest.raises(CheckpointError, match=r"'w' of shape .* is not whole"):
        put_together(one)
    (overlapping,) = spread(WHOLE, {"w": [Box((1, 0), (3, 3))]}, 1)
    with pytest.raises(CheckpointError, match="'w' has pieces that overlap"):
        check_written(joined([one, overlapping]).skeleton, [])
    (smaller,) = spread({"w": numbered((3, 3)), "plain": torch.ones(2)}, {"w": [Box((2, 0), (1, 3))]}, 1)
    with pytest.raises(CheckpointError, match="'w' has another shape"):
        joined([one, smaller])
    both = joined([one, other])
    damaged = both.tensors | {"w@2,0": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError, match=r"'w@2,0' should be \[2, 3\] float32, and is \[3, 2\]"):
        put_together(Encoded(both.skeleton, damaged))
    with pytest.raises(CheckpointError, match="lacks the piece 'w@2,0'"):
        collected(both.skeleton, one.tensors.items(), None)


def test_a_part_is_enough_for_whoever_wants_no_more() -> None:
    one, _ = spread(WHOLE, {"w": HALVES}, 2)
    found = decode(one.skeleton, one.tensors)
    assert found["w"].values is one.tensors["w@0,0"], "a copy of it would be a second one"


def test_tied_pieces_are_stored_once_and_names_do_not_meet() -> None:
    values = numbered((4, 3))
    parts = [Piece(values[:2], (4, 3), (0, 0)), Piece(values[2:], (4, 3), (2, 0))]
    # A tensor that is called like a piece, on a member that does not hold that piece.
    states = [encode({"w": part, "tied": part, "w@2,0": torch.zeros(1)}) for part in parts]
    state = joined(states)
    assert sorted(state.tensors) == ["w@0,0", "w@2,0", "w@2,0~2"]
    found = put_together(state)
    assert same_bits(found["w"], values)
    assert found["tied"] is found["w"]
    assert same_bits(found["w@2,0"], torch.zeros(1))
    read = collected(state.skeleton, state.tensors.items(), None)
    assert sorted(read.tensors) == ["w", "w@2,0~2"]


def test_pieces_within_lists_and_under_numbers_are_joined() -> None:
    trees = [{"list": [{0: (piece(WHOLE["w"], half), 1.5)}]} for half in HALVES]
    state = joined([encode(tree) for tree in trees])
    found = put_together(state, lambda place, _: HALVES[1] if place == ("list", 0, 0, 0) else None)
    assert same_bits(found["list"][0][0][0].values, WHOLE["w"][2:])


def saved(store: CheckpointStore, states: list[Encoded]) -> CheckpointInfo:
    """By as many writers, each with its own part."""
    skeleton = join_skeletons(state.skeleton for state in states)
    attempt = store.open(Manifest(1, 0, "", (), skeleton, "", {}, {}, {}).cursor)
    for index, state in enumerate(states):
        own = {n: t for n, t in state.tensors.items() if index == 0 or "@" in n}
        attempt.write(index, len(states), TensorFile(own).chunks())
    return store.commit(attempt.name, Manifest(1, 0, "", (), skeleton, "", {}, {}, {}), lambda: None)


@pytest.fixture(params=["folder", "encrypted", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "memory":
        return MemoryStore()
    return CheckpointFolder(tmp_path, cipher=cipher() if request.param == "encrypted" else None)


def test_a_store_reads_what_is_wanted(store: CheckpointStore) -> None:
    info = saved(store, spread(WHOLE, {"w": HALVES}, 2))
    whole = store.load(info).state
    assert same_bits(whole["w"], WHOLE["w"])
    column = Box((0, 1), (4, 1))
    loaded = store.load(info, lambda place, _: column if place == ("w",) else None)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.encoded.tensors.items()} == {
        "w@0,1": (4, 1),
        "plain": (2,),
    }
    assert same_bits(loaded.encoded.tensors["w@0,1"], WHOLE["w"][:, 1:2].contiguous())


@pytest.mark.parametrize("at", [3, 30, -1])
def test_a_damaged_part_is_named(tmp_path: Path, at: int) -> None:
    folder = CheckpointFolder(tmp_path)
    info = saved(folder, spread(WHOLE, {"w": HALVES}, 2))
    file = info.path / info.manifest.parts[1].file
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"part {file.name} is damaged"):
        folder.load(info)


def test_a_tensor_that_nobody_or_several_have_written_is_refused_by_name() -> None:
    one, other = spread(WHOLE, {"w": HALVES}, 2)
    skeleton = joined([one, other]).skeleton
    check_written(skeleton, [["w@0,0", "plain"], ["w@2,0"]])
    with pytest.raises(CheckpointError, match="'w' was written by 0 workers as 'w@2,0'"):
        check_written(skeleton, [["w@0,0", "plain"], []])
    with pytest.raises(CheckpointError, match="'plain' was written by 2 workers"):
        check_written(skeleton, [["w@0,0", "plain"], ["w@2,0", "plain"]])


def test_a_whole_tensor_that_is_missing_is_named() -> None:
    state = joined(spread(WHOLE, {"w": HALVES}, 2))
    lacking = {name: tensor for name, tensor in state.tensors.items() if name != "plain"}
    with pytest.raises(CheckpointError, match="lacks the tensor 'plain'"):
        collected(state.skeleton, lacking.items(), None)


def test_replicas_of_a_piece_are_one_and_pieces_of_one_name_are_alike() -> None:
    one, other = spread(WHOLE, {"w": HALVES}, 2)
    state = joined([one, other, one])
    check_written(state.skeleton, [state.tensors])
    assert same_bits(put_together(state)["w"], WHOLE["w"])
    (longer,) = spread(WHOLE, {"w": [Box((0, 0), (3, 3))]}, 1)
    with pytest.raises(CheckpointError, match=r"'w@0,0' has size \[2, 3\] for one worker and \[3, 3\] for another"):
        joined([one, longer])


def test_a_number_without_dimensions_and_a_tensor_without_elements_come_back() -> None:
    tree = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    cuts = {"scalar": [Box((), ())] * 2, "empty": [Box((0, 0), (0, 3))] * 2}
    state = joined(spread(tree, cuts, 2))
    check_written(state.skeleton, [state.tensors])
    streamed = collected(state.skeleton, state.tensors.items(), None)
    for source in (state, streamed):
        found = put_together(source)
        assert same_bits(found["scalar"], tree["scalar"])
        assert same_bits(found["empty"], tree["empty"])
