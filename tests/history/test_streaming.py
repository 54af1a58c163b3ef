"""A run that reads shards, judged and shown by what it has told and by the index of its shards."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.index_of_blocks import write_index
from history.run_builder import JOB, MEMBERS, Story, build_run
from quorate.cli.app import app
from quorate.cli.layout import Page
from quorate.cli.samples_view import print_data
from quorate.core.errors import RunError
from quorate.data.block_sampler import BlockSampler
from quorate.data.ledger import Tally
from quorate.history.ledger import EpochStatus, read_ledger
from quorate.history.streaming import read_data_progress
from quorate.shards.index import NAME
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from schemas import validate

# 30 samples in six blocks, one of them empty: three steps an epoch, and six samples dropped.
SHARDS = [[5, 6], [7], [0, 4, 8]]
KEYS: dict[str, Any] = {"lanes": 4, "batch_size": 8, "steps": 9}
WINDOW = 3
NO_TORCH = """
import sys
sys.argv = ["quorate", *{arguments!r}]
from quorate.cli.main import run
try:
    run()
finally:
    assert "torch" not in sys.modules, "it would take seconds to start"
"""
PER_EPOCH = 3


class Streamed:
    """A run whose shards are indexed, and what it tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = write_index(folder, SHARDS)
        self.order = BlockSampler(JobSpec.model_validate(JOB | KEYS), self.index.records, WINDOW)
        self.data = {"blocks": 6, "window": WINDOW, "index": str(folder / NAME), "digest": self.index.digest}
        self.story = Story().tell("generation", generation="1.1", lanes=4, members=MEMBERS)
        self.begin()

    def begin(self, from_step: int = 0, **data: Any) -> None:
        fields = {"total_steps": 9, "steps_per_epoch": PER_EPOCH, "epoch_length": 30, "dataset_samples": 30}
        self.story.tell("run", from_step=from_step, lanes=4, data=self.data | data, **fields)

    def train(self, first: int, last: int, **fields: Any) -> "Streamed":
        for step in range(first, last + 1):
            epoch, batch = self.order.epoch_of(step), self.order.batch(step)
            told: dict[str, Any] = {"epoch": epoch, "samples": len(batch), "ledger": str(Tally.of(epoch, batch))}
            if self.order.ends_epoch(step):
                told["dropped"] = sorted(self.order.dropped(epoch).tolist())
            self.story.tell("step", step, **told | fields)
        return self

    def run(self, done: int | None = None) -> RunFolder:
        result = None if done is None else {"status": "complete", "steps": done}
        run = build_run(self.folder / "runs", job=JOB | KEYS, story=self.story, result=result)
        # The order of blocks is that of no version of torch.
        run.write_environment({"torch": "0.1"})
        return run


@pytest.fixture
def streamed(tmp_path: Path) -> Streamed:
    return Streamed(tmp_path)


class TestOwnOrder:
    def test_of_shards_is_named_as_the_reason(self, tmp_path: Path) -> None:
        story = Story().tell("generation", generation="1.1", lanes=4, members=MEMBERS)
        story.tell("run", from_step=0, lanes=4, total_steps=9, steps_per_epoch=PER_EPOCH)
        for step in (1, 2):
            story.tell("step", step, epoch=0, own_order=True)
        run = build_run(tmp_path / "runs", job=JOB | KEYS, story=story)
        with pytest.raises(RunError, match=r"in the order that the task's order\(\) gives.*without order\(\) it would"):
            read_data_progress(run)


class TestLedger:
    def test_every_sample_once_and_every_step_by_the_order_of_the_job(self, streamed: Streamed) -> None:
        ledger = read_ledger(streamed.train(1, 7).run(7))
        assert [entry.status.value for entry in ledger.epochs] == ["whole", "whole", "incomplete"]
        assert [len(entry.dropped) for entry in ledger.epochs] == [6, 6, 0]
        assert not any(entry.is_own for entry in ledger.epochs)
        assert "each of 30 samples was used exactly once in each of 2 epochs" in ledger.verdict
        assert ledger.verdict.endswith("Every step used the samples that the order of the job gives it.")

    def test_a_step_that_departs_is_named_before_its_epoch_ends(self, streamed: Streamed) -> None:
        other = Tally.of(1, streamed.order.batch(5))
        ledger = read_ledger(streamed.train(1, 3).train(4, 4, ledger=str(other)).run(4))
        assert ledger.epochs[1].status is EpochStatus.BROKEN
        assert "step 4 did not use the samples that the order of the job gives it" in ledger.verdict

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda s: (s.folder / NAME).unlink(), "the index of its shards cannot be read: .*quorate data index"),
            (lambda s: write_index(s.folder, [[30]]), "the index of its shards, .*, has changed since"),
            (lambda s: s.begin(6, window=4), "its parts have read the samples in other blocks, or in other windows"),
        ],
    )
    def test_where_the_order_is_not_known_sums_are_judged(self, streamed: Streamed, change: Any, text: str) -> None:
        streamed.train(1, 6)
        change(streamed)
        ledger = read_ledger(streamed.run(6))
        assert ledger.is_whole
        assert ledger.unplanned
        assert re.search(text, ledger.verdict)

    def test_an_index_that_was_moved_is_the_same(self, streamed: Streamed) -> None:
        streamed.train(1, 4)
        (streamed.folder / "moved").mkdir()
        (streamed.folder / NAME).rename(streamed.folder / "moved" / NAME)
        streamed.begin(4, index=str(streamed.folder / "moved"))
        assert read_ledger(streamed.train(5, 6).run(6)).unplanned == ""


