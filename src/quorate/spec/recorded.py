"""A recorded job at a glance: what stands in the file, unchecked."""

from pathlib import Path
from typing import Any

import yaml

from quorate.core.errors import RunError
from quorate.core.regular_file import read_regular

# Several times as fast as the loader of job files. What `dump_job` has written, every YAML reader reads alike.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 50


def glance_at_recorded(path: Path) -> dict[str, Any]:
    """The keys of the job in a run folder, for a list of many runs; `load_recorded` reads one with care."""
    try:
        content = read_regular(path)
        # Nested too deeply, a damaged file would end the whole process, in the library that reads it.
        values = yaml.load(content, _LOADER) if _is_shallow(content) else None
    except FileNotFoundError:
        raise job_gone(path) from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(f"{path} is not YAML ({reason}); it was edited or damaged after the run wrote it") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} holds no keys; it was edited or damaged after the run wrote it")
    return values


def job_gone(path: Path) -> RunError:
    """What to say of a run whose recorded job is not there: its checkpoints hold it too."""
    return RunError(f"{path} is gone; quorate resume takes the job from the newest checkpoint, and writes it again")


def _is_shallow(content: bytes) -> bool:
    depth = 0
    for event in yaml.parse(content, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            return False
    return True
