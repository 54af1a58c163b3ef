"""MLflow as the task itself uses it: `mlflow.log_artifact` and the like go to the run of the job."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

from quorate.core.masking import mask
from quorate.spec.tracking import TrackSpec
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER, kept_id, place, tracking_uri, wish

log = logging.getLogger(__name__)

URI, RUN_ID = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
PATIENCE = 30.0
"""Seconds for which a task that imports MLflow waits until its run is made, once in a run."""
_GLANCE = 0.05


@contextlib.contextmanager
def mlflow_of_job(track: TrackSpec, run: RunFolder) -> Iterator[None]:
    """Have the environment name the job's MLflow run within the block, from the first `import mlflow` on.

    The run is made by the process that tracks the job, which does so at once where the task has use for it. On a host
    that does not see the run's folder nothing is known of it.
    """
    if not (run.path / FOLDER).is_dir():
        yield
        return
    before = {name: os.environ.pop(name, None) for name in (URI, RUN_ID)}
    finder = _AtImport(run, tracking_uri(track, run.path.parent))
    if "mlflow" in sys.modules:
        finder.name_run()
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class _AtImport:
    """Asked for every module that is imported, and finds none; before MLflow's it does what has to be done."""

    def __init__(self, run: RunFolder, uri: str) -> None:
        self._run, self._uri = run, uri
        self._found: str | None = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if name == "mlflow":
            sys.meta_path.remove(self)
            self.name_run()

    def close(self) -> None:
        self._found = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _name_again(self) -> None:
        if self._found is not None:
            os.environ[RUN_ID] = self._found

    def name_run(self) -> None:
        over = time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):
            wish(self._run).touch()
        while (found := kept_id(self._run, self._uri)) is None and time.monotonic() < over:
            time.sleep(_GLANCE)
        os.environ[URI] = self._uri
        self._found = found
        if found is not None:
            os.environ[RUN_ID] = found
            # MLflow removes the variable where it takes up the run, and forgets that run in a forked process.
            os.register_at_fork(after_in_child=self._name_again)
            return
        where = mask(place(self._uri))
        log.warning("MLflow at %s has no run of this job yet: what the task logs there itself is not in it", where)
