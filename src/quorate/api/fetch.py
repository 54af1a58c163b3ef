"""A run of which only a copy is at hand, at another place: brought here, so that it can be resumed."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from quorate.api.recorded_run import recorded_and_asked
from quorate.checkpoint.copier import ORIGIN, SOURCE_PAGE
from quorate.checkpoint.fetching import (
    FETCHING,
    Origin,
    encrypted_at,
    fetch_newest,
    fetch_pages,
    read_origin,
    read_source_page,
    sweep_fetching,
)
from quorate.checkpoint.listing import Search
from quorate.checkpoint.place import Place, place_at
from quorate.checkpoint.store import CheckpointFolder, why_not_plain
from quorate.core.addresses import is_url, shown
from quorate.core.errors import CheckpointError, QuorateError, RunError
from quorate.engines.engine import SOURCE
from quorate.observe.events import LogMessage
from quorate.observe.jsonl import JsonlSink
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob
from quorate.storage.atomic import discard, move_into_place
from quorate.storage.kept_source import FOLDER as SOURCE_FOLDER
from quorate.storage.kept_source import SourcePage
from quorate.storage.run_folder import RunFolder, write_creation

log = logging.getLogger(__name__)


def is_copy(reference: str) -> bool:
    """Whether a person means a copy of a run by this: a URL, or a folder that has one."""
    return is_url(reference) or (Path(reference).expanduser() / ORIGIN).is_file()


@dataclass(frozen=True)
class FetchedRun:
    """The folder of a run that was fetched; and why the task's source was left where it lies, if it was."""

    path: Path
    untrusted: str = ""


def fetch_run(
    runs: Path,
    reference: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    overrides: Sequence[Override] = (),
    *,
    trust_source: bool = False,
) -> FetchedRun:
    """The run that lies at an address, in the folder of runs here.

    Where it is not here yet it is made, with the newest whole checkpoint of the copy. Where it is, a checkpoint is
    fetched if the copy has a newer one. Whether there is a key is for the job to say, under what is asked for now: with
    one, nothing is taken that was not written with it.

    The task's source is code of whoever can write there. With a key it is kept if a checkpoint that was written with
    the key tells its digest, and otherwise only if that is asked for (`trust_source`).
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

    def job(run: RunFolder) -> ResolvedJob:
        return recorded_and_asked(run, environment, overrides)[1]

    bring = _update if final.exists() else _make
    folder = bring(RunFolder(final), place, origin, job)
    return FetchedRun(final, _take_source(RunFolder(final), place, folder, trust_source))


def _make(target: RunFolder, place: Place, origin: Origin, job: Callable[[RunFolder], ResolvedJob]) -> CheckpointFolder:
    final = target.path
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
        folder = _folder(run, place, _copied_job(run, place, job))
        search = fetch_newest(place, run.checkpoints, cipher=folder.cipher)
        if search.newest is None:
            why = f": {search.skipped[0].reason}" if search.skipped else ""
            raise RunError(f"there is no whole checkpoint at {place}{why}")
        write_creation(run.path, origin.created)
        _warn(run, search)
        move_into_place(run.path, final)
    finally:
        discard(temporary)
    log.info("fetched %s with checkpoint %s from %s", final.name, search.newest.path.name, place)
    return CheckpointFolder(final / folder.folder.name, cipher=folder.cipher)


def _update(run: RunFolder, place: Place, origin: Origin, job: Callable[[RunFolder], ResolvedJob]) -> CheckpointFolder:
    if run.created != origin.created:
        raise RunError(
            f"{run.path} is another run than the one at {place}, which was created {origin.created.isoformat()}. "
            "Choose another folder with --runs."
        )
    with run.lock():
        folder = _folder(run, place, job(run))
        newest = folder.newest_whole()
        cursor = None if newest is None else newest.cursor
        _warn(run, fetch_newest(place, run.checkpoints, cursor, cipher=folder.cipher))
    return folder


def _copied_job(run: RunFolder, place: Place, job: Callable[[RunFolder], ResolvedJob]) -> ResolvedJob:
    try:
        return job(run)
    except QuorateError as error:
        # By its name there: what is fetched is thrown away when this is read.
        raise RunError(error.message.replace(str(run.job_file), f"{place}/{run.job_file.name}")) from None


def _folder(run: RunFolder, place: Place, job: ResolvedJob) -> CheckpointFolder:
    """The checkpoints of a run with the key of its job. None where the copies have one: whoever can edit the job there
    could otherwise switch off what tells his checkpoints from good ones."""
    rules = job.spec.checkpoint
    if rules.encrypt is None and (name := encrypted_at(place)) is not None:
        raise RunError(why_not_plain(f"{place}/{name}", run.name))
    try:
        return CheckpointFolder.of_job(run.checkpoints, rules)
    except CheckpointError as error:
        raise RunError(f"checkpoint.encrypt: {error.message}") from None


def _take_source(run: RunFolder, place: Place, folder: CheckpointFolder, trusted: bool) -> str:
    """Keep the task's source that lies at a place, unless the run has one; or say why it is not kept."""
    page = None if (run.path / SOURCE_FOLDER).exists() else read_source_page(place)
    if page is None:
        return ""
    digest = page.source.digest
    if folder.cipher is None:
        if not trusted:
            return f"{_would_run(page, place)}: code of whoever can write there. If that is you, add --trust-source"
    else:
        newest = folder.newest_whole()
        recorded = None if newest is None else newest.manifest.environment.get(SOURCE)
        if recorded != digest:
            log.warning(
                "the task's source at %s is left out: its digest is %s, and the checkpoint under the key says %s",
                *(place, digest, recorded),
            )
            return f"{_would_run(page, place)}, which is not the code that the checkpoint under the key tells of"
    with run.lock():
        page.keep(run.path)
    return ""


def _would_run(page: SourcePage, place: Place) -> str:
    files = sorted(page.source.files, key=lambda name: name != page.source.main)
    named = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return f"going on would run the source that lies at {place} ({SOURCE_PAGE}: {named})"


def _warn(run: RunFolder, search: Search) -> None:
    """Of each newer copy that cannot be used, on the console and in the run's events."""
    for damaged in search.skipped:
        message = f"{damaged.reason}, so an earlier one is used"
        log.warning("%s", message)
        sink = JsonlSink(run.events_file)
        sink.handle(LogMessage(level="warning", message=message))
        sink.close()
