"""Boxes against the slow way: a tensor that counts how often each of its elements is covered."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.random_cuts import cut
from quorate.checkpoint.pieces import Box, check_cover
from quorate.core.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def counts(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    counted = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counted[box.within(Box.whole(shape))] += 1
    return counted


@given(SHAPES, st.integers(1, 32), st.randoms(use_true_random=False))
def test_what_is_cut_covers_the_whole_and_any_part_of_it(shape: tuple[int, ...], most: int, random: Random) -> None:
    boxes = cut(Box.whole(shape), random, most)
    random.shuffle(boxes)
    check_cover("w", shape, boxes)
    for wanted in cut(Box.whole(shape), random, 4):
        check_cover("w", shape, [box for box in boxes if box.meet(wanted).volume], wanted)


@settings(max_examples=3 * settings().max_examples)
@given(SHAPES, st.integers(1, 16), st.integers(1, 16), st.randoms(use_true_random=False))
def test_boxes_are_refused_unless_each_element_is_there_once(
    shape: tuple[int, ...], most: int, more: int, random: Random
) -> None:
    boxes = [box for box in cut(Box.whole(shape), random, most) if random.random() < 0.8]
    boxes += [box for box in cut(Box.whole(shape), random, more) if random.random() < 0.2]
    counted = counts(shape, boxes)
    if bool((counted == 1).all()):
        check_cover("w", shape, boxes)
    else:
        with pytest.raises(CheckpointError, match=r"'w' has pieces that overlap|'w' of shape .* is not whole"):
            check_cover("w", shape, boxes)


@given(SHAPES, st.randoms(use_true_random=False))
def test_boxes_meet_where_both_have_an_element(shape: tuple[int, ...], random: Random) -> None:
    whole = Box.whole(shape)
    one, other = (random.choice(cut(whole, random, 8)) for _ in range(2))
    both = counts(shape, [one]) * counts(shape, [other])
    assert torch.equal(counts(shape, [one.meet(other)]) if one.meet(other).volume else 0 * both, both)


@pytest.mark.parametrize(
    "box", [Box((0,), (2,)), Box((0, 0), (2,)), Box((1, 0), (2, 2)), Box((-1, 0), (1, 2)), Box((0, 0), (-2, -2))]
)
def test_a_box_that_does_not_fit_the_shape_is_refused_by_name(box: Box) -> None:
    with pytest.raises(CheckpointError, match="'w' has a piece"):
        check_cover("w", (2, 2), [box])
