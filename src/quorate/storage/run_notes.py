"""What a run's folder tells besides: of the cluster that it was submitted to, and of those that track it."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from quorate.core.addresses import shown_place
from quorate.core.errors import DamagedFileError
from quorate.core.regular_file import read_regular
from quorate.spec.tracking import TrackSpec
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder

NAME = "submission.json"
ASKED = "resume.yaml"
"""The job as a resume asks for it, until the launcher that was submitted has taken the run up."""


@dataclass(frozen=True)
class Submission:
    """By which name the cluster knows it, where that was reached, and the task's file below the folder that was sent
    along; empty for a module. `failure` says why the cluster has given it up before a launcher took the run up."""

    id: str
    address: str
    file: str = ""
    failure: str = ""

    def write(self, run: RunFolder) -> None:
        write_atomically(run.path / NAME, f"{json.dumps(asdict(self), indent=2)}\n")


def submission_of(run: RunFolder) -> Submission | None:
    """None for a run that was started where it was typed."""
    try:
        fields = json.loads(read_regular(run.path / NAME))
        known = {name: str(fields[name]) for name in ("id", "address", "file")}
        return Submission(**known, failure=str(fields.get("failure", "")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{run.path / NAME} cannot be read: {error!r}") from None


def asked_of(run: RunFolder) -> Path:
    """The file with the job that a submitted resume asks for."""
    return run.path / ASKED


def forget_asked(run: RunFolder) -> None:
    """Of a run whose launcher has taken it up."""
    asked_of(run).unlink(missing_ok=True)


def forget_submission(run: RunFolder) -> None:
    """Of a run that is resumed: its launcher is no job of the cluster's any more."""
    forget_asked(run)
    (run.path / NAME).unlink(missing_ok=True)


def waits_to_begin(run: RunFolder) -> bool:
    """Whether it was submitted, to begin or to be resumed, and no launcher has taken it up."""
    submission = _not_begun(run)
    return submission is not None and not submission.failure


def those_that_wait(runs: Iterable[RunFolder]) -> list[RunFolder]:
    """The runs that wait to begin; one whose submission cannot be read is none of them."""
    waiting = []
    for run in runs:
        with contextlib.suppress(DamagedFileError):
            if waits_to_begin(run):
                waiting.append(run)
    return waiting


def failed_submission(run: RunFolder) -> str:
    """Why it was given up before a launcher took it up; empty if it was not."""
    submission = _not_begun(run)
    return "" if submission is None else submission.failure


def _not_begun(run: RunFolder) -> Submission | None:
    is_resumed = asked_of(run).exists()
    if run.result_file.exists() and not is_resumed:
        return None
    submission = submission_of(run)
    if submission is None or is_resumed:
        return submission
    # A resume of one that was given up is refused, and leaves a lock behind.
    return submission if submission.failure or not run.lock_file.exists() else None


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
