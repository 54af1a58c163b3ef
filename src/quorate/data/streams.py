"""Seeding every generator that user code may draw from without asking."""

import random

import numpy
import torch


def seed_generators(seed: int) -> None:
    """Begin a random stream in torch, NumPy and Python.

    Only the CPU's generator: `torch.manual_seed` visits every device and costs two hundred times as much.
    """
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
