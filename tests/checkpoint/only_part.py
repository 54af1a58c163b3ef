"""The files of a checkpoint that was saved at once."""

from pathlib import Path


def part_of(checkpoint: Path) -> Path:
    """Its only part, whose name tells its digest."""
    (part,) = checkpoint.glob("*.safetensors")
    return part
