"""Values as JSON can hold them."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for, NaN and the infinities, in mappings and lists too."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
