"""A state that is saved with torch.save, into a file that is fsynced: without that it is not safe yet."""

import os
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.saving import State, measure_saves


class TorchSave:
    """The loop waits for all of it."""

    committed: float | None = None

    def begin(self, state: State, path: Path) -> None:
        """Write and fsync."""
        self.committed = None
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self.committed = perf_counter()

    def settle(self) -> None:
        """It is saved already."""

    def load(self, state: State, path: Path) -> object:  # noqa: ARG002 (it makes its own)
        """Nothing is verified."""
        return torch.load(path)

    def close(self) -> None:
        """Nothing runs."""


if __name__ == "__main__":
    measure_saves(TorchSave())
