"""Whether anything was drawn is found out whoever draws and however: what is missed would share one stream."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from quorate.data.streams import have_drawn, rest_generators


def draw_and_go_back() -> None:
    state = random.getstate()
    random.seed(1)
    random.random()
    random.setstate(state)


def test_nothing_was_drawn() -> None:
    for _ in range(3):
        rest_generators()
        assert not have_drawn()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: torch.randperm(2),
        lambda: torch.nn.functional.dropout(torch.ones(3)),
        lambda: torch.manual_seed(0),
        lambda: numpy.random.rand(),
        lambda: numpy.random.randn(),
        lambda: numpy.random.randint(2),
        lambda: numpy.random.seed(0),
        lambda: random.random(),
        lambda: random.gauss(0, 1),
        lambda: [random.gauss(0, 1) for _ in range(2)],
        lambda: random.choice("a"),
        lambda: random.getrandbits(1),
        lambda: random.seed(0),
    ],
)
def test_every_draw_is_noticed(draw: Callable[[], Any]) -> None:
    rest_generators()
    draw()
    assert have_drawn()


def test_whoever_draws_from_a_stream_of_their_own_and_goes_back_has_drawn_nothing() -> None:
    rest_generators()
    draw_and_go_back()
    assert not have_drawn()
