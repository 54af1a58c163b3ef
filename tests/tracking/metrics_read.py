"""Metrics as a scrape shows them, and jobs to have metrics of."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quorate.observe.event import Event
from quorate.spec.job import JobSpec
from quorate.tracking.metrics import JobMetrics

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def spec_of(**keys: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "tiny", "task": "task.py:Tiny", "lanes": 4, "batch_size": 8, "steps": 8, **keys}
    )


def shown(text: str) -> Series:
    """All samples by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scraped:
    """A sink of its own, fed by hand."""

    def __init__(self, workers: int = 2, **keys: Any) -> None:
        self.metrics = self.sink = JobMetrics("tiny-0001", spec_of(**keys), workers)

    def handle(self, *events: Event) -> "Scraped":
        for event in events:
            self.sink.handle(event)
        return self

    @property
    def text(self) -> str:
        return self.metrics.exposition("")[0].decode()

    @property
    def series(self) -> Series:
        return shown(self.text)

    def __getitem__(self, name: str) -> float:
        """A sample by its name, and its labels but for the run: `quorate_workers state=alive`."""
        name, *labels = name.split()
        wanted = {tuple(label.split("=")) for label in labels}
        found = [
            value
            for (known, own), value in self.series.items()
            if known == name and own - {("run", "tiny-0001")} - {("optimizer", "")} == wanted
        ]
        assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
        return found[0]
