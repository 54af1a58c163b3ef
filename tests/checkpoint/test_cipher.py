import pickle
import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.core.errors import CheckpointError
from quorate.core.installation import install_of
from quorate.encryption.cipher import CHUNK, HEADER, TAG, Cipher

KEY = bytes(range(32))
CIPHER = Cipher(KEY)
SEALED_CHUNK = CHUNK + TAG


def sealed(*chunks: bytes, context: bytes = b"") -> bytes:
    return b"".join(CIPHER.seal(chunks, context))


class TestThereAndBack:
    @pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5])
    def test_whatever_the_size(self, size: int) -> None:
        content = (bytes(range(251)) * (size // 251 + 1))[:size]
        assert CIPHER.open(sealed(content)) == content

    @given(cuts=st.lists(st.integers(0, 3 * CHUNK), max_size=5))
    @settings(max_examples=20, deadline=None)
    def test_however_it_is_cut(self, cuts: list[int]) -> None:
        content = bytes(3 * CHUNK)
        places = [0, *sorted(cuts), len(content)]
        assert CIPHER.open(sealed(*(content[start:end] for start, end in pairwise(places)))) == content

    def test_buffers_of_other_items(self) -> None:
        doubles = memoryview(bytes(range(80))).cast("d")
        assert CIPHER.open(sealed(doubles, b"", memoryview(b""))) == bytes(range(80))  # type: ignore[arg-type]

    def test_the_same_content_is_never_sealed_the_same(self) -> None:
        first, second = sealed(b"weights"), sealed(b"weights")
        assert first != second
        assert b"weights" not in first
        assert len(first) == HEADER + len(b"weights") + TAG


THREE_CHUNKS = sealed(bytes(CHUNK), b"\1" * CHUNK, b"\2" * 100)


def chunk(content: bytes, number: int) -> bytes:
    return content[HEADER + number * SEALED_CHUNK :][:SEALED_CHUNK]


class TestTampering:
    @given(at=st.integers(0, len(THREE_CHUNKS) - 1), bit=st.integers(0, 7))
    @settings(max_examples=100, deadline=None)
    def test_any_flipped_bit_is_found(self, at: int, bit: int) -> None:
        changed = bytearray(THREE_CHUNKS)
        changed[at] ^= 1 << bit
        with pytest.raises(CheckpointError):
            CIPHER.open(changed)

    @pytest.mark.parametrize(
        ("kept", "words"),
        [
            (0, "cut short: it has 0 bytes"),
            (HEADER + TAG - 1, "cut short"),
            (HEADER + SEALED_CHUNK, "cut short: chunk 1 is not its last"),
            (HEADER + 2 * SEALED_CHUNK, "cut short: chunk 2 is not its last"),
            (HEADER + 2 * SEALED_CHUNK + 3, "cut short: 3 bytes are less than a chunk"),
            (len(THREE_CHUNKS) - 1, "chunk 3 of 3 .* not authentic"),
        ],
    )
    def test_cut_short(self, kept: int, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            CIPHER.open(THREE_CHUNKS[:kept])

    @pytest.mark.parametrize("more", [b"\0", bytes(TAG), bytes(SEALED_CHUNK)])
    def test_made_longer(self, more: bytes) -> None:
        with pytest.raises(CheckpointError, match="not authentic"):
            CIPHER.open(THREE_CHUNKS + more)

    def test_chunks_in_another_order(self) -> None:
        head, first, second, third = THREE_CHUNKS[:HEADER], *(chunk(THREE_CHUNKS, number) for number in range(3))
        for order in ((second, first, third), (first, third), (second, third), (first, first, third)):
            with pytest.raises(CheckpointError, match="not authentic"):
                CIPHER.open(head + b"".join(order))

    def test_a_chunk_of_another_content_under_the_same_key(self) -> None:
        other = sealed(bytes(CHUNK), b"\1" * CHUNK, b"\2" * 100)
        mixed = THREE_CHUNKS[: HEADER + SEALED_CHUNK] + other[HEADER + SEALED_CHUNK :]
        with pytest.raises(CheckpointError, match=r"chunk 2 of 3 .* taken from another file"):
            CIPHER.open(mixed)
        with pytest.raises(CheckpointError, match="chunk 1 of 3"):
            CIPHER.open(other[:HEADER] + THREE_CHUNKS[HEADER:])

    def test_another_context(self) -> None:
        content = sealed(b"skeleton", context=b"step 1")
        assert bytes(CIPHER.open(content, b"step 1")) == b"skeleton"
        for context in (b"step 2", b""):
            with pytest.raises(CheckpointError, match="not authentic"):
                CIPHER.open(content, context)

    def test_something_else_altogether(self) -> None:
        with pytest.raises(CheckpointError, match="not encrypted as Quorate does it"):
            CIPHER.open(bytes(1000))


class TestTheKey:
    def test_another_key_is_told_by_its_id(self) -> None:
        other = Cipher(bytes(32))
        with pytest.raises(CheckpointError, match=rf"with key {CIPHER.key_id} and the key given is {other.key_id}"):
            other.open(sealed(b"weights"))

    def test_an_id_that_lies_does_not_help(self) -> None:
        other = Cipher(bytes(32))
        content = bytearray(sealed(b"weights"))
        content[8:16] = bytes.fromhex(other.key_id)
        with pytest.raises(CheckpointError, match="not authentic"):
            other.open(content)

    @pytest.mark.parametrize("size", [0, 16, 31, 33])
    def test_of_a_wrong_length_is_refused(self, size: int) -> None:
        with pytest.raises(CheckpointError, match=rf"32 bytes and this one has {size}$"):
            Cipher(b"s" * size)

    def test_is_never_shown(self) -> None:
        assert repr(CIPHER) == f"Cipher(key {CIPHER.key_id})"
        assert KEY.hex() not in repr(CIPHER.label)
        assert CIPHER.key_id not in KEY.hex()
        with pytest.raises(TypeError, match="never written anywhere"):
            pickle.dumps(CIPHER)


def test_without_the_library_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(CheckpointError, match=re.escape(install_of("encryption"))):
        Cipher(KEY)
