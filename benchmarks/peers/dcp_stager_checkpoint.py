"""The same with the asynchronous stager: a thread copies while the next step computes, and the update waits for it."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.peers.dcp_async_checkpoint import DcpAsync
from benchmarks.peers.dcp_checkpoint import quiet
from benchmarks.saving import State, measure_saves


class DcpStager(DcpAsync):
    """One stager for all saves, so that it keeps its memory; what needs an accelerator is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        self._staging: Future[Any] | None = None

    def begin(self, state: State, path: Path) -> None:
        """Neither copied nor written when it returns."""
        self.committed = None
        begun: Any = async_save(state, checkpoint_id=path, no_dist=True, async_stager=self._stager)
        self._staging = begun.staging_completion
        self.follow(begun.upload_completion)

    def settle(self) -> None:
        """The copy must be whole before the weights change."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def close(self) -> None:
        """Wait for what is still being written."""
        super().close()
        self._stager.close()


if __name__ == "__main__":
    quiet()
    measure_saves(DcpStager())
