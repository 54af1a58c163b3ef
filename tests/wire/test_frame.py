import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.errors import FrameError
from quorate.core.generation import GenerationId
from quorate.wire.link import HEADER_SIZE, MAGIC, Tag, decode_header, encode_header

TAG = Tag(GenerationId(1, 2), 3, 4, 5)
NUMBERS = st.integers(0, 2**64 - 1)


@given(
    tag=st.builds(
        Tag,
        generation=st.builds(GenerationId, NUMBERS, NUMBERS),
        step=NUMBERS,
        channel=st.integers(0, 2**16 - 1),
        index=NUMBERS,
    ),
    length=NUMBERS,
    checksum=NUMBERS,
)
def test_a_header_says_what_was_put_into_it(tag: Tag, length: int, checksum: int) -> None:
    header = encode_header(tag, length, checksum)
    assert len(header) == HEADER_SIZE
    assert decode_header(header, "worker 1") == (tag, length, checksum)


@given(st.integers(0, HEADER_SIZE * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    header = bytearray(encode_header(TAG, 6))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError, match="worker 1"):
        decode_header(header, "worker 1")


def test_a_damaged_header_is_told_with_both_checksums() -> None:
    header = bytearray(encode_header(TAG, 6))
    header[20] ^= 1
    with pytest.raises(FrameError) as error:
        decode_header(header, "worker 1")
    assert len(set(re.findall("0x[0-9a-f]{16}", str(error.value)))) == 2


def test_what_is_not_a_frame_is_told_with_both_beginnings() -> None:
    with pytest.raises(FrameError, match=re.escape(f"{b'HTTP'!r} where a frame begins with {MAGIC!r}")):
        decode_header(b"HTTP" + bytes(HEADER_SIZE - 4), "worker 1")
