"""What is wrong with shards, by file and place."""

from quorate.core.errors import JobError


class ShardError(JobError):
    """Shards or their index cannot be read as they should."""


class BadRecord(ShardError):  # noqa: N818 (a happening, not a mistake)
    """A record whose bytes are those that were indexed, and that cannot be decoded all the same.

    `place` says where in the file, such as "byte 512" or "row 7".
    """

    def __init__(self, file: str, place: str, why: str) -> None:
        self.file, self.place, self.why = file, place, why
        super().__init__(f"{file}, {place}: {why}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.file, self.place, self.why)


class DamagedBlock(ShardError):  # noqa: N818
    """Bytes of a shard that are not those that were indexed; `found` is empty where they could not be read at all."""

    def __init__(self, file: str, place: str, expected: str, found: str, why: str = "") -> None:
        self.file, self.place, self.expected, self.found, self.why = file, place, expected, found, why
        what = why or f"the content has changed since it was indexed (digest {found}, not {expected})"
        super().__init__(f"{file}, {place}: {what}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.file, self.place, self.expected, self.found, self.why)
