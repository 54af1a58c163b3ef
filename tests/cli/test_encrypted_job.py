"""A job that encrypts, by the real command: to the same bits, its owner's commands as ever, its secrets nowhere."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from command import Workplace


@pytest.mark.usefixtures("unmeasured")
def test_an_encrypted_job_comes_to_the_same_bits_and_writes_no_secret_down(
    workplace: Workplace, undisturbed: str
) -> None:
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", "--set", "encrypt=true", HOLD="1")
    running.await_event("generation")
    address = workplace.last / "coordinator.json"
    assert address.stat().st_mode & 0o777 == 0o600
    told = json.loads(address.read_text())
    assert (told.keys(), told["door"].keys()) == ({"address", "token", "door"}, {"address", "authority"})
    secrets = (told["token"].encode(), b"PRIVATE KEY")
    assert len(workplace.workers()) == 2
    for pid in workplace.pids():
        with suppress(FileNotFoundError, ProcessLookupError):  # one that is gone by now
            public = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert not any(secret in public for secret in secrets), f"a secret of the job is shown by process {pid}"
    resized = workplace.start("resize", "last", "--workers", "1").done()
    assert resized.code == 0, resized.stderr
    workplace.go()
    done = running.done()
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    assert "over TLS" in workplace.log("worker-0")
    for file in [file for file in workplace.last.rglob("*") if file.is_file()]:
        assert not any(secret in file.read_bytes() for secret in secrets), f"a secret of the job is in {file}"
