"""MLflow: where it is, how long it is waited for, which of its runs is that of a run folder, and what is kept there.

MLflow itself is imported inside functions: that takes seconds, and only who tracks a run by it has to wait for it.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import posixpath
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorate.core.errors import JobError
from quorate.core.masking import mask
from quorate.history.curves import LOSS, Point
from quorate.spec.job import JobSpec
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER, keep_id, kept_id, place
from quorate.tracking.provenance import recorded_facts, recorded_git, shown_parameters
from quorate.tracking.tracker import Held, Tracker

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


# --- one run of it for a run, with parameters, curves, where it comes from, and how it ended

log = logging.getLogger(__name__)

_STATUS = {"complete": "FINISHED", "failed": "FAILED"}
_REFUSED = "INVALID_PARAMETER_VALUE"
_MOST_PARAMETERS = 100
_LONGEST_NAME = 250
_LONGEST_VALUE = 5000


class MlflowTracker(Tracker):
    """The curves of a run on an MLflow server, or in a database.

    A point that is there already is not sent again: the server is asked for the last step of each metric when it
    begins, and for all steps of one of which a step at or before that is to be sent. What a server took without being
    able to say so is sent again with the same time, which it knows for the same.
    """

    def __init__(
        self, run: RunFolder, spec: JobSpec, uri: str, every: int = 1, log_model: Callable[[Any], None] = lambda _: None
    ) -> None:
        """`log_model` is given the MLflow run of a run that is complete, after all else: it takes longest."""
        super().__init__(every)
        self.name = f"MLflow at {place(uri)}"
        self.key = f"mlflow-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"
        self.run_id = ""
        self._run = run
        self._spec = spec
        self._uri = uri
        self._log_model = log_model
        self._client: Any = None
        self._last: dict[str, Any] = {}
        self._held: dict[str, Held] = {}
        self._refused: set[str] = set()

    def load(self) -> None:
        load(self._uri)
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

    def begin(self) -> bool:
        self._client = connect(self._uri)
        started = round(self._run.created.timestamp() * 1000)
        found = find_or_make_run(self._client, self._uri, self._run, self._spec, started)
        self.run_id = found.info.run_id
        self._last = {metric.key: metric for metric in found.data.to_proto().metrics}
        self._held = {}
        self._describe(found.data.params)
        self._client.update_run(self.run_id, status="RUNNING")
        try:
            self._keep_files()
        except Exception as error:
            log.warning("%s: no files can be kept there now: %s", self.name, error)
        return bool(self._last)

    def log(self, points: Sequence[Point]) -> int:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        new = [
            Metric(metric_name(point.name), point.value, point.milliseconds, point.step)
            for point in points
            if self._lacks(point)
        ]
        if not new:
            return 0
        try:
            self._client.log_batch(self.run_id, metrics=new)
        except MlflowException as error:
            if error.error_code != _REFUSED:
                raise
            self._log_singly(new)
        return len(new)

    def finish(self, status: str) -> None:
        self._client.set_tag(self.run_id, "quorate.status", status)
        # When its file ended, and not now: it may be told days later.
        file = self._run.events_file
        ended = round(file.stat().st_mtime * 1000) if file.exists() else None
        self._client.set_terminated(self.run_id, _STATUS.get(status, "KILLED"), ended)
        if status != "lost":  # nobody waits for its end, and it may be resumed at any moment
            self._keep_files()
            for name, picture in pictures_of(self.series.curves).items():
                self._keep(name, picture)
        if status == "complete":
            self._log_model(self._client.get_run(self.run_id))

    def _describe(self, known: Mapping[str, str]) -> None:
        """Parameters and tags. MLflow never changes a parameter: of one that a resumed job has changed a tag tells."""
        from mlflow.entities import Param, RunTag

        git, facts = recorded_git(self._run), recorded_facts(self._run)
        own = {} if self._spec.track is None else self._spec.track.tags
        tags = {key: mask(str(value)) for key, value in own.items()} | facts
        tags |= {
            "mlflow.user": facts.get("quorate.user", ""),
            "mlflow.source.name": self._spec.task,
            "mlflow.source.type": "LOCAL",
            "quorate.status": "running",
        }
        if git.commit:
            tags |= {"mlflow.source.git.commit": git.commit, "quorate.git.dirty": str(bool(git.diff)).lower()}
        given = {metric_name(key): value[:_LONGEST_VALUE] for key, value in shown_parameters(self._spec).items()}
        tags |= {f"quorate.now.{key}": value for key, value in given.items() if known.get(key, value) != value}
        new = [Param(key, value) for key, value in given.items() if key not in known]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=new[start : start + _MOST_PARAMETERS])
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _keep_files(self) -> None:
        """As they are, but for the secrets in them: others may look at what lies there."""
        for file in (self._run.job_file, self._run.environment_file):
            if file.is_file():
                self._keep(file.name, mask(file.read_text()).encode())
        if diff := recorded_git(self._run).diff:
            self._keep("git.diff", mask(diff).encode())

    def _keep(self, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / posixpath.basename(name)
            file.write_bytes(content)
            self._client.log_artifact(self.run_id, str(file), posixpath.dirname(name) or None)

    def _lacks(self, point: Point) -> bool:
        last = self._last.get(metric_name(point.name))
        if last is None or point.corrects:
            return True
        if point.step > last.step or (
            point.is_sample and point.step == last.step and point.milliseconds > last.timestamp
        ):
            return True
        if point.name not in self._held:
            held = self._held[point.name] = Held()
            for metric in self._client.get_metric_history(self.run_id, metric_name(point.name)):
                held.add(Point(point.name, metric.value, metric.step, metric.timestamp / 1000))
        return self._held[point.name].lacks(point)

    def _log_singly(self, metrics: Sequence[Any]) -> None:
        """Something in a batch is refused for good: all but that is kept."""
        from mlflow.exceptions import MlflowException

        stage = self._client.get_run(self.run_id).info.lifecycle_stage
        if stage != "active":
            raise JobError(f"its run {self.run_id} is {stage} there")
        for metric in metrics:
            try:
                self._client.log_batch(self.run_id, metrics=[metric])
            except MlflowException as error:
                if error.error_code != _REFUSED:
                    raise
                if metric.key not in self._refused:
                    self._refused.add(metric.key)
                    log.warning("%s does not take %s: %s", self.name, metric.key, error)


def metric_name(name: str) -> str:
    """A name as MLflow takes it."""
    return posixpath.normpath(re.sub(r"[^\w./ :-]", "_", name)).lstrip("./")[:_LONGEST_NAME] or "_"


def pictures_of(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, bytes]:
    """Losses in one picture, and one for each metric, as PNG by the names of their files."""
    from matplotlib.figure import Figure

    pages: dict[str, dict[str, Sequence[tuple[int, float]]]] = {}
    for name, curve in curves.items():
        page = "loss" if name == LOSS or name.startswith(f"{LOSS}.") else metric_name(name).replace("/", "-")
        pages.setdefault(page, {})[name] = curve
    made = {}
    for page, drawn in pages.items():
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=page if len(drawn) > 1 else next(iter(drawn)))
        for name, curve in drawn.items():
            marker = "o" if len(curve) < 50 else None
            axes.plot([step for step, _ in curve], [value for _, value in curve], label=name, marker=marker)
        axes.grid(alpha=0.3)
        if len(drawn) > 1:
            axes.legend()
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=100)
        made[f"curves/{page}.png"] = content.getvalue()
    return made
