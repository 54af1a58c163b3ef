"""Ciphers for the tests of checkpoints, which are left out where encryption, an option, is not there."""

from importlib.util import find_spec
from typing import Any

import pytest

CAN_ENCRYPT = find_spec("quorate.encryption") is not None
KEY = bytes(range(32))


def cipher(key: bytes = KEY) -> Any:
    """A cipher with this key; a test that asks for one is skipped without encryption."""
    return pytest.importorskip("quorate.encryption.cipher").Cipher(key)
