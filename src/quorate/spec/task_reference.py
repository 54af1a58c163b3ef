"""Where a task's class is: ``file.py:Class`` or ``package.module:Class``."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class TaskReference:
    """A class in a Python file or in an importable module; exactly one of `file` and `module` is set."""

    class_name: str
    file: Path | None = None
    module: str | None = None

    @classmethod
    def parse(cls, text: str) -> "TaskReference":
        """The reference that a text spells. Raises ValueError that says what to write instead."""
        location, colon, class_name = text.rpartition(":")
        if not colon:
            raise ValueError(f"Name the class after a colon: {text or 'task.py'}:MyTask.")
        if not class_name.isidentifier():
            raise ValueError(f"After the colon stands the name of a class, not {class_name!r}.")
        if location.endswith(".py"):
            return cls(class_name, file=Path(location))
        if "/" in location:
            raise ValueError(f"A file's name ends in .py: {location}.py:{class_name}.")
        if not all(part.isidentifier() for part in location.split(".")):
            raise ValueError(f"Before the colon stands a file or a module, not {location!r}.")
        return cls(class_name, module=location)

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.class_name}"

    def within(self, folder: Path) -> "TaskReference":
        """The same reference with its file made absolute: workers do not stand where the command was typed."""
        if self.file is None:
            return self
        return replace(self, file=(folder / self.file.expanduser()).resolve())
