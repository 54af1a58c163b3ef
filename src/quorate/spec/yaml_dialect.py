"""YAML as job files use it: a value is what it looks like.

Where YAML 1.1 surprises, this reads what people mean: ``1e-3`` is a number, ``no`` and ``2024-01-01`` are text, ``010``
is text and not eight. Aliases are refused (a small text could stand for a huge value), and so is every tag that would
build an object.
"""

import re
from typing import Any

import yaml

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

    yaml_implicit_resolvers = {}  # noqa: RUF012 (yaml reads it from the class)

    def fetch_alias(self) -> None:
        """Refuse an alias where it stands."""
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
