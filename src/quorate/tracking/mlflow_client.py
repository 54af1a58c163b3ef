"""MLflow as a run calls it: where it is, for how long it is waited for, and which of its runs is that of a run folder.

MLflow itself is imported inside functions: that takes seconds, and only who tracks a run by it has to wait for it.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from quorate.spec.job import JobSpec
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER, keep_id, kept_id, place

RUN_TAG = "quorate.run"
"""The tag by which a run is found again on a server, whatever became of the run folder's own notes."""
PARENT_TAG = "mlflow.parentRunId"
"""The tag by which MLflow shows a run below another."""
PARENT = "mlflow-parent.json"
"""Beside runs that are the trials of a search: where the search's own MLflow run is."""
ARTIFACTS = "mlflow-artifacts"

# An absent server must be known to be absent quickly: whoever calls tries again by itself, and later.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    # MLflow tells its makers how it is used. That is for the user to switch on.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # It would print addresses among what a verb prints.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its artifacts: beside the file of SQLite; a server has a place of its own."""
    database = database_of(uri)
    return None if database is None else (database.parent / ARTIFACTS).as_uri()


def load(uri: str) -> None:
    """Import what a client of this place needs, with our settings: MLflow reads them when it is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    # They warn of each try, in lines of their own; whoever calls tells once that nobody answers.
    for name in ("urllib3.connectionpool", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import mlflow.store.db.utils

    if database_of(uri) is not None:
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def connect(uri: str) -> Any:
    """An `MlflowClient` of this place for tracking and registry, which gives up early where nobody answers.

    A file of SQLite is made if it is not there.
    """
    load(uri)
    from mlflow import MlflowClient
    from mlflow.store.db import utils

    # Ten by itself, over two minutes: a database that is away, or has no room, is asked again by whoever calls.
    utils.MAX_RETRY_COUNT = 2
    if (database := database_of(uri)) is not None and not database.exists():
        _make_database(database)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def database_of(uri: str) -> Path | None:
    """The file of SQLite that a URI means, if it means one."""
    file = uri.removeprefix("sqlite:///")
    return None if file in (uri, "", ":memory:") or "?" in file else Path(file).absolute()


def _make_database(database: Path) -> None:
    """Make an empty database, whole or not at all: MLflow cannot use one that was begun on a full disk."""
    from mlflow import MlflowClient

    database.parent.mkdir(parents=True, exist_ok=True)
    temporary = database.with_name(f".{database.name}.{secrets.token_hex(4)}.partial")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another job makes it at the same moment
            database.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)


def identity(run: RunFolder) -> str:
    """What tells a run from every other, of whatever name: kept in its folder, and the same after that was moved.

    Made of the run's name and the moment at which it was created, so that it can be made again where it is lost.
    """
    file = run.path / FOLDER / "id"
    with contextlib.suppress(OSError):
        if kept := file.read_text().strip():
            return kept
    made = hashlib.sha256(f"{run.name} {run.created.isoformat()}".encode()).hexdigest()[:32]
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, f"{made}\n")
    return made


def find_run(client: Any, uri: str, run: RunFolder, experiment: str) -> Any | None:
    """The MLflow run of a run folder, if there is one: by the id that the folder keeps, or else by its tag."""
    from mlflow.exceptions import MlflowException

    if (kept := kept_id(run, uri)) is not None:
        with contextlib.suppress(MlflowException):  # another database at the same address, say
            found = client.get_run(kept)
            if found.data.tags.get(RUN_TAG) == identity(run) and found.info.lifecycle_stage == "active":
                return found
    where = client.get_experiment_by_name(experiment)
    if where is None:
        return None
    found = client.search_runs([where.experiment_id], f"tags.`{RUN_TAG}` = '{identity(run)}'", max_results=1)
    if not found:
        return None
    keep_id(run, uri, found[0].info.run_id)
    return found[0]


def experiment_of(spec: JobSpec) -> str:
    """The experiment that the runs of a job belong to: its own, that of MLflow's variable, or one of the job's name."""
    own = None if spec.track is None else spec.track.experiment
    return own or os.environ.get("MLFLOW_EXPERIMENT_NAME") or spec.name


def find_or_make_run(client: Any, uri: str, run: RunFolder, spec: JobSpec, started: int) -> Any:
    """The MLflow run of a run folder, made if need be; `started` in milliseconds.

    The run of a trial is made below that of its search, in the same experiment.
    """
    parent = parent_of(run.path.parent, uri)
    experiment = experiment_of(spec) if parent is None else parent["experiment"]
    found = find_run(client, uri, run, experiment)
    if found is None:
        made = client.create_run(
            _experiment_id(client, uri, experiment),
            start_time=started,
            run_name=(spec.track and spec.track.run_name) or run.name,
            tags={RUN_TAG: identity(run)} | ({} if parent is None else {PARENT_TAG: parent["run_id"]}),
        )
        keep_id(run, uri, made.info.run_id)
        found = made
    return found


def find_or_make_parent(client: Any, uri: str, runs: Path, name: str, experiment: str) -> str:
    """The MLflow run of a search whose trials are in a folder; from now on theirs are made below it."""
    parent = parent_of(runs, uri)
    if parent is None:
        made = client.create_run(_experiment_id(client, uri, experiment), run_name=name, tags={"quorate.search": name})
        parent = {"place": place(uri), "experiment": experiment, "run_id": made.info.run_id}
        write_atomically(runs / PARENT, json.dumps(parent, indent=2) + "\n")
    return str(parent["run_id"])


def parent_of(runs: Path, uri: str) -> dict[str, Any] | None:
    """Where the MLflow run of a search is, if the runs in a folder are its trials, and are tracked there, too."""
    try:
        parent = json.loads((runs / PARENT).read_text())
    except (OSError, ValueError):
        return None
    is_there = isinstance(parent, dict) and parent.get("place") == place(uri)
    return parent if is_there and {"experiment", "run_id"} <= parent.keys() else None


def _experiment_id(client: Any, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is not None and known.lifecycle_stage != "active":
        client.restore_experiment(known.experiment_id)
    if known is None:
        with contextlib.suppress(MlflowException):  # another job of this name makes it at the same moment
            return str(client.create_experiment(name, artifact_location=artifact_location(uri)))
        known = client.get_experiment_by_name(name)
    return str(known.experiment_id)
