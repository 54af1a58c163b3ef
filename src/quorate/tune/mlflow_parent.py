"""The MLflow run of a search, below which its trials have theirs. Trouble with MLflow never ends a search."""

import logging
from collections.abc import Callable
from typing import Any

from quorate.api.observers import refuse_missing_libraries
from quorate.core.masking import register_secrets
from quorate.history.run_record import Status
from quorate.history.search_record import SearchRecord
from quorate.spec.search_load import ResolvedSearch
from quorate.spec.secrets import job_secrets
from quorate.storage.search_folder import SearchFolder
from quorate.storage.tracking_notes import place, tracking_uri
from quorate.tracking import mlflow_client

log = logging.getLogger(__name__)


class MlflowParent:
    """Made by the driver before the first trial, and ended with what the search has found. `uri` is None where the job
    is not tracked by MLflow."""

    def __init__(self, search: ResolvedSearch, folder: SearchFolder) -> None:
        track = search.job.spec.track
        refuse_missing_libraries(track)
        # The trials are not in the folder of runs: what `mlflow: true` means is said before they begin.
        self.uri = tracking_uri(track, folder.path.parent) if track and track.mlflow else None
        self._search = search
        self._folder = folder
        self._client: Any = None
        self._run_id = ""
        register_secrets(job_secrets(search.job.spec))
        self._try(self._begin)

    def end(self, record: SearchRecord) -> None:
        """Write down what was found; one that is resumed later is under way again then."""
        self._try(lambda: self._end(record))

    def _begin(self) -> None:
        self._client = mlflow_client.connect(str(self.uri))
        spec = self._search.spec
        trials, experiment = self._folder.trials, mlflow_client.experiment_of(self._search.job.spec)
        found = mlflow_client.find_or_make_parent(self._client, str(self.uri), trials, self._folder.name, experiment)
        self._run_id = found
        self._client.update_run(self._run_id, status="RUNNING")
        for key, value in {
            "algorithm": spec.algorithm.kind,
            "scheduler": spec.scheduler.kind,
            "seed": spec.seed,
        }.items():
            self._client.set_tag(self._run_id, f"quorate.{key}", str(value))

    def _end(self, record: SearchRecord) -> None:
        if not self._run_id:
            return
        best = record.best
        if best is not None:
            for watched, value in zip(record.objectives, best.values, strict=True):
                self._client.log_metric(self._run_id, f"best/{watched.metric}", value, step=len(record.trials))
            for key, value in best.params.items():
                self._client.set_tag(self._run_id, f"best.{key}", str(value))
            self._client.set_tag(self._run_id, "best.trial", best.run)
        for file in (self._folder.best_job_file, self._folder.report_page, self._folder.report_text):
            if file.is_file():
                self._client.log_artifact(self._run_id, str(file))
        self._client.set_terminated(self._run_id, "FINISHED" if record.status is Status.COMPLETE else "KILLED")

    def _try(self, act: Callable[[], None]) -> None:
        if self.uri is None:
            return
        try:
            act()
        except Exception as error:  # of MLflow, a server or a database
            log.warning("MLflow at %s does not get the search: %s", place(self.uri), error)
