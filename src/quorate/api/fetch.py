"""A run of which only a copy is at hand, at another place: brought here, so that it can be resumed.

What is fetched is data: anybody who can write there may have changed it. Nothing that a fetched job names is imported,
run, read as a key or written to unless the person who resumes it says so, and the job that is written here has none.
"""

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quorate.api.recorded_run import KEY, keyed_folder, names_key, recorded_and_asked, set_foreign_aside, without_key
from quorate.api.tasks import is_source_of
from quorate.checkpoint.listing import CheckpointInfo, Search
from quorate.checkpoint.selection import Foreign, saved_job, search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder, why_not_plain
from quorate.core.addresses import is_url, normalised, shown
from quorate.core.cached import cached_property
from quorate.core.errors import JobFileError, QuorateError, RunError
from quorate.core.masking import shown_value
from quorate.core.runs_folder import ORIGIN
from quorate.engines.engine import SOURCE
from quorate.observe.events import LogMessage
from quorate.observe.jsonl import JsonlSink
from quorate.spec.changes import changes
from quorate.spec.job import OWN_PLACE, JobSpec
from quorate.spec.load import RECORDED, Taken, load_recorded, resolve_mapping
from quorate.spec.override import Override, environment_overrides
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.spec.yaml_document import write_value
from quorate.storage.atomic import discard, move_into_place
from quorate.storage.run_folder import RunFolder, write_creation
from quorate.storage.task_files import FOLDER as SOURCE_FOLDER
from quorate.storage.task_files import SourcePage
from quorate.stores.place import Place, place_at
from quorate.stores.transfer import (
    FETCHING,
    PAGES,
    SOURCE_PAGE,
    Origin,
    encrypted_at,
    fetch_newest,
    here_at,
    read_origin,
    sweep_fetching,
)

log = logging.getLogger(__name__)

Jobs = Callable[[RunFolder], tuple[ResolvedJob, ResolvedJob]]
"""The job of a run as it is recorded, and with what is asked for now over it."""
Load = Callable[[Mapping[str, str], Sequence[Override], Taken], ResolvedJob]
"""A job that was fetched: under what is asked for, and of its own keys what is taken."""
NAMING = ("callbacks", "notify", "track", "engine", "encrypt", "share", "checkpoint.to", KEY)
"""The keys of a job that name code, commands, addresses, keys or destinations, or switch off what protects them."""


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
    trust_job: bool = False,
) -> FetchedRun:
    """The run that lies at an address, in the folder of runs here.

    Where it is not here yet it is made, with the newest whole checkpoint of the copy. Where it is, a checkpoint is
    fetched if the copy has a newer one. Whether there is a key is for the person to say, or for the job of the run that
    is here: with one, nothing is taken that was not written with it, the job included.

    A job that names more than the place itself is refused, unless that is overridden or asked for (`trust_job`).

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
        _make(run, place, origin, _Words(place, address, origin.run, environment, overrides, trust_job, trust_source))
    return FetchedRun(run.path, _take_source(run, place, jobs, trust_source))


@dataclass(frozen=True)
class _Words:
    """What a person says who fetches a run, against what its job says that lies beside the copies."""

    place: Place
    address: str
    run: str
    environment: Mapping[str, str]
    overrides: Sequence[Override]
    trusts: bool
    trusts_source: bool

    def jobs(self, load: Load, authenticated: str = "") -> tuple[ResolvedJob, ResolvedJob]:
        """The job as it is recorded from now on, where what is asked for stands for what it names; and with all that is
        asked for over it. Refuses one by which something that it names would be used; `authenticated` says what of
        the copy has it, if that was written with the person's key."""
        said = [*environment_overrides(self.environment)[0], *self.overrides]
        # A key of the person's stands for that of the job as a whole: one names a file, and one a variable.
        everything = load(self.environment, self.overrides, without_key if names_key(said) else dict)
        sections = {key.partition(".")[0] for key in NAMING}
        own = [each for each in said if each.key.partition(".")[0] in sections]
        try:
            recorded, resolved = load({}, own, self._harmless), load(self.environment, self.overrides, self._harmless)
        except JobFileError:  # one key of a section is asked for, and needs others that are the job's
            recorded = resolved = load({}, [], self._harmless)
        used = [change.key for change in changes(resolved.spec, everything.spec)]
        if named := [key for key in NAMING if any(f"{each}.".startswith(f"{key}.") for each in used)]:
            raise RunError(self._refusal(named, everything.spec, authenticated))
        return recorded, resolved

    def _harmless(self, job: dict[str, Any]) -> dict[str, Any]:
        """The keys of a valid job but for those that name something else than the place that the person has named."""
        job = without_key(job)
        if self.trusts:
            return job
        checkpoint = job["checkpoint"]
        places = checkpoint.get("to")
        if isinstance(places, list):
            checkpoint["to"] = [to for to in places if to == OWN_PLACE or self._is_here(to)]
        if not self._has_source(str(job.get("task"))):  # the person may have said that it stays at home
            checkpoint["source"] = False
        kept = {key: value for key, value in job.items() if key not in NAMING}
        engine = job.get("engine")
        if isinstance(engine, Mapping) and engine.get("kind") == "ray" and self._is_here(engine.get("storage")):
            kept["engine"] = {key: value for key, value in engine.items() if key not in ("address", "runtime_env")}
        elif isinstance(engine, Mapping) and engine.get("kind") == "local":
            kept["engine"] = engine
        if job.get("encrypt") is True:
            kept["encrypt"] = True
        return kept

    @cached_property
    def _source_there(self) -> SourcePage | None:
        content = self.place.read(SOURCE_PAGE)
        return None if content is None else SourcePage.read(content)

    def _has_source(self, task: str) -> bool:
        """Whether what would be sent there lies there already: anybody may have put another page there so that it is.
        One that is trusted is kept in the run, which sends no other then."""
        said = [*environment_overrides(self.environment)[0], *self.overrides]
        task = [task, *(str(each.value) for each in said if each.key == "task")][-1]
        page = self._source_there
        return page is not None and (self.trusts_source or is_source_of(page.source, task))

    def _is_here(self, to: object) -> bool:
        """Whether copies that go there are those at the address, as it is spelled; what is above a link is not told by
        that."""
        if not isinstance(to, str) or ".." in to.split("/"):
            return False
        return _spelled(f"{to.rstrip('/')}/{self.run}") == _spelled(self.address)

    def _refusal(self, named: Sequence[str], spec: JobSpec, authenticated: str) -> str:
        values = spec.model_dump(mode="json")
        listed = "".join(f"\n  {key}: {write_value(_shown(key, _at(values, key)))}" for key in named)
        own = f"name the key yourself: --set {KEY}.key_file=PATH (or .key_env=VARIABLE)" if KEY in named else ""
        others = [key for key in named if key != KEY]
        if others:
            sets = " ".join(f"--set {key}=VALUE" for key in others)
            whose = f"{own}; give the others" if own else "give them"
            own = f"{whose} yourself: {sets}; or add --trust-job to use what the job says"
        why = f"anybody who can write to {self.place} may have changed the job there, so what it names is not used"
        if authenticated:
            why = f"what the job in {authenticated} names is not used unless you say so, although it has your key"
        return f"{why}:{listed}\nTo resume, {own}."


