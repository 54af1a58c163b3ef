"""Samples as a sentence names them."""

from collections.abc import Sequence

_NAMED = 8


def name_samples(samples: Sequence[int], count: int | None = None) -> str:
    """The first few and how many there are: "samples 17, 530, 12 … (64 in all)"; `count` where not all are known."""
    in_all = len(samples) if count is None else count
    if in_all == 1 and samples:
        return f"sample {samples[0]}"
    if not samples:
        return f"{in_all} samples"
    more = f" … ({in_all} in all)" if in_all > _NAMED or in_all > len(samples) else ""
    return f"samples {', '.join(map(str, samples[:_NAMED]))}{more}"
