"""The documents that verbs print with `--json`, held against their schemas in docs/json."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "json"


def validate(verb: str, document: Any) -> None:
    """Raise with the place at which a document breaks its verb's schema."""
    json.dumps(document, allow_nan=False)  # NaN passes for a number in any schema, and no other reader knows it
    _validator(verb).validate(document)


@cache
def _validator(verb: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{verb}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, registry=_registry())


def _registry() -> Registry[Any]:
    """The schemas that others refer to, by the names of their files."""
    contents = {file.name: json.loads(file.read_text()) for file in SCHEMAS.glob("*.schema.json")}
    return Registry().with_resources((name, Resource.from_contents(content)) for name, content in contents.items())