def _make(target: RunFolder, place: Place, origin: Origin, words: _Words) -> None:
    final = target.path
    # Two levels, so that nobody takes the inner one for a run before it is whole.
    temporary = final.parent / f"{FETCHING}{secrets.token_hex(4)}"
    run = RunFolder(temporary / final.name)
    try:
        try:
            run.make()
        except OSError as error:
            raise RunError(
                f"cannot make a run folder in {final.parent}: {error.strerror}. Choose another with --runs."
            ) from error
        # Not the task's source, which is code.
        for name in PAGES:
            if (content := place.read(name)) is not None:
                here_at(run.path).write(name, content)
                (run.path / name).chmod(0o600)
        if not run.job_file.is_file():
            raise RunError(
                f"the copy at {place} has no job.yaml, so it cannot be resumed: it ended before the copy of it."
            )
        try:
            recorded, resolved = words.jobs(partial(load_recorded, run.job_file))
        except QuorateError as error:
            # By its name there: what is fetched is thrown away when this is read.
            raise RunError(error.message.replace(str(run.job_file), f"{place}/{run.job_file.name}")) from None
        search = _bring(run, place, recorded, resolved)
        if search.newest is None:
            why = f": {search.skipped[0].reason}" if search.skipped else ""
            raise RunError(f"there is no valid checkpoint at {place}{why}")
        if resolved.spec.checkpoint.sealing is not None:
            recorded = _authenticated(run, search.newest, words, recorded)
        run.write_job(dump_job(recorded), is_private=True)  # there may be a secret in it
        run.write_fetched(str(place), recorded.spec.task)
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
        recorded, resolved = jobs(run)
        fetched, encrypt = run.read_fetched(), resolved.spec.checkpoint.sealing
        if encrypt is not None and fetched is not None and fetched["task"] and recorded.spec.checkpoint.sealing is None:
            raise RunError(
                f"run {run.name} was fetched from {fetched['from']} without a key, so the job in {run.path} may be "
                "anybody's, and is not used with one. Remove the run's folder and resume from there again."
            )
        if not run.job_file.exists():  # before there is a checkpoint here whose job others may have written
            run.write_job(dump_job(recorded), is_private=True)
        if fetched is None and encrypt is None:
            run.write_fetched(str(place))  # before: also the job in what is fetched is others'
        _warn(run, _bring(run, place, recorded, resolved))


def _authenticated(run: RunFolder, newest: CheckpointInfo, words: _Words, told: ResolvedJob) -> ResolvedJob:
    """The job and the environment in a checkpoint that was written with the key: the files beside it are anybody's."""
    saved = saved_job(newest)
    if saved is None:
        raise RunError(
            f"the job in checkpoint {newest.path.name} at {words.place} is not one of this version of Quorate."
        )

    def load(environment: Mapping[str, str], overrides: Sequence[Override], taken: Taken) -> ResolvedJob:
        return resolve_mapping(taken(saved.model_dump()), RECORDED, environment, overrides)

    recorded, _ = words.jobs(load, f"checkpoint {newest.path.name} at {words.place}")
    run.write_environment(newest.manifest.environment)
    if changed := changes(told.spec, recorded.spec):
        log.warning(
            "the job.yaml at %s is not what the key authenticates; that of checkpoint %s is used: %s",
            *(words.place, newest.path.name, "; ".join(map(str, changed))),
        )
    return recorded


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
    if rules.sealing is None and (name := encrypted_at(place)) is not None:
        raise RunError(why_not_plain(f"{place}/{name}", run.name))
    return keyed_folder(run, rules)


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


def _spelled(address: str) -> str:
    """An address as it compares: by its text alone, since what a link leads to may be changed."""
    path = address.removeprefix("file://")
    return normalised(address).rstrip("/") if is_url(path) else os.path.normpath(path)


def _at(values: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return values[section][name] if section else values[name]


def _shown(key: str, value: Any) -> Any:
    """A value without the secrets in it."""
    if isinstance(value, Mapping):
        return {inner: _shown(inner, each) for inner, each in value.items()}
    return shown_value(key, value)
