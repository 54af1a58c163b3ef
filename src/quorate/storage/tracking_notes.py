"""What the folder of a run keeps for those that track it: where it is tracked by MLflow, and as which of its runs."""

import contextlib
import json
from pathlib import Path

from quorate.core.addresses import shown_place
from quorate.spec.tracking import TrackSpec
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder

FOLDER = "tracking"
"""In a run folder: what is known of those that track it, and for them."""
DATABASE = "mlflow.db"


def tracking_uri(track: TrackSpec, runs: Path) -> str:
    """Where a job is tracked: `mlflow: true` is a file of SQLite in the folder of runs, all else is a URI."""
    return track.mlflow if isinstance(track.mlflow, str) else f"sqlite:///{runs.absolute() / DATABASE}"


def place(uri: str) -> str:
    """A URI as it is shown and written down: without the password that it may have."""
    return uri if uri.startswith("sqlite:") else shown_place(uri)


def kept_ids(run: RunFolder) -> dict[str, str]:
    """The ids of a run's MLflow runs, by the place at which each is: a run may be tracked at several."""
    try:
        kept = json.loads((run.path / FOLDER / "mlflow.json").read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def kept_id(run: RunFolder, uri: str) -> str | None:
    """The id of the one at this place."""
    kept = kept_ids(run).get(place(uri))
    return kept if isinstance(kept, str) else None


def keep_id(run: RunFolder, uri: str, run_id: str) -> None:
    """Remember it."""
    with contextlib.suppress(OSError):  # the server's tag says the same
        (run.path / FOLDER).mkdir(exist_ok=True)
        kept = {**kept_ids(run), place(uri): run_id}
        write_atomically(run.path / FOLDER / "mlflow.json", json.dumps(kept, indent=2) + "\n")


def wish(run: RunFolder) -> Path:
    """A file that is there when the task wants to log to the MLflow run: it is made then, before the first step."""
    return run.path / FOLDER / "mlflow.wanted"
