"""NCCL as a worker uses it: told what the job says before a group is made, and ended so that nobody waits for it."""

import logging
import os
import threading
from typing import Any

from quorate.spec.job import JobSpec
from quorate.spec.options import added
from quorate.strategies.gangs.nccl_settings import NcclSpec, nccl_variables, set_variables

log = logging.getLogger(__name__)

ABORT_PATIENCE = 2.0
"""Seconds that the end of a group is waited for. Mostly it takes milliseconds."""


def nccl_of(spec: JobSpec) -> NcclSpec:
    """What a job says to NCCL."""
    return added(spec, "nccl", NcclSpec)


def prepare_nccl(spec: JobSpec, *, on_host: bool) -> None:
    """Set its variables in this process, which reads them when its first group is made."""
    nccl = nccl_of(spec)
    if on_host:
        if given := sorted(key for key, value in nccl if value != NcclSpec.model_fields[key].default):
            log.warning("nccl (%s) does nothing here: this job computes on the host", ", ".join(given))
        return
    for told in set_variables(nccl_variables(nccl, deterministic=spec.deterministic), os.environ):
        log.warning("%s", told)


class Ending:
    """A thread that aborts a group of NCCL: kernels that wait for a lost worker return, and its memory is given back.

    Torch waits for that as long as for a collective, which is a day here, and on a GPU that has failed it may never
    come. So nobody else does: a daemon does it, and keeps what must not be destroyed meanwhile.
    """

    def __init__(self, backend: Any) -> None:
        self._held: list[Any] = [backend]
        self._may_let_go = threading.Event()
        self._is_aborted = threading.Event()
        threading.Thread(target=self._end, name="quorate-nccl-abort", daemon=True).start()

    def wait(self, held: list[Any], patience: float = ABORT_PATIENCE) -> bool:
        """Take over what belongs to the group, and wait for its end, but not for long; whether it has come."""
        self._held += held
        held.clear()
        self._may_let_go.set()
        if not self._is_aborted.wait(patience):
            log.warning("NCCL has not ended its group within %g s: it is left to a thread", patience)
        return self._is_aborted.is_set()

    def _end(self) -> None:
        try:
            self._held[0].abort()
        except RuntimeError as error:
            log.info("NCCL says of the end of its group: %s", error)
        self._is_aborted.set()
        # Its last reference goes here: destroying it joins its threads, which may hang as well.
        self._may_let_go.wait()
        self._held.clear()
