"""YAML as job files use it: a value is what it looks like, with the line of every key and what is wrong with a text.

Where YAML 1.1 surprises, this reads what people mean: ``1e-3`` is a number, ``no`` and ``2024-01-01`` are text, ``010``
is text and not eight. Aliases are refused (a small text could stand for a huge value), and so is every tag that would
build an object.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from quorate.core.errors import Problem

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"""[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$
       |[-+]?[0-9]+[eE][-+]?[0-9]+$
       |[-+]?\.(?:inf|Inf|INF)$
       |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_FLOAT_BEGINS = list("-+0123456789.")

TEXT_TAG = f"{_TAG}str"
PLAIN_TAGS = frozenset(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


class JobLoader(yaml.SafeLoader):
    """A safe loader whose plain scalars are null, true and false, numbers, or else text."""

    yaml_implicit_resolvers = {}

    def fetch_alias(self) -> None:
        raise yaml.scanner.ScannerError(None, None, "aliases (*name) are not read in a job file", self.get_mark())


class JobDumper(yaml.SafeDumper):
    """Writes what `JobLoader` and other YAML readers read alike: text that one of them misreads is quoted."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape line ends, so that every value stays on the line of its key.
    return dumper.represent_scalar(TEXT_TAG, text, style=None if text.isprintable() else '"')


JobLoader.add_implicit_resolver(f"{_TAG}null", _NULL, ["~", "n", "N", ""])
JobLoader.add_implicit_resolver(f"{_TAG}bool", _BOOL, list("tTfF"))
JobLoader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
JobLoader.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FLOAT_BEGINS)
JobDumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FLOAT_BEGINS)
JobDumper.add_representer(str, _represent_text)


def write_value(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.dump(value, Dumper=JobDumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True)
class Place:
    """Where a key stands, and the comment behind its value."""

    line: int
    comment: str


@dataclass
class Document:
    """A value with the place of each dotted key in it, and everything that is wrong with its text."""

    value: Any = None
    places: dict[str, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str) -> Document:
    """Read a text; never raises for what stands in it, and never builds anything but plain values."""
    document = Document()
    try:
        loader = JobLoader(text)
        node = loader.get_single_node()
        if node is not None:
            document.value = _Builder(loader, text.splitlines(), document).build(node, "")
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error))
    except RecursionError:
        document.problems.append(Problem("file", "it is nested too deeply to be read"))
    return document


@dataclass(frozen=True)
class _Builder:
    """Turns nodes into values and notes what it sees on the way."""

    loader: JobLoader
    lines: list[str]
    document: Document

    def build(self, node: yaml.Node, path: str) -> Any:
        if node.tag not in PLAIN_TAGS:
            tag = node.tag.replace(_TAG, "!!")
            self._complain(path, node, f"the tag {tag} is not read in a job file", "Write a plain value.")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        try:
            return self.loader.construct_object(node)
        except (ValueError, LookupError, yaml.YAMLError) as error:
            self._complain(path, node, f"{str(node.value)[:40]!r} cannot be read: {error}", "")
            return None

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            inner = f"{path}.{key}" if path else key
            line = int(key_node.start_mark.line) + 1
            if key in values:
                text = f"it is given twice, on line {self.document.places[inner].line} and on line {line}"
                self.document.problems.append(Problem(inner, text, "Keep one of them."))
                continue
            self.document.places[inner] = Place(line, self._comment_behind(value_node))
            values[key] = self.build(value_node, inner)
        return values

    def _key(self, node: yaml.Node, path: str) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == TEXT_TAG:
            return str(node.value)
        shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        self._complain(path, node, f"a key must be text, not {shown or 'empty'}", "Write it in quotes if it is text.")
        return None

    def _complain(self, path: str, node: yaml.Node, text: str, hint: str) -> None:
        self.document.problems.append(Problem(path or "file", f"{text} (line {node.start_mark.line + 1})", hint))

    def _comment_behind(self, node: yaml.Node) -> str:
        end = node.end_mark
        rest = self.lines[end.line][end.column :].strip() if end.line < len(self.lines) else ""
        return rest[1:].strip() if rest.startswith("#") else ""


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
    parts = [getattr(error, "problem", None) or str(error).splitlines()[0], getattr(error, "context", None)]
    text = " ".join(part for part in parts if part)
    where = "" if opened is None else f" on line {opened.line + 1}"
    hints = {
        "'\\t'": "YAML is indented with spaces, not with tabs.",
        "mapping values are not allowed": "A key is misplaced here, or a value holds a colon with a space behind it: "
        "then write it in quotes.",
        "parsing a flow": f"A bracket is opened{where} and not closed, or a comma is missing between its values.",
        "quoted scalar": f"A quote is opened{where} and not closed.",
        "could not find expected ':'": f"Write a colon and a blank behind the key{where}, as in `lanes: 2`.",
        "aliases": "Write the value out, or quote text that begins with a star.",
    }
    return Problem(place, text, next((hint for part, hint in hints.items() if part in text), ""))
