"""Who else is given a job's events: what its keys `track` and `notify` switch on."""

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.history.event_index import IndexSink
from quorate.observe.sinks import Sink
from quorate.spec.device import workers_here
from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"
"""Not the packages above it, which come with MLflow, too."""


def observers(
    run: RunFolder,
    spec: JobSpec,
    tell: Callable[[str], None],
    say: Callable[[str], None],
    is_hurried: Callable[[], bool],
) -> Iterator[Sink]:
    """Sinks beside the display, the first of them first. At its end a job may wait until Prometheus has seen it: `say`
    tells people of that, `tell` what they should know from the start, and `is_hurried` ends the wait.

    Each is imported only where it is switched on: nobody waits for a library that is not used.
    """
    yield IndexSink(run.events_file)
    # The first, since it may refuse the request: nothing else is started then.
    if spec.track is not None and spec.track.prometheus is not None:
        from quorate.tracking.prometheus import PrometheusView

        view = PrometheusView(run, spec, workers_here(spec, usable_cores()), say, is_hurried)
        tell(view.notice)
        yield view
    if spec.track is not None and spec.track.has_trackers:
        from quorate.api.tracker import TrackerProcess

        try:
            process = TrackerProcess(run, spec, say)
        except OSError as error:  # no room for its log, or no process more: that is no reason not to train
            log.warning("the run is not tracked: %s. quorate track does that later", error)
        else:
            yield process
    if spec.callbacks:
        from quorate.api.callbacks import CallbackServer, load_callbacks

        yield CallbackServer(run, load_callbacks(spec.callbacks))
    if spec.notify is not None:
        from quorate.tracking.notify import Notifier

        yield Notifier(run, spec.name, spec.notify)


def refuse_missing_libraries(track: TrackSpec | None) -> None:
    """Before anything is started: what a job is to be tracked by must be installed."""
    if track is None:
        return
    if track.trace is not None and track.trace.otlp and not _is_installed(_EXPORTER):
        raise RequestError(
            "track.trace.otlp needs the libraries of OpenTelemetry, which are not installed here: "
            f"{install_of('otlp')}. Without the key, `quorate trace` shows the traces all the same."
        )
    for key, wanted in (("mlflow", track.mlflow), ("tensorboard", track.tensorboard), ("wandb", track.wandb)):
        if wanted and not _is_installed(key):
            raise RequestError(f"track.{key} needs the library {key}, which is not installed here: {install_of(key)}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it belongs to
        return False
