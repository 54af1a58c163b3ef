"""A state that is saved with safetensors, into a file that is fsynced: without that it is not safe yet."""

import os
from pathlib import Path
from time import perf_counter

from safetensors.torch import load_file, save_file

from benchmarks.saving import State, measure_saves


class SafeTensors:
    """Tensors only, by name; the loop waits for all of it."""

    committed: float | None = None

    def begin(self, state: State, path: Path) -> None:
        """Write and fsync."""
        self.committed = None
        momenta = {
            f"optimizer.{number}.{name}": tensor
            for number, fields in state["optimizer"]["state"].items()
            for name, tensor in fields.items()
        }
        save_file({f"model.{name}": tensor for name, tensor in state["model"].items()} | momenta, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.committed = perf_counter()

    def settle(self) -> None:
        """It is saved already."""

    def load(self, state: State, path: Path) -> object:  # noqa: ARG002 (it makes its own)
        """Into memory of its own, where it would only map the file; nothing is verified."""
        return {name: tensor.clone() for name, tensor in load_file(path).items()}

    def close(self) -> None:
        """Nothing runs."""


if __name__ == "__main__":
    measure_saves(SafeTensors())
