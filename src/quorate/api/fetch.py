"""A run of which only a copy is at hand, at another place: brought here, so that it can be resumed."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from quorate.api.recorded_run import recorded_and_asked, set_foreign_aside
from quorate.checkpoint.listing import Search
from quorate.checkpoint.place import Place, place_at
from quorate.checkpoint.selection import Foreign, search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder, why_not_plain
from quorate.checkpoint.transfer import (
    FETCHING,
    ORIGIN,
    PAGES,
    SOURCE_PAGE,
    Origin,
    encrypted_at,
    fetch_newest,
    here_at,
    read_origin,
    sweep_fetching,
)
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

Jobs = Callable[[RunFolder], tuple[ResolvedJob, ResolvedJob]]
"""The job of a run as it is recorded, and with what is asked for now over it."""


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
    run = RunFolder(runs.absolute() / origin.run)
    jobs = partial(recorded_and_asked, environment=environment, overrides=overrides)
    if run.path.exists():
        _update(run, place, origin, jobs)
    else:
        _make(run, place, origin, jobs)
    return FetchedRun(run.path, _take_source(run, place, jobs, trust_source))


def _make(target: RunFolder, place: Place, origin: Origin, jobs: Jobs) -> None:
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
        # Not the task's source, which is code.
        for name in PAGES:
            if (content := place.read(name)) is not None:
                here_at(run.path).write(name, content)
                (run.path / name).chmod(0o600)  # there may be a secret in the job
        if not run.job_file.is_file():
            raise RunError(
                f"the copy at {place} has no job.yaml, so it cannot be resumed: it ended before the copy of it."
            )
        try:
            recorded, resolved = jobs(run)
        except QuorateError as error:
            # By its name there: what is fetched is thrown away when this is read.
            raise RunError(error.message.replace(str(run.job_file), f"{place}/{run.job_file.name}")) from None
        search = _bring(run, place, recorded, resolved)
        if search.newest is None:
            why = f": {search.skipped[0].reason}" if search.skipped else ""
            raise RunError(f"there is no valid checkpoint at {place}{why}")
        write_creation(run.path, origin.created)
        _warn(run, search)
        move_into_place(run.path, final)
    finally:
        discard(temporary)
    log.info("fetched %s with checkpoint %s from %s", final.name, search.newest.path.name, place)


def _update(run: RunFolder, place: Place, origin: Origin, jobs: Jobs) -> None:
    if run.created != origin.created:
        raise RunError(
            f"{run.path} is another run than the one at {place}, which was created {origin.created.isoformat()}. "
            "Choose another folder with --runs."
        )
    with run.lock():
        _warn(run, _bring(run, place, *jobs(run)))


def _bring(run: RunFolder, place: Place, recorded: ResolvedJob, resolved: ResolvedJob) -> Search:
    """Fetch the newest whole checkpoint of the run itself, if it is newer than what is here."""
    folder = _folder(run, place, resolved)
    foreign = partial(why_foreign, spec=recorded.spec)
    own = search_own(folder.search, foreign).newest

    def bring(foreign: Foreign) -> Search:
        newest = None if own is None else own.cursor
        return fetch_newest(place, run.checkpoints, newest, cipher=folder.cipher, foreign=foreign)

    if own is None or foreign(own):
        return search_own(bring, foreign)
    # Where what is here is of the run, what is not stays there; and what is not here makes room for one of its name.
    set_foreign_aside(run, recorded.spec)
    return bring(foreign)


def _warn(run: RunFolder, search: Search) -> None:
    """Of each newer copy that cannot be used, on the console and in the run's events."""
    for left in search.skipped:
        message = f"{left.reason}, so an earlier one is used"
        log.warning("%s", message)
        sink = JsonlSink(run.events_file)
        sink.handle(LogMessage(level="warning", message=message))
        sink.close()


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


def _take_source(run: RunFolder, place: Place, jobs: Jobs, trusted: bool) -> str:
    """Keep the task's source that lies at a place, unless the run has one; or say why it is not kept.

    What is kept is imported.
    """
    content = None if (run.path / SOURCE_FOLDER).exists() else place.read(SOURCE_PAGE)
    page = None if content is None else SourcePage.read(content)
    if page is None:
        return ""
    recorded, resolved = jobs(run)
    folder = CheckpointFolder.of_job(run.checkpoints, resolved.spec.checkpoint)
    if folder.cipher is None:
        if not trusted:
            return (
                f"{_would_run(page, place)}: anybody who can write there may have changed it. If you trust it, add "
                "--trust-source"
            )
    else:
        newest = search_own(folder.search, partial(why_foreign, spec=recorded.spec)).newest
        told = None if newest is None else newest.manifest.environment.get(SOURCE)
        if told != page.source.digest:
            log.warning(
                "the task's source at %s is left out: its digest is %s, and the encrypted checkpoint says %s",
                *(place, page.source.digest, told),
            )
            return f"{_would_run(page, place)}, which is not the code that the encrypted checkpoint records"
    with run.lock():
        page.keep(run.path)
    return ""


def _would_run(page: SourcePage, place: Place) -> str:
    files = sorted(page.source.files, key=lambda name: name != page.source.main)
    named = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return f"resuming would run the source at {place} ({SOURCE_PAGE}: {named})"
