"""A state that is saved with async_save of torch.distributed.checkpoint: copied at once, written by a thread."""

from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.peers.dcp_checkpoint import Dcp, quiet
from benchmarks.saving import State, measure_saves


class DcpAsync(Dcp):
    """With its own stager, which copies before it returns."""

    def __init__(self) -> None:
        self._upload: Future[Any] | None = None

    def begin(self, state: State, path: Path) -> None:
        """Copy; the rest happens meanwhile."""
        self.committed = None
        upload = async_save(state, checkpoint_id=path, no_dist=True)
        assert isinstance(upload, Future)
        self.follow(upload)

    def follow(self, upload: "Future[Any]") -> None:
        """Note when it was durable."""
        self._upload = upload
        upload.add_done_callback(lambda _: self._note())

    def close(self) -> None:
        """Wait for what is still being written, and hear of its failure."""
        if self._upload is not None:
            self._upload.result()

    def _note(self) -> None:
        self.committed = perf_counter()


if __name__ == "__main__":
    quiet()
    measure_saves(DcpAsync())
