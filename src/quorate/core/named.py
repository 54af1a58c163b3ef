"""What is named by its module, and imported only where it is used."""

from importlib import import_module
from typing import Any


def named_object(name: str) -> Any:
    """What `package.module:name` names, which is imported now."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
