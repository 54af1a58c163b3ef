"""The thread that sums the first buckets of a step while the backward pass still fills the others."""

import threading
from queue import SimpleQueue

import torch

from quorate.reduce.reduction import Reduction
from quorate.training.flat_gradients import FlatGradients

_DENORMAL = 1e-310


class Courier:
    """Sums buckets in the order in which they are announced.

    From `begin` to `wait` the reduction is the courier's: nobody else may call it.
    """

    def __init__(self, reduction: Reduction, gradients: FlatGradients) -> None:
        self._reduction = reduction
        self._gradients = gradients
        self._announced: SimpleQueue[tuple[int, int, bool] | None] = SimpleQueue()
        self._all_summed = threading.Event()
        self._error: BaseException | None = None
        self._step = 0
        gradients.announce(self._take)
        self._thread = threading.Thread(target=self._work, name="quorate-courier", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """What is announced from now on belongs to this step."""
        self._step = step
        self._all_summed.clear()

    def wait(self) -> None:
        """Return when every bucket of the step is summed; raise what came in between."""
        self._all_summed.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread. The reduction must be closed already, so that no sum keeps waiting."""
        self._announced.put(None)
        self._thread.join()
        self._error = None  # whose traceback holds the gradients

    def _take(self, index: int) -> None:
        self._announced.put((self._step, index, _flushes_denormals()))

    def _work(self) -> None:
        while (work := self._announced.get()) is not None:
            step, index, flushes_denormals = work
            if self._error is None:
                try:
                    # A mode of each thread; an addition must round like those of the thread that trains.
                    torch.set_flush_denormal(flushes_denormals)
                    self._gradients.sum_bucket(step, index, self._reduction)
                except BaseException as error:
                    self._error = error
            if index == self._gradients.sums - 1:
                self._all_summed.set()


def _flushes_denormals() -> bool:
    return not torch.tensor(_DENORMAL, dtype=torch.float64).mul_(1.0).item()
