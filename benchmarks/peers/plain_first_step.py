"""A plain Python script: import torch, build the model, take one step."""

import torch

from benchmarks.cases import CASES
from benchmarks.first_step import first_step


def main() -> None:
    """Print when the step was complete."""
    torch.set_num_threads(1)
    print(first_step(CASES["tiny-mlp"].build()), flush=True)


if __name__ == "__main__":
    main()
