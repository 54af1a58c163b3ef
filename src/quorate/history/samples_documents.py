"""The samples that a run has used, and how far it is in its shards, as JSON documents.

Apart from the other documents: this needs numpy, which takes longer to import than a list of runs takes to be shown.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorate.core.addresses import is_url, shown
from quorate.data.sharding import LaneReading
from quorate.history.ledger import Ledger
from quorate.history.streaming import DataProgress


def ledger_document(ledger: Ledger) -> dict[str, Any]:
    """All of it."""
    return {
        "whole": ledger.is_whole,
        "verdict": ledger.verdict,
        "samples": ledger.samples,
        "steps_told_again": ledger.told_again,
        "not_compared": ledger.unplanned or None,
        "validation_bad_samples": ledger.evaluated_bad_samples,
        "validation_bad": [list(each) for each in ledger.evaluated_bad],
        "epochs": [
            {
                **asdict(entry),
                "dropped": list(entry.dropped),
                "skipped_steps": list(entry.skipped_steps),
                "bad_samples": entry.bad_samples,
                "bad": [list(each) for each in entry.bad],
                "status": entry.status.value,
                "reason": entry.reason or None,
            }
            for entry in ledger.epochs
        ],
    }


def data_document(progress: DataProgress) -> dict[str, Any]:
    """All of it."""
    sharding, streaming = progress.sharding, progress.streaming
    return {
        "index": shown_place(streaming.index),
        "index_digest": streaming.digest,
        "window": streaming.window,
        "step": sharding.step,
        "epoch": sharding.epoch,
        "samples_done": sharding.samples_done,
        "samples_left": sharding.samples_left,
        "shards": asdict(sharding.shards),
        "blocks": asdict(sharding.blocks),
        "lanes": [asdict(lane) | {"shard": shard_of(progress, lane)} for lane in sharding.lanes],
    }


def shown_place(place: str) -> str:
    """A folder, a file or a URL, by the shortest path; a link on the way may make that another one, then as it is."""
    if is_url(place):
        return shown(place)
    plain = os.path.normpath(place)
    return plain if Path(plain).resolve() == Path(place).resolve() else place


def shard_of(progress: DataProgress, lane: LaneReading) -> str | None:
    """The name of the shard that a lane reads, if it reads one."""
    return None if lane.shard is None else progress.names[lane.shard]
