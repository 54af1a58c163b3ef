"""Seeding every generator that user code may draw from without asking."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy
import torch

_REST = 0x5EED


def seed_generators(seed: int) -> None:
    """Begin a random stream in torch, NumPy and Python.

    Only the CPU's generator: `torch.manual_seed` visits every device and costs two hundred times as much.
    """
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def rest_generators() -> None:
    """Put the generators into a known state, in which `have_drawn` can tell whether anything draws from them."""
    seed_generators(_REST)


def have_drawn() -> bool:
    """Whether anything has drawn from a generator since they were put to rest.

    It is found out by drawing: to read the whole state of NumPy's generator costs thirty times as much.
    """
    return _next_draws() != _first_draws()


@cache
def _first_draws() -> tuple[object, ...]:
    rest_generators()
    return _next_draws()


def _next_draws() -> tuple[object, ...]:
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return of_torch, numpy.random.random(), random.random()


def have_drawn_since(seed: int) -> bool:
    """Whether anything has drawn from a generator since they were given this seed; they are left as they are."""
    with preserved_generators():
        now = _next_draws()
        seed_generators(seed)
        return now != _next_draws()


@contextmanager
def preserved_generators(*, on_error_only: bool = False) -> Iterator[None]:
    """Leave the generators as they were found: a caller's own random stream must not be disturbed."""
    states = torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not on_error_only:
            torch.default_generator.set_state(states[0])
            numpy.random.set_state(states[1])
            random.setstate(states[2])
