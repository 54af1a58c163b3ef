"""Seeding every generator that user code may draw from without asking."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def seed_generators(seed: int) -> None:
    """Begin a random stream in torch, NumPy and Python.

    Only the CPU's generator: `torch.manual_seed` visits every device and costs two hundred times as much.
    """
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def generator_states() -> tuple[object, ...]:
    """What will be drawn next; equal before and after something that has drawn nothing."""
    _, words, *place = numpy.random.get_state(legacy=True)
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return of_torch, numpy.asarray(words).tobytes(), place, random.getstate()


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the generators as they were found: a caller's own random stream must not be disturbed."""
    states = torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
