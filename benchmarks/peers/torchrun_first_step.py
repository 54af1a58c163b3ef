"""The same step in a process of torchrun, with DistributedDataParallel over Gloo."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import CASES
from benchmarks.first_step import first_step
from quorate.core.processes import die_with_parent


def main() -> None:
    """Print when the step was complete in this process."""
    die_with_parent()  # which it would otherwise wait for, half an hour long
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ended = first_step(DistributedDataParallel(CASES["tiny-mlp"].build()))
    sys.stdout.write(f"{ended}\n")  # in one piece: torchrun leaves standard output unbuffered
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
