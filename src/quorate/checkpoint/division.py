"""Which writer stores which tensors of a checkpoint."""

from collections.abc import Mapping


def divide(sizes: Mapping[str, int], writers: int) -> tuple[tuple[str, ...], ...]:
    """The names in each part, of about equal size: the largest tensor that is left goes to whoever has least.

    All writers come to the same. There are fewer parts than writers where there are fewer tensors, and one at least.
    """
    parts: list[list[str]] = [[] for _ in range(max(1, min(writers, len(sizes))))]
    loads = [0] * len(parts)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        # By how many as well: tensors without elements must not leave a part empty.
        least = min(range(len(parts)), key=lambda part: (loads[part], len(parts[part]), part))
        parts[least].append(name)
        loads[least] += sizes[name]
    return tuple(tuple(part) for part in parts)
