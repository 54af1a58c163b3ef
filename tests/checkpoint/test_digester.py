import hashlib

import pytest
import xxhash

from quorate.checkpoint.part_file import DIGESTS, _new_digester
from quorate.core.errors import CheckpointError


@pytest.mark.parametrize("name", DIGESTS)
def test_pieces_have_the_digest_of_the_whole(name: str) -> None:
    whole, pieces = _new_digester(name), _new_digester(name)
    whole.update(b"0123456789")
    for piece in (b"012", bytearray(b"3456"), memoryview(b"789")):
        pieces.update(piece)
    assert whole.hexdigest() == pieces.hexdigest() != _new_digester(name).hexdigest()


def test_the_names_are_kept() -> None:
    assert _new_digester("xxh3-128").hexdigest() == xxhash.xxh3_128().hexdigest()
    assert _new_digester("sha-256").hexdigest() == hashlib.sha256().hexdigest()


def test_an_unknown_one_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(CheckpointError, match=r"'md5' is unknown.*xxh3-128 and sha-256"):
        _new_digester("md5")
