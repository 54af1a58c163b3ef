"""Options that several verbs share, and how they become overrides of the job file."""

from typing import Annotated

import typer

from quorate.spec.override import Override, parse_set

Workers = Annotated[str | None, typer.Option(help="Processes to run on: a number or auto. Never changes the result.")]
Lanes = Annotated[int | None, typer.Option(help="Slices of every batch: part of what the job means.")]
Steps = Annotated[int | None, typer.Option(help="Train this many steps.")]
Epochs = Annotated[int | None, typer.Option(help="Train this many epochs.")]
Seed = Annotated[int | None, typer.Option(help="The seed of every random stream.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Set any key: --set checkpoint.every=50. Repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on standard output.")]


def overrides(settings: list[str] | None, **flags: str | int | None) -> list[Override]:
    """The layer that the command line puts over the job file; flags go over `--set`."""
    from_flags = [
        Override(key, int(value) if isinstance(value, str) and value.isdigit() else value, f"--{key}")
        for key, value in flags.items()
        if value is not None
    ]
    return [*(parse_set(text) for text in settings or ()), *from_flags]
