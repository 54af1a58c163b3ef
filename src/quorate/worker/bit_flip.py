"""A bit of a worker's state that flips, as bad memory does; apart from the other faults, which need no torch."""

import random
from collections.abc import Mapping

import numpy
import torch

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def flip_bit(state: Mapping[str, torch.Tensor], chance: random.Random) -> str:
    """Flip one of the upper 16 bits of a value of the state, as bad memory does; which, in words.

    Parameters, optimizer values and buffers are as likely as each other, however many there are of each. The value is
    not zero: flips there often change nothing that a step makes of it.
    """
    kinds: dict[str, list[str]] = {}
    for name, tensor in state.items():
        if tensor.count_nonzero():
            kind = "optimizer" if name.startswith("optimizer ") else "parameter" if tensor.requires_grad else "buffer"
            kinds.setdefault(kind, []).append(name)
    name = chance.choice(kinds[chance.choice(sorted(kinds))])
    tensor = state[name].detach()
    places = tensor.reshape(-1).nonzero()[:, 0]
    place = int(places[chance.randrange(len(places))])
    width = 8 * tensor.element_size()
    bit = chance.randrange(max(0, width - 16), width)
    # Through NumPy: memory that goes bad tells nobody, and torch counts what is written through it.
    raw = tensor.view(_INTEGERS[width]).numpy()
    where = numpy.unravel_index(place, raw.shape)
    raw[where] ^= raw.dtype.type(1 << bit if bit < width - 1 or width == 8 else -(1 << bit))
    return f"bit {bit} of element {place} of '{name}' has been flipped"
