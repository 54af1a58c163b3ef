"""Another key for all checkpoints of a run."""

import logging
from collections.abc import Sequence

from quorate.checkpoint.listing import CheckpointInfo, Skipped, Unusable, survey
from quorate.core.errors import CheckpointError, RequestError, UntrustedError
from quorate.encryption.cipher import Cipher
from quorate.encryption.key import KeyPlace, cipher_of, read_key, rekey, sweep_leftovers
from quorate.spec.load import load_recorded
from quorate.spec.override import Override
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


def rekey_run(
    run: RunFolder, place: KeyPlace, old_place: KeyPlace = None, *, include_untrusted: bool = False
) -> tuple[str, ...]:
    """Encrypt all checkpoints of a run with the key in a place, or not at all; the names of those rewritten.

    Each is readable all the time. The run is resumed with the new key. `old_place` is where the key lies that they are
    encrypted with, if not where their jobs say. One with a damaged manifest stays as it is, and is told of by an error
    when all others are done.

    Whatever gets the new key is vouched for by it from then on. So where the run is encrypted already, what was not
    written with the present key is refused before anything changes, unless `include_untrusted` asks for it.
    """
    if run.stored is not None:
        raise RequestError(
            f"run {run.name} is kept in {run.stored}, where no checkpoint can be replaced in one move: only those in a "
            "folder are rekeyed."
        )
    new = None if place is None else read_key(place)
    old: Cipher | None = None if old_place is None else read_key(old_place)
    rewritten: list[str] = []
    value = None if place is None else dict(place)
    override = Override("checkpoint.encrypt", value, "quorate checkpoints rekey")
    with run.lock():
        resolved = load_recorded(run.job_file, {}, [override])
        recorded = load_recorded(run.job_file, {}, []).spec.checkpoint.sealing
        found = survey(run.checkpoints)
        infos = [each for each in found if isinstance(each, CheckpointInfo)]
        damaged = [each for each in found if isinstance(each, Skipped)]
        present = old or (None if recorded is None else read_key(recorded))
        untrusted = _untrusted(infos, present, new)
        if untrusted and not include_untrusted:
            raise CheckpointError(_why_no_new_key(run, untrusted))
        for each in untrusted:
            log.warning("%s is taken on trust: %s", each.path.name, each.reason)
        sweep_leftovers(run.checkpoints)
        for info in infos:
            try:
                if rekey(info, new, place, present):
                    rewritten.append(info.path.name)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error.message}. {len(rewritten)} of {len(infos)} were rewritten, and all are as readable as "
                    "they were. Try again when this is fixed; one that is damaged can be removed with "
                    f"`quorate checkpoints rm {run.name} --checkpoint {info.cursor.step}`"
                ) from None
        run.write_job(dump_job(resolved))
    if damaged:
        raise CheckpointError(
            f"{damaged[0].path.name} is damaged and stays as it was, not under the new key: {damaged[0].reason}. "
            f"{len(damaged)} of {len(found)} are so; the other {len(infos)} are as asked for. Remove what is damaged "
            f"with `quorate checkpoints rm {run.name} --checkpoint {damaged[0].path.name}`, and try again"
        )
    return tuple(rewritten)


def _untrusted(infos: Sequence[CheckpointInfo], present: Cipher | None, new: Cipher | None) -> list[Skipped]:
    """Those that nothing vouches for, in a run that is encrypted; what has the new key already got it from here."""
    unlike = [info for info in infos if new is None or _why_untrusted(info, new) is not None]
    if present is None and all(info.manifest.encryption is None for info in unlike):
        return []
    found = ((info, _why_untrusted(info, present)) for info in unlike)
    return [Skipped(info.path, why, Unusable.UNTRUSTED) for info, why in found if why is not None]


def _why_untrusted(info: CheckpointInfo, cipher: Cipher | None) -> str | None:
    if cipher is None:  # the job names no key: then each that is encrypted is opened by the key that it names itself
        return None if info.manifest.encryption is not None else "it is not encrypted, and others of the run are"
    try:
        cipher_of(info.manifest, cipher)
    except UntrustedError as error:
        return error.message
    return None


def _why_no_new_key(run: RunFolder, untrusted: Sequence[Skipped]) -> str:
    names = ", ".join(each.path.name for each in untrusted)
    remove = f"quorate checkpoints rm {run.name} --checkpoint {untrusted[0].path.name}"
    return (
        f"nothing is rewritten: the key of run {run.name} does not authenticate {names} "
        f"({untrusted[0].reason.rstrip('.')}), and the new key would. Remove what is not yours with `{remove}`, or "
        "trust all of them with --include-untrusted"
    )
