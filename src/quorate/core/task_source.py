"""The source of a task as a value: a digest of its code, and how two of them differ."""

import ast
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from quorate.core.cached import cached_property

KIND = "code-1:"
"""What a digest begins with. Earlier ones had no such word, and were of the text."""
MOST_KEPT = 4 << 20
"""Bytes of source that travel and are kept; of more there is a digest only."""
_SHOWN = 20
# With one of these in any of the files, the task may read its docstrings, and they count.
_READS_DOCSTRINGS = (b"__doc__", b"getdoc")


@dataclass(frozen=True)
class TaskSource:
    """A task's own file (`main`) and the files of the project that it imports, by their names below an import root."""

    main: str
    files: Mapping[str, bytes]

    @cached_property
    def digest(self) -> str:
        """Digest of the code: comments, blank lines, formatting and docstrings do not count, nor how `main` is called.

        A renamed task file has the same code, and whoever imported it by its old name would fail.
        """
        digest = hashlib.sha256()
        # In the order of what is hashed: by its real name, a renamed `main` would change places with another file.
        for name in sorted(self.files, key=lambda name: "" if name == self.main else name):
            digest.update(f"{'' if name == self.main else name}\n{self._code(name)}\n".encode())
        return KIND + digest.hexdigest()

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))

    def difference(self, other: "TaskSource", labels: tuple[str, str], most: int = _SHOWN) -> list[str]:
        """A unified diff of the files whose code differs, of so many lines at most; the last says what was left out."""
        lines = list(self._difference(other, labels))
        left_out = len(lines) - most
        return lines if left_out <= 0 else [*lines[:most], f"… and {left_out} more lines"]

    def _difference(self, other: "TaskSource", labels: tuple[str, str]) -> Iterator[str]:
        names = {name: name for name in {**self.files, **other.files}}
        names[self.main] = other.main
        for before, after in sorted(names.items()):
            if before == other.main != self.main or self._code(before) == other._code(after):
                continue
            texts = (_lines(self.files.get(before)), _lines(other.files.get(after)))
            told = (f"{before} ({labels[0]})", f"{after} ({labels[1]})")
            # A blank line would end the message where it is read by a program.
            yield from (line for line in difflib.unified_diff(*texts, *told, lineterm="", n=1) if line.strip())

    def _code(self, name: str) -> str:
        content = self.files.get(name)
        return "" if content is None else _code(content, docstrings=self._reads_docstrings)

    @cached_property
    def _reads_docstrings(self) -> bool:
        return any(word in content for content in self.files.values() for word in _READS_DOCSTRINGS)

    def to_page(self) -> str | None:
        """As JSON, unless it is too much to be sent about and kept."""
        return self.to_json() if self.size <= MOST_KEPT else None

    def to_json(self) -> str:
        """As JSON; a file that is not UTF-8 comes back as it was."""
        files = {name: content.decode(errors="surrogateescape") for name, content in self.files.items()}
        return json.dumps({"main": self.main, "files": files}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "TaskSource":
        """From what `to_json` wrote. Raises ValueError for anything else, such as a name that leads out of a folder."""
        content: Any = json.loads(text)
        try:
            files = {name: text.encode(errors="surrogateescape") for name, text in content["files"].items()}
            main = content["main"]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it has no files: {error}") from None
        check_names(main, list(files))
        return cls(main, files)


def check_names(main: Any, files: Any) -> None:
    """Raise ValueError where one of these is no name of a source's file, such as one that leads out of a folder."""
    for name in (main, *files):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".py" or set("\0\n") & set(name):
            raise ValueError(f"{name!r} is no name of a file in it")
    if main not in files:
        raise ValueError(f"the task's file {main} is not in it")


def _code(content: bytes, *, docstrings: bool) -> str:
    """What Python reads in a file; the text itself where that is not Python, as in a file that is never imported."""
    try:
        return "".join(_spelled(ast.parse(content), docstrings))
    except (SyntaxError, ValueError, RecursionError):
        return content.decode(errors="backslashreplace")


def _spelled(node: Any, docstrings: bool) -> Iterator[str]:
    """Not `ast.dump`, whose text depends on the version of Python: what is absent or empty is left out here."""
    if isinstance(node, list):
        for each in node:
            yield from _spelled(each, docstrings)
            yield ","
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        yield "("
        for name, value in ast.iter_fields(node):
            if name == "body" and not docstrings:
                value = _without_docstring(node)
            if value is None or value == [] or name in ("kind", "type_comment"):
                continue
            yield f"{name}="
            yield from _spelled(value, docstrings)
            yield ";"
        yield ")"
    else:
        yield repr(node)


def _without_docstring(node: Any) -> Any:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
        node, clean=False
    ):
        return node.body[1:]
    return node.body


def _lines(content: bytes | None) -> list[str]:
    return [] if content is None else content.decode(errors="replace").splitlines()
