"""What was done with checkpoints, data in shards, trackers and a job under faults, as JSON documents.

Each is described by a schema in docs/json; those that tell of runs are in `history`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quorate.api.chaos import Trial
from quorate.api.checkpoints import Verified as VerifiedCheckpoints
from quorate.api.data import Indexed, Verified
from quorate.api.models import ModelVersion
from quorate.api.tracker import Tracked
from quorate.chaos.fault import PHASES, Firing
from quorate.core.generation import Phase
from quorate.history.ledger import Ledger
from quorate.history.streaming import shown_place
from quorate.shards.index import ShardIndex
from quorate.storage.run_folder import RunFolder
from quorate.storage.tracking_notes import place as mlflow_place

_PHASE_NAMES = {status: name for name, status in PHASES.items()}


def verified_checkpoints_document(run: str, verified: VerifiedCheckpoints) -> dict[str, Any]:
    """What became of each checkpoint that was read through."""
    examined = verified.examined
    return {
        "run": run,
        "authenticated": not verified.not_authenticated,
        "not_authenticated": verified.not_authenticated or None,
        "damaged": sum(bool(each.problem) for each in examined),
        "checkpoints": [
            {
                "name": each.path.name,
                "step": each.cursor.step,
                "evaluated": each.cursor.phase is Phase.EVALUATED,
                "bytes": each.bytes,
                "whole": not each.problem,
                "problem": each.problem or None,
                "foreign": each.foreign or None,
            }
            for each in examined
        ],
    }


def models_document(uri: str, versions: Sequence[ModelVersion]) -> dict[str, Any]:
    """All versions of a registry."""
    return {"registry": mlflow_place(uri), "models": [model_document(each) for each in versions]}


def model_document(version: ModelVersion) -> dict[str, Any]:
    """A version, and where it comes from."""
    return {
        "name": version.name,
        "version": version.version,
        "aliases": list(version.aliases),
        "created": version.created.isoformat(timespec="milliseconds"),
        "lineage": None if version.lineage is None else asdict(version.lineage),
    }


def trial_document(trial: Trial, ledger: Ledger) -> dict[str, Any]:
    """What became of a job under faults."""
    return {
        "undisturbed_run": trial.undisturbed.run,
        "undisturbed_digest": trial.undisturbed.weights_digest,
        "run": trial.disturbed.run,
        "folder": str(trial.disturbed.folder),
        "status": "complete" if trial.failure is None else "failed",
        "steps": trial.disturbed.steps,
        "digest": None if trial.failure else trial.disturbed.weights_digest,
        "same": trial.is_same,
        "failure": None if trial.failure is None else trial.failure.to_dict(),
        "differing_facts": list(trial.differing_facts),
        "ledger_whole": ledger.is_whole,
        "faults": [
            {
                "fault": str(fault),
                "fired": bool(trial.firings_of(number)),
                "firings": [
                    {"worker": one.worker, "pid": one.pid, "step": one.step, "phase": phase_of(one)}
                    for one in trial.firings_of(number)
                ],
            }
            for number, fault in enumerate(trial.faults)
        ],
        "recoveries": trial.disturbed.recoveries,
    }


def index_document(done: Indexed) -> dict[str, Any]:
    """An index that was made."""
    return {
        **_head(done.index),
        "index": shown_place(done.file),
        "bytes": int(done.index.sizes.sum()),
        "digest": done.index.digest,
        "seconds": round(done.seconds, 3),
    }


def verified_data_document(done: Verified) -> dict[str, Any]:
    """All that is not as it was indexed."""
    return {
        **_head(done.index),
        "damaged_shards": done.damaged_shards,
        "damaged_records": done.damaged_records,
        "new_shards": done.new_shards,
        "flaws": [
            {
                "file": flaw.file,
                "unit": flaw.unit if flaw.start is not None else None,
                "start": flaw.start,
                "length": flaw.length,
                "records": flaw.records,
                "problem": flaw.problem,
            }
            for flaw in done.flaws
        ],
    }


def track_document(run: RunFolder, told: Sequence[Tracked]) -> dict[str, Any]:
    """What those that track a run were told."""
    names = ("tracker", "points", "last_step")
    trackers = [{name: getattr(each, name) for name in names} | {"missing": each.missing or None} for each in told]
    return {"run": run.name, "folder": str(run.path), "trackers": trackers}


def _head(index: ShardIndex) -> dict[str, Any]:
    return {
        "place": shown_place(index.place),
        "kind": index.kind,
        "shards": len(index.shards),
        "blocks": index.blocks,
        "records": len(index),
    }


def phase_of(firing: Firing) -> str:
    """The phase in which a fault came about, by the name that fault scripts use."""
    return _PHASE_NAMES.get(firing.phase, firing.phase)
