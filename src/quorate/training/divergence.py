"""Replicas that should be equal and are not."""

from collections import Counter
from collections.abc import Sequence

from quorate.checkpoint.attempt import Voucher
from quorate.core.digests import first_difference, weights_digest
from quorate.core.errors import DivergedError


def divergence(step: int, vouchers: Sequence[Voucher]) -> DivergedError | None:
    """Names the first tensor in which replicas differ, and who holds which; None if all are equal."""
    brief = [weights_digest(voucher.digests) for voucher in vouchers]
    if len(set(brief)) == 1:
        return None
    usual = Counter(brief).most_common(1)[0][0]
    odd, rest = (
        [voucher for voucher, told in zip(vouchers, brief, strict=True) if (told == usual) is same]
        for same in (False, True)
    )
    name = first_difference(odd[0].digests, rest[0].digests)
    return DivergedError(
        f"The replicas differ after step {step}: {_workers(odd)} and {_workers(rest)} hold different bits, first in "
        f"'{name}'. This state was not saved."
    )


def _workers(vouchers: Sequence[Voucher]) -> str:
    return f"worker{'s' if len(vouchers) > 1 else ''} {', '.join(str(voucher.worker) for voucher in vouchers)}"
