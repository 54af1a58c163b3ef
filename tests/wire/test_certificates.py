import re
import sys

import pytest

from quorate.core.addresses import LOOPBACK
from quorate.core.errors import RequestError
from quorate.core.generation import GenerationId, server_id
from quorate.core.installation import install_of
from quorate.core.masking import Secrets
from quorate.wire.certificates import Authority, refuse_without_library
from quorate.wire.handshake import COORDINATOR, Credentials
from quorate.worker.assignment import Assignment


def test_processes_have_names_and_jobs_have_authorities() -> None:
    authority = Authority("x" * 200)
    assert [authority.issue(one).name for one in (3, server_id(1), COORDINATOR)] == [
        "worker-3",
        "server-1",
        "coordinator",
    ]
    assert authority.certificate != Authority("x" * 200).certificate


def test_keys_are_never_shown() -> None:
    identity = Authority("digits-0001").issue(2)
    shown = f"{identity!r} {Credentials('token', 2, GenerationId(1, 1), identity)!r} {LOOPBACK!r}"
    assert "PRIVATE KEY" not in shown
    assert not any(line in shown for line in identity.secrets)
    assignment = Assignment("", 2, 4, "task:Task", {}, "", "127.0.0.1:1", "the token", identity=identity)
    assert "PRIVATE KEY" not in repr(assignment)
    secrets = Secrets(assignment.secrets)
    assert secrets.mask("the token") != "the token"
    assert not any(line in secrets.mask(f"key: {line}") for line in identity.secrets)
    # What begins every key is no secret: were it masked, the rest of another key would not be known for one.
    assert secrets.mask("-----BEGIN PRIVATE KEY-----") == "-----BEGIN PRIVATE KEY-----"


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(RequestError, match=re.escape(install_of("encryption"))):
        refuse_without_library()
