"""The checkpoints of a run as documents for programs."""

from datetime import datetime
from typing import Any

from quorate.api.checkpoints import Verified
from quorate.core.cursor import Phase
from quorate.core.finite import finite
from quorate.history.checkpoint_list import CheckpointList, Kept


def list_document(found: CheckpointList, now: datetime) -> dict[str, Any]:
    """All checkpoints of a run, oldest first."""
    document: dict[str, Any] = finite(
        {
            "run": found.run,
            "folder": str(found.folder.absolute()),
            "checkpoints": [_kept(each, now) for each in found.checkpoints],
        }
    )
    return document


def _kept(each: Kept, now: datetime) -> dict[str, Any]:
    record = each.record
    age = each.age(now)
    return {
        "name": record.name,
        "path": str(each.path.absolute()),
        "step": each.step,
        "evaluated": record.evaluated,
        "bytes": record.bytes,
        "created": record.created or None,
        "age_seconds": None if age is None else round(age, 3),
        "metrics": record.metrics,
        "weights_digest": record.weights_digest or None,
        "best": each.is_best,
        "encrypted": record.encrypted,
        "kept": [reason.value for reason in each.because],
        "problem": record.problem or None,
        "foreign": record.foreign or None,
    }


def verified_document(run: str, verified: Verified) -> dict[str, Any]:
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
