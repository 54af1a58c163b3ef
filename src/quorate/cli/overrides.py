"""How options of the command line become overrides of the job file."""

from quorate.spec.override import Override, parse_set


def overrides(settings: list[str] | None, **flags: str | int | None) -> list[Override]:
    """The layer that the command line puts over the job file; flags go over `--set`."""
    from_flags = [Override(key, _read(value), f"--{key}") for key, value in flags.items() if value is not None]
    return [*(parse_set(text) for text in settings or ()), *from_flags]


def _read(value: str | int) -> str | int:
    try:
        return int(value)
    except ValueError:
        return value
