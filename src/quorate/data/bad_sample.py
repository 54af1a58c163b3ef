"""A sample that the data do not give: told by its file, left out of its batch where the job allows it."""


class BadSample(Exception):  # noqa: N818 (it is about the sample)
    """A record that cannot be read or decoded, whoever tries: its text says which, where it lies and what is wrong.

    Only for what follows from the data alone. A disk that fails or memory that runs out is another matter: another
    worker would have read the sample. `traceback` is of the `decode` that raised, if one did.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        self.message = message
        self.traceback = traceback
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.traceback)
