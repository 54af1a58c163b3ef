"""A save on its way: a hidden folder to which every writer adds its part, until it becomes the checkpoint."""

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from quorate.checkpoint.cipher import Cipher
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.name import checkpoint_name
from quorate.checkpoint.part_file import parts_in, write_part
from quorate.core.cursor import Cursor
from quorate.core.errors import CheckpointError
from quorate.core.regular_file import read_regular
from quorate.storage.atomic import Buffer, discard, write_atomically

WRITING = ".writing-"
VOUCHER = "voucher-"


class AttemptGone(CheckpointError):  # noqa: N818 (a happening, not a mistake)
    """Another writer has given the attempt up, or a later one has swept it away."""


@dataclass(frozen=True)
class Voucher:
    """The state that a worker has, by the digest of each tensor."""

    worker: int
    digests: dict[str, str]


@dataclass(frozen=True)
class Attempt:
    """Begun by one process, which also commits it; written by several. Whoever fails removes it, and so tells all."""

    path: Path

    @classmethod
    def begin(cls, folder: Path, cursor: Cursor) -> "Attempt":
        """Make its folder, under a name that no other attempt has."""
        path = folder / f"{WRITING}{checkpoint_name(cursor)}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        return cls(path)

    def write(self, index: int, parts: int, chunks: Iterable[Buffer], *, digest: str, cipher: Cipher | None) -> Part:
        """Add a part of so many; it is on the disk, and read through, when this returns."""
        self.check_there()
        try:
            return write_part(self.path, f"{index + 1}-of-{parts}", chunks, digest=digest, cipher=cipher)
        except FileNotFoundError:
            self.check_there()
            raise

    def written(self) -> dict[int, Part]:
        """The parts that are there, by index."""
        self.check_there()
        try:
            return {number - 1: part for number, part in parts_in(self.path).items()}
        except FileNotFoundError:
            self.check_there()
            raise

    def vouch(self, position: int, voucher: Voucher) -> None:
        """Say what state a writer has, besides the part that it writes: all must have the same."""
        self.check_there()
        try:
            write_atomically(self.path / f"{VOUCHER}{position}", json.dumps(asdict(voucher)))
        except FileNotFoundError:
            self.check_there()
            raise

    def vouchers(self) -> dict[int, Voucher]:
        """What the writers have said by now, by position."""
        self.check_there()
        try:
            found = {int(path.name.removeprefix(VOUCHER)): read_regular(path) for path in self.path.glob(f"{VOUCHER}*")}
        except FileNotFoundError:
            self.check_there()
            raise
        return {position: Voucher(**json.loads(content)) for position, content in sorted(found.items())}

    def drop_vouchers(self) -> None:
        """They have been compared, and are no part of a checkpoint."""
        for path in self.path.glob(f"{VOUCHER}*"):
            path.unlink(missing_ok=True)

    def check_there(self) -> None:
        """Raise if it was given up."""
        if not self.path.is_dir():
            raise AttemptGone(f"attempt {self.path.name} was given up by another writer")

    def give_up(self) -> None:
        """Give its space back; the other writers notice."""
        if not self.path.is_dir():
            return
        # In one move, as it is committed: removed file by file it could become a checkpoint that lacks some.
        doomed = self.path.with_name(f"{self.path.name}-{secrets.token_hex(4)}-void")
        try:
            os.rename(self.path, doomed)  # noqa: PTH104 (one seam for every call that changes the disk)
        except FileNotFoundError:
            return
        except OSError:
            doomed = self.path
        discard(doomed)
