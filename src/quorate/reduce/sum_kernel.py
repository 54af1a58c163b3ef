"""A Triton kernel that adds any number of flat tensors. Imported only where there is Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_all(  # type: ignore[no-untyped-def]
    addresses,
    out,
    size,
    terms: tl.constexpr,
    is_narrow: tl.constexpr,
    block: tl.constexpr,
):
    """`addresses` has those of the terms, which are of the type of `out`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    first = tl.load(addresses).to(out.dtype)
    total = tl.load(first + at, mask=inside)
    for term in tl.static_range(1, terms):
        other = tl.load(addresses + term).to(out.dtype)
        value = tl.load(other + at, mask=inside)
        if is_narrow:  # noqa: SIM108 (decided when it is compiled)
            # As torch adds them: in float32, and rounded at once.
            total = (total.to(tl.float32) + value.to(tl.float32)).to(out.dtype.element_ty)
        else:
            total = total + value
    tl.store(out + at, total, mask=inside)
