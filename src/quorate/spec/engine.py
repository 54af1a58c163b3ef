"""The engine that needs no option."""

from typing import Literal

from quorate.spec.kinds import EngineSection


class LocalSpec(EngineSection):
    """All processes run on this machine."""

    kind: Literal["local"] = "local"
