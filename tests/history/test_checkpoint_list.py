"""Why the checkpoints of a run are kept."""

from pathlib import Path

from checkpoint.saved_run import make_run
from quorate.checkpoint.retention import Reason
from quorate.history.run_detail import CheckpointList
from quorate.observe.events import CheckpointSaved
from quorate.observe.jsonl import JsonlSink


def test_one_that_is_kept_for_audits_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6, keys="checkpoint: {keep: 1}\n")
    sink = JsonlSink(run.events_file)
    sink.handle(CheckpointSaved(step=6, audited=5))
    sink.close()
    listed = CheckpointList.read(run).checkpoints
    assert {each.step: each.because for each in listed} == {2: (), 4: (Reason.AUDITED,), 6: (Reason.LAST,)}
