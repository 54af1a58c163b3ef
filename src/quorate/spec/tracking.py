"""The keys by which a job is observed: what is tracked where, and who is notified. None of them changes bits."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from quorate.spec.keys import Allowed, Count, Positive, Section

LOOPBACK = "127.0.0.1"


def _checked_listener(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Write a port: 0 takes any free one.")
    if isinstance(value, str):
        address_of(value)
    return value


def _checked_url(text: str | None) -> str | None:
    if text is not None and (urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname):
        raise ValueError("Write http://HOST:PORT, or https://…")
    return text


def _checked_mlflow(value: bool | str) -> bool | str:
    if isinstance(value, str) and "://" not in value and value != "databricks":
        raise ValueError("Write http://HOST:PORT, or the address of a database such as sqlite:///FILE.")
    return value


def address_of(listener: int | str) -> tuple[str, int]:
    """Host and port of `prometheus: 9400` or `prometheus: 0.0.0.0:9400`. Raises ValueError that says what to write."""
    host, _, port = (LOOPBACK, "", str(listener)) if isinstance(listener, int) else listener.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"Write a port from 0 to 65535, or HOST:PORT, such as {LOOPBACK}:9400.")
    return host.removeprefix("[").removesuffix("]"), int(port)


Url = Annotated[str | None, AfterValidator(_checked_url), Allowed("an address such as http://127.0.0.1:4317, or null")]


class TraceSpec(Section):
    """One step in N is traced in all workers; with `otlp` the spans go to a collector, too."""

    every: Count = 100
    """Trace every N-th step, and the first one of each generation."""
    otlp: Url = None
    """An OpenTelemetry collector that also gets the spans."""


class TrackSpec(Section):
    """Where to send the metrics of a job, besides its run folder. All of these are off by default.

    With MLflow, TensorBoard, W&B or Prometheus, the machine is also sampled every `system` seconds.
    """

    mlflow: Annotated[
        bool | str,
        AfterValidator(_checked_mlflow),
        Allowed("true (a file in the folder of runs), or the address of an MLflow server or database"),
    ] = False
    """Track in MLflow."""
    experiment: Annotated[str | None, Field(min_length=1), Allowed("the name of an experiment, or null")] = None
    """The experiment of MLflow. Null: that of `MLFLOW_EXPERIMENT_NAME`, or one with the name of the job."""
    run_name: Annotated[str | None, Field(min_length=1), Allowed("a name, or null")] = None
    """The name of the run in MLflow. Null: that of the run folder."""
    tags: Annotated[
        dict[str, str | bool | int | float], Allowed("a mapping of tags, such as {team: vision, ticket: 17}")
    ] = {}
    """Tags of the run in MLflow, besides those that Quorate sets."""
    tensorboard: bool = False
    """Write event files for TensorBoard."""
    wandb: Annotated[Literal["offline", "online"] | None, Allowed("offline, online or null")] = None
    """Track in Weights & Biases."""
    prometheus: Annotated[
        Annotated[int, Field(ge=0, le=65535)] | str | None,
        BeforeValidator(_checked_listener),
        Allowed("a port (0: any free one), HOST:PORT, or null"),
    ] = None
    """Serve metrics for Prometheus."""
    trace: TraceSpec | None = None
    """Trace steps across all workers."""
    every: Count = 1
    """Steps between two points of a curve."""
    system: Positive = 10.0
    """Seconds between two samples of the machine and its GPUs."""

    @property
    def has_trackers(self) -> bool:
        """Whether somebody is told of the job who must be told everything, by a process of its own."""
        return bool(self.mlflow or self.tensorboard or self.wandb or (self.trace is not None and self.trace.otlp))

    @property
    def is_on(self) -> bool:
        """Whether anybody but the run folder is told of the job."""
        return bool(self.mlflow or self.tensorboard or self.wandb) or self.prometheus is not None


class NotifySpec(Section):
    """Run a command, send a POST of JSON, or both, when a job has ended or has lost a worker."""

    command: Annotated[str | None, Field(min_length=1), Allowed("a command for the shell, or null")] = None
    """The command to run."""
    webhook: Url = None
    """The URL that gets a POST of JSON."""
    on: Annotated[
        list[Literal["failed", "finished", "lost"]], Field(min_length=1), Allowed("a list of failed, finished and lost")
    ] = ["failed", "finished"]
    """The events to report."""
