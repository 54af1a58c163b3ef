"""One step of the tiny MLP, and the moment at which it was complete."""

import time

from torch import nn
from torch.utils.data import DataLoader

from benchmarks.cases import CASES, data_of, loss_of, optimizer_of


def first_step(model: nn.Module) -> float:
    """Take a step; the time of day, which all processes of a machine share."""
    case = CASES["tiny-mlp"]
    optimizer = optimizer_of(model)
    batch = next(iter(DataLoader(data_of(case, case.batch_size), batch_size=case.batch_size)))
    optimizer.zero_grad()
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return time.time()
