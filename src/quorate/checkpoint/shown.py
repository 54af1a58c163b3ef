"""A folder of checkpoints that shows those of a store: what has to be asked for before anything is looked at here."""

from abc import ABC, abstractmethod
from pathlib import Path

from quorate.core.named import named_object
from quorate.storage.run_folder import RunFolder


class ShownFolder(ABC):
    """The checkpoints of a run in a store, shown by a folder. Every trouble is a `CheckpointError`."""

    @abstractmethod
    def refresh(self) -> set[str]:
        """Show what is there now: each checkpoint that has its manifest and all parts of it. Returns the names of all
        that have a manifest."""

    @abstractmethod
    def fetch(self, name: str, file: str, size: int) -> None:
        """Have a part of a checkpoint in the folder."""


def shown_by(folder: Path) -> ShownFolder | None:
    """What a folder of checkpoints shows; None for one that has them itself."""
    store = RunFolder(folder.parent).stored
    if store is None:
        return None
    shown = named_object("quorate.stores.object_folder:ObjectFolder")(store, folder)
    assert isinstance(shown, ShownFolder)
    return shown


def fetch_missing(checkpoint: Path, file: str, size: int) -> None:
    """Before a part is read: where it is still in a store only, have it here."""
    if not (checkpoint / file).exists() and (shown := shown_by(checkpoint.parent)) is not None:
        shown.fetch(checkpoint.name, file, size)
