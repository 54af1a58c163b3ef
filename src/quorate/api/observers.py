"""Who else is given a job's events: what its keys `track` and `notify` switch on."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec

from quorate.core.errors import RequestError
from quorate.observe.event import Event
from quorate.observe.sinks import Guarded, Sink
from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


class Observers:
    """Sinks beside the display. None of them can end a job, or hold it up."""

    def __init__(self, run: RunFolder, spec: JobSpec) -> None:
        self._sinks = [Guarded(sink) for sink in _switched_on(run, spec)]

    def handle(self, event: Event) -> None:
        for sink in self._sinks:
            sink.handle(event)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _switched_on(run: RunFolder, spec: JobSpec) -> Iterator[Sink]:
    """Each is imported only where it is switched on: nobody waits for a library that is not used."""
    if spec.track is not None and spec.track.has_trackers:
        from quorate.api.tracker import TrackerProcess

        try:
            process = TrackerProcess(run, spec)
        except OSError as error:  # no room for its log, or no process more: that is no reason not to train
            log.warning("the run is not tracked: %s. quorate track does that later", error)
        else:
            yield process


def refuse_missing_libraries(track: TrackSpec | None) -> None:
    """Before anything is started: what a job is to be tracked by must be installed."""
    if track is None:
        return
    if track.trace is not None and track.trace.otlp and find_spec("opentelemetry") is None:
        raise RequestError(
            "track.trace.otlp needs the libraries of OpenTelemetry, which are not installed here: "
            "pip install 'quorate[otlp]'. Without the key, `quorate trace` shows the traces all the same."
        )
    for key, wanted in (("mlflow", track.mlflow), ("tensorboard", track.tensorboard), ("wandb", track.wandb)):
        if wanted and find_spec(key) is None:
            raise RequestError(
                f"track.{key} needs the library {key}, which is not installed here: pip install 'quorate[{key}]'"
            )