class TestData:
    def test_lanes_workers_blocks_and_shards(self, streamed: Streamed) -> None:
        found = read_data_progress(streamed.train(1, 4).run()).sharding
        assert (found.step, found.epoch) == (4, 1)
        assert [lane.worker for lane in found.lanes] == [0, 0, 1, 1]
        assert [(lane.samples_done, lane.samples_left) for lane in found.lanes] == [(2, 4)] * 4
        assert found.blocks.total == 6
        assert found.shards.total == 3
        for lane in found.lanes:
            assert lane.block in streamed.order.position(streamed.order.steps_per_epoch + 1, lane.lane).blocks
            assert lane.block is not None
            assert lane.shard == streamed.index.shard_of_block[lane.block]

    def test_after_the_last_step_all_is_done(self, streamed: Streamed) -> None:
        found = read_data_progress(streamed.train(1, 9).run(9)).sharding
        assert (found.samples_done, found.samples_left) == (24, 0)
        assert {lane.block for lane in found.lanes} == {None}
        assert (found.blocks.in_progress, found.blocks.untouched) == (0, 0)
        assert found.blocks.left_out >= 1, "one is empty"

    def test_the_hosts_are_those_of_the_last_generation(self, streamed: Streamed) -> None:
        streamed.train(1, 2).story.lose(1, 3, 2)
        found = read_data_progress(streamed.run()).sharding
        assert [lane.worker for lane in found.lanes] == [0, 0, None, None]

    def test_a_run_that_goes_on_from_a_checkpoint_stands_there(self, streamed: Streamed) -> None:
        streamed.train(1, 5).begin(4)
        assert read_data_progress(streamed.run()).sharding.step == 4

    def test_a_page_and_a_document_of_a_run_that_tells_it(
        self, streamed: Streamed, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = streamed.train(1, 4).run()
        progress = read_data_progress(run)
        stream = io.StringIO()
        print_data(Page(stream, is_terminal=False), run.name, progress)
        lines = stream.getvalue().splitlines()
        assert lines[0] == "tiny-0001  data after step 4, in epoch 1"
        assert lines[2].split()[:2] == ["0", "0"]
        assert "2 of 6" in lines[2]
        assert "  samples      8 read in this epoch, 16 left" in lines
        assert "3 in all" in next(line for line in lines if line.startswith("  shards"))
        app(["show", str(run.path), "--data"], standalone_mode=False)
        assert capsys.readouterr().out.splitlines() == lines

    def test_the_document_is_as_its_schema_says_and_needs_no_torch(self, streamed: Streamed) -> None:
        run = streamed.train(1, 4).run()
        code = NO_TORCH.format(arguments=["show", str(run.path), "--data", "--ledger", "--json"])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        document = json.loads(done.stdout)
        validate("show", document)
        assert document["ledger"]["whole"]
        assert document["data"]["index_digest"] == streamed.index.digest
        assert document["data"]["samples_done"] == 8
        assert all(lane["shard"].endswith(".jsonl") for lane in document["data"]["lanes"])

    def test_what_cannot_be_told_is_said_with_the_reason(self, streamed: Streamed, tmp_path: Path) -> None:
        plain = build_run(tmp_path / "runs", story=Story().begin().train(1, 3))
        with pytest.raises(RunError, match="does not read its training set in shards"):
            read_data_progress(plain)
        with pytest.raises(RunError, match="has not started to train yet"):
            read_data_progress(build_run(tmp_path / "runs"))
        run = streamed.train(1, 2).run()
        (streamed.folder / NAME).unlink()
        with pytest.raises(RunError, match=r"cannot be held against its data.*quorate data index"):
            read_data_progress(run)
        streamed.data = {"blocks": 6, "window": 3}
        streamed.begin(2)
        with pytest.raises(RunError, match="listed in no index file"):
            read_data_progress(streamed.run())
