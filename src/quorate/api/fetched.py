"""A run of which only a copy is at hand, at another place: brought here, so that it can go on."""

import logging
import secrets
from pathlib import Path

from quorate.checkpoint.copying import ORIGIN
from quorate.checkpoint.fetching import FETCHING, Origin, fetch_newest, fetch_pages, read_origin, sweep_fetching
from quorate.checkpoint.listing import Search
from quorate.checkpoint.place import Place, place_at
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.addresses import is_url, shown
from quorate.core.errors import RunError
from quorate.observe.event import Event
from quorate.observe.jsonl import JsonlSink
from quorate.storage.atomic import discard, move_into_place
from quorate.storage.creation import write_creation
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


def is_copy(reference: str) -> bool:
    """Whether a person means a copy of a run by this: a URL, or a folder that has one."""
    return is_url(reference) or (Path(reference).expanduser() / ORIGIN).is_file()


def fetch_run(runs: Path, reference: str) -> Path:
    """The folder of the run that lies at an address, in the folder of runs here.

    Where it is not here yet it is made, with the newest whole checkpoint of the copy. Where it is, a checkpoint is
    fetched if the copy has a newer one.
    """
    address = reference if is_url(reference) else str(Path(reference).expanduser().absolute())
    place = place_at(address.rstrip("/"))
    origin = read_origin(place)
    if origin is None:
        raise RunError(
            f"there is no copy of a run at {shown(address)}: it has no {ORIGIN}. Give the address of the run itself, "
            "such as s3://bucket/prefix/digits-0001."
        )
    sweep_fetching(runs)
    final = runs.absolute() / origin.run
    if final.exists():
        _update(RunFolder(final), place, origin)
    else:
        _make(final, place, origin)
    return final


def _make(final: Path, place: Place, origin: Origin) -> None:
    # Two levels, so that nobody takes the inner one for a run before it is whole.
    temporary = final.parent / f"{FETCHING}{secrets.token_hex(4)}"
    run = RunFolder(temporary / final.name)
    try:
        try:
            run.logs.mkdir(parents=True)
            run.checkpoints.mkdir()
        except OSError as error:
            raise RunError(
                f"cannot make a run folder in {final.parent}: {error.strerror}. Choose another with --runs."
            ) from error
        fetch_pages(place, run.path)
        if not run.job_file.is_file():
            raise RunError(f"the copy at {place} has no job.yaml, so it cannot go on: it ended before that was copied.")
        search = fetch_newest(place, run.checkpoints)
        if search.newest is None:
            why = f": {search.skipped[0].reason}" if search.skipped else ""
            raise RunError(f"there is no whole checkpoint at {place}{why}")
        write_creation(run.path, origin.created)
        _warn(run, search)
        move_into_place(run.path, final)
    finally:
        discard(temporary)
    log.info("fetched %s with checkpoint %s from %s", final.name, search.newest.path.name, place)


def _update(run: RunFolder, place: Place, origin: Origin) -> None:
    if run.created != origin.created:
        raise RunError(
            f"{run.path} is another run than the one at {place}, which was created {origin.created.isoformat()}. "
            "Choose another folder with --runs."
        )
    with run.lock():
        newest = CheckpointFolder(run.checkpoints).newest_whole()
        search = fetch_newest(place, run.checkpoints, None if newest is None else newest.cursor)
        _warn(run, search)


def _warn(run: RunFolder, search: Search) -> None:
    """Of each newer copy that is damaged, on the console and in the run's events."""
    for damaged in search.skipped:
        message = f"{damaged.reason}, so an earlier one is used"
        log.warning("%s", message)
        sink = JsonlSink(run.events_file)
        sink.write(Event("log", fields={"level": "warning", "message": message}))
        sink.close()
