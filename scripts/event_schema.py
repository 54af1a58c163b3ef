"""Writes docs/json/events.schema.json from the classes of events.

::

    python scripts/event_schema.py
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import quorate.observe.seldom_events  # noqa: F401 (it adds its kinds)
from quorate.observe.event import KINDS, VERSION
from quorate.observe.events import FAMILIES, RunFailed, StepCompleted

TARGET = Path(__file__).resolve().parent.parent / "docs" / "json" / "events.schema.json"


def schema() -> dict[str, Any]:
    """The JSON schema of a line of `events.jsonl`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of events.jsonl",
        "description": "Written by scripts/event_schema.py. A kind may get further fields without a new version, and "
        "there may be further kinds. A line without a version was written before there was one, in the same form as "
        "version 1.",
        "type": "object",
        "required": ["kind", "time"],
        "properties": {
            "kind": {"type": "string", "description": "What happened."},
            "version": {"type": "integer", "minimum": 1, "description": f"Of these records; {VERSION} is described."},
            "time": {"type": "number", "description": "When it happened, in seconds since 1970 (UTC)."},
            "step": {"type": "integer", "minimum": 0, "description": "At or after which step, if at any."},
        },
        "allOf": [
            {"if": {"properties": {"kind": {"const": kind}}}, "then": {"$ref": f"#/$defs/{cls.__name__}"}}
            for kind, cls in sorted(KINDS.items())
        ],
        "$defs": dict(sorted(_definitions().items())),
    }


def _definitions() -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    for _, cls in sorted(KINDS.items()):
        made = TypeAdapter(cls).json_schema(ref_template="#/$defs/{model}")
        definitions |= made.pop("$defs", {})
        properties = {name: made["properties"][name] for name in made["properties"] if name not in ("time", "extra")}
        if cls is not StepCompleted:
            del properties["step"]
        definitions[cls.__name__] = {"description": _sentence(cls), "properties": properties}
    _flatten_step(definitions[StepCompleted.__name__])
    failure = definitions.pop("Failure")["properties"]
    cause = {"cause": failure.pop("kind")}
    definitions[RunFailed.__name__]["properties"] = {**failure, **cause}
    untitled: dict[str, Any] = _without_titles(definitions)
    return untitled


def _flatten_step(definition: dict[str, Any]) -> None:
    """A step has `loss`, or `loss.NAME` for each of several optimizers, where the class has `losses` by name."""
    properties = definition["properties"]
    numbers = {family: properties.pop(field)["additionalProperties"] for family, field in FAMILIES.items()}
    definition["required"] = ["step"]
    definition["properties"] = {**numbers, **properties}
    definition["patternProperties"] = {rf"^{family}\.": number for family, number in numbers.items()}


def _sentence(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())


def _without_titles(value: Any) -> Any:
    """Nor defaults: what is left out is not written."""
    if isinstance(value, list):
        return [_without_titles(each) for each in value]
    if not isinstance(value, dict):
        return value
    is_title = {name for name in ("title", "default") if not isinstance(value.get(name), dict)}
    return {name: _without_titles(each) for name, each in value.items() if name not in is_title}


def text() -> str:
    """The content of the file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
