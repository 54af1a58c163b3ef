"""What is wrong with shards, by file and place."""

from quorate.core.errors import JobError


class ShardError(JobError):
    """A shard cannot be read as it should; `place` says where in the file, such as "byte 512" or "row 7"."""

    def __init__(self, file: str, place: str, why: str) -> None:
        self.file, self.place, self.why = file, place, why
        super().__init__(f"{file}, {place}: {why}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.file, self.place, self.why)


class BadRecord(ShardError):  # noqa: N818 (a happening, not a mistake)
    """A record whose bytes are those that were indexed, and that cannot be decoded all the same."""


class DamagedBlock(ShardError):  # noqa: N818
    """Bytes of a shard that are not those that were indexed."""
