"""A state that is saved with torch.distributed.checkpoint, which fsyncs its files; the loop waits for all of it."""

import warnings
from pathlib import Path
from time import perf_counter

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.saving import State, measure_saves


class Dcp:
    """One process, without a process group."""

    committed: float | None = None

    def begin(self, state: State, path: Path) -> None:
        """Write and fsync."""
        self.committed = None
        save(state, checkpoint_id=path, no_dist=True)
        self.committed = perf_counter()

    def settle(self) -> None:
        """It is saved already."""

    def load(self, state: State, path: Path) -> object:
        """Into a state that is there; nothing is verified."""
        load(state, checkpoint_id=path, no_dist=True)
        return None

    def close(self) -> None:
        """Nothing runs."""


def quiet() -> None:
    """It warns of a process group that is not there, which one process does not need."""
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    quiet()
    measure_saves(Dcp())
