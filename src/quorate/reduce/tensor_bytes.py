"""A tensor's memory as bytes that a link can carry."""

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A view, not a copy, of a flat tensor's memory. Viewed as bytes first: bfloat16 has no NumPy type."""
    return tensor.detach().view(torch.uint8).numpy().data
