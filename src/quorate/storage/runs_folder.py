"""Where runs are if nobody says otherwise."""

import os
from pathlib import Path

USUAL = Path("runs")
VARIABLE = "QUORATE_RUNS"
"""It sets the key `runs` of every job: what `train` writes there must be found there again."""


def runs_folder(given: str | Path | None = None) -> Path:
    """The folder of runs: the one that is given, that of the variable, or the usual one in the working folder."""
    return USUAL if not (said := given or os.environ.get(VARIABLE)) else Path(said)
