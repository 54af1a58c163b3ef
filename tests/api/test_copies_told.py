"""What the end of a job says about checkpoints that are not at the further places."""

from pathlib import Path

import pytest

from checkpoint.only_part import part_of
from quorate.api.copies import Copies
from quorate.observe.event import Event
from quorate.observe.events import LogMessage
from quorate.spec.job import CheckpointSpec, JobSpec
from quorate.stores.transfer import Source
from quorate.supervisor.signals import Signals
from stores.copied_run import infos, make_source, save


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_source(tmp_path / "runs", 2, 4)


def warnings(source: Source, to: Path) -> tuple[list[str], str]:
    """What is missing, and what is said about it."""
    shown: list[Event] = []
    spec = JobSpec(task="a.b:C", batch_size=8, steps=8, checkpoint=CheckpointSpec(to=["checkpoints", str(to)]))
    (place,) = Copies(source.run, spec, shown.append).conclude(Signals())
    (told,) = [event.message or "" for event in shown if isinstance(event, LogMessage) and event.level == "warning"]
    return place["missing"], told


def test_a_damaged_one_is_missing_and_copying_again_is_not_advised(source: Source, tmp_path: Path) -> None:
    part_of(infos(source)["step-00000004"].path).unlink()
    missing, told = warnings(source, tmp_path)
    assert missing == ["step-00000004"]
    assert "Damaged here, so that no copy is made: step-00000004 (see quorate checkpoints verify" in told
    assert "quorate resume" not in told


def test_a_place_that_is_not_there_is_told_with_what_completes_it(source: Source, tmp_path: Path) -> None:
    save(source, 6)
    missing, told = warnings(source, tmp_path / "nas")
    assert missing == ["step-00000006", "step-00000004", "step-00000002"]
    assert f"{tmp_path}/nas: there is no such folder. Mount it" in told
    assert "A resume copies them: quorate resume" in told and "Damaged" not in told
