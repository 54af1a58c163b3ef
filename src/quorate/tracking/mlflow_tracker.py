"""MLflow: one run of it for a run, with parameters, curves, where it comes from, and how it ended."""

import hashlib
import io
import logging
import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorate.core.errors import JobError
from quorate.core.masking import mask
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import place
from quorate.tracking import mlflow_client
from quorate.tracking.curves import LOSS, Held, Point
from quorate.tracking.provenance import recorded_facts, recorded_git, shown_parameters

log = logging.getLogger(__name__)

_STATUS = {"complete": "FINISHED", "failed": "FAILED"}
_REFUSED = "INVALID_PARAMETER_VALUE"
_MOST_PARAMETERS = 100
_LONGEST_NAME = 250
_LONGEST_VALUE = 5000


class MlflowTracker:
    """The curves of a run on an MLflow server, or in a database.

    A point that is there already is not sent again: the server is asked for the last step of each metric when it
    begins, and for all steps of one of which a step at or before that is to be sent. What a server took without being
    able to say so is sent again with the same time, which it knows for the same.
    """

    def __init__(
        self, run: RunFolder, spec: JobSpec, uri: str, log_model: Callable[[Any], None] = lambda _: None
    ) -> None:
        """`log_model` is given the MLflow run of a run that is complete, after all else: it takes longest."""
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
        mlflow_client.load(self._uri)
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

    def begin(self) -> bool:
        self._client = mlflow_client.connect(self._uri)
        started = round(self._run.created.timestamp() * 1000)
        found = mlflow_client.find_or_make_run(self._client, self._uri, self._run, self._spec, started)
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

    def finish(self, status: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        self._client.set_tag(self.run_id, "quorate.status", status)
        # When its file ended, and not now: it may be told days later.
        file = self._run.events_file
        ended = round(file.stat().st_mtime * 1000) if file.exists() else None
        self._client.set_terminated(self.run_id, _STATUS.get(status, "KILLED"), ended)
        if status != "lost":  # nobody waits for its end, and it may be resumed at any moment
            self._keep_files()
            for name, picture in pictures_of(curves).items():
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
