"""Checkpoints that lie in an object store, and the folder of a run that shows them.

A run says in `storage.json` that its checkpoints are there. Its folder then has a copy of each manifest, and of the
parts those that somebody has read here: whatever reads a folder of checkpoints reads these as well.

::

    STORE/RUN/step-00000200/manifest.json       the marker that commits: it is put last and removed first
    STORE/RUN/step-00000200/1-of-2.….safetensors
    STORE/RUN/.writing-step-00000200-…/         what writers of one that is not committed tell each other
"""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from quorate.checkpoint.listing import ShownFolder
from quorate.checkpoint.manifest import MANIFEST, Manifest
from quorate.core.errors import CheckpointError
from quorate.storage.atomic import discard, move_into_place, write_atomically
from quorate.storage.objects import ObjectMissing, ObjectStore, Stored, StoreError

_NAMED = "step-"
_shown: dict[Path, str] = {}
"""What the store has called the content of each manifest that this process has shown (its tag of it)."""


class ObjectFolder(ShownFolder):
    """Of one run, in its prefix of the store."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store = store
        self.folder = folder

    def objects(self) -> dict[str, Stored]:
        """All of the run."""
        with explaining():
            return self.store.list()

    def refresh(self) -> set[str]:
        found = self.objects()
        listed = {key.partition("/")[0]: found[key] for key in found if key.endswith(f"/{MANIFEST}")}
        for name, stored in listed.items():
            manifest = self.folder / name / MANIFEST
            # Not by its size: one that was encrypted anew is as long as before. A store that has no tags is read.
            if not stored.tag or _shown.get(manifest) != stored.tag or not manifest.exists():
                with explaining(), contextlib.suppress(ObjectMissing):  # it is being removed
                    if self._show(name, self.store.read(f"{name}/{MANIFEST}"), found):
                        _shown[manifest] = stored.tag
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            if entry.name.startswith(_NAMED) and entry.name not in listed:
                discard(entry)
        return set(listed)

    def _show(self, name: str, content: bytes, found: dict[str, Stored]) -> bool:
        try:
            parts = Manifest.from_json(content.decode()).parts
            if any(f"{name}/{part.file}" not in found for part in parts):
                return False  # of a writer that was replaced, and whose parts were swept as leftovers
        except (CheckpointError, UnicodeDecodeError):
            pass  # who looks at it finds out what is wrong with it
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name / MANIFEST, content)
        return True

    def fetch(self, name: str, file: str, size: int) -> None:
        partial = self.folder / name / f".{file}.{secrets.token_hex(4)}.partial"
        try:
            with explaining(), contextlib.suppress(ObjectMissing):  # which whoever opens it tells
                self.store.fetch(f"{name}/{file}", partial, size)
                move_into_place(partial, self.folder / name / file)
        finally:
            discard(partial)

    def commit(self, name: str, content: bytes) -> bool:
        """Make what is there a checkpoint; False where there is a manifest already."""
        with explaining():
            return self.store.create(f"{name}/{MANIFEST}", content)

    def uncommit(self, name: str) -> None:
        """What is left is no checkpoint."""
        with explaining():
            self.store.remove(f"{name}/{MANIFEST}")

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or what lies there for one."""
        with explaining():
            if not remove_below(self.store, name):
                raise CheckpointError(f"cannot remove checkpoint {name}: it is not in {self.store}.")
        discard(self.folder / name)

    def keep(self, name: str, content: bytes) -> None:
        """Keep a page beside the checkpoints."""
        with explaining():
            self.store.create(name, content)

    def kept(self, beginning: str) -> list[tuple[str, bytes]]:
        """The pages beside the checkpoints whose names begin like this."""
        names = [key for key in self.objects() if key.startswith(beginning)]
        with explaining():
            return [(name, self.store.read(name)) for name in names]


def remove_below(store: ObjectStore, name: str) -> bool:
    """Remove all below a name, the manifest first: what is left then is no checkpoint. Whether there was anything."""
    found = [key for key in store.list() if key.startswith(f"{name}/")]
    for key in sorted(found, key=lambda each: not each.endswith(f"/{MANIFEST}")):
        store.remove(key)
    return bool(found)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Trouble with the store, as whoever saves or loads knows it."""
    try:
        yield
    except ObjectMissing:
        raise
    except StoreError as error:
        raise CheckpointError(error.message) from None
