"""Who else is given a job's events: what its keys `track` and `notify` switch on."""

from collections.abc import Iterator

from quorate.history.event_index import IndexSink
from quorate.observe.event import Event
from quorate.observe.sinks import Guarded, Sink
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder


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


def _switched_on(run: RunFolder, spec: JobSpec) -> Iterator[Sink]:  # noqa: ARG001
    """Each is imported only where it is switched on: nobody waits for a library that is not used."""
    yield IndexSink(run.events_file)
