"""A real S3 server on this machine (SeaweedFS), and a relay through which every request takes longer."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from quorate.core.processes import die_with_parent

BUCKET = "bench"
PATIENCE = 60.0
GLANCE = 0.2
_KEY, _SECRET = "bench", "nothing-worth-hiding"
_PORTS = ("master", "volume", "filer", "s3")
_PIECE = 1 << 18


@contextlib.contextmanager
def running_store(folder: Path, program: str) -> Iterator[int]:
    """The port of a store that keeps what it has in a folder, as long as this lasts."""
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    identity = {
        "name": "bench",
        "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    settings = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.config": folder / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        # In its folder; by itself it leaves them, and its logs, among the temporary files of the machine.
        "filer.localSocket": "filer.sock",
        "s3.localSocket": "s3.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "volume.max": 50,
        **{f"{name}.port": pair[0] for name, pair in ports.items()},
        **{f"{name}.port.grpc": pair[1] for name, pair in ports.items()},
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"-logdir={folder}",
                "server",
                "-filer",
                "-s3",
                *(f"-{name}={value}" for name, value in settings.items()),
            ],
            stdout=log,
            stderr=log,
            cwd=folder,
            preexec_fn=die_with_parent,
        )
    try:
        _await_answer(process, ports["s3"][0], folder / "log")
        yield ports["s3"][0]
    finally:
        process.kill()
        process.wait()
        for name, (_, port) in ports.items():  # which it puts there whatever it is told
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)


def environment_of_client(port: int) -> dict[str, str]:
    """For a process that is to use the store at this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Relay(threading.Thread):
    """A port that passes everything on to another: what is asked for later, what is answered at once.

    So every request takes longer, as to a store that is far away, and none is slower for being large.
    """

    def __init__(self, target: int, delay: float) -> None:
        super().__init__(name="relay", daemon=True)
        self._target = target
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.passed = 0
        """Bytes that were answered."""

    def run(self) -> None:
        """Serve until the process ends."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._join, sock=self._listener)
        async with server:
            await server.serve_forever()

    async def _join(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        answering = asyncio.create_task(self._answer(server, to_client))
        with contextlib.suppress(OSError):
            await self._ask(client, to_server)
        with contextlib.suppress(OSError):
            await answering
        for writer in (to_client, to_server):
            writer.close()

    async def _ask(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        loop, due = asyncio.get_running_loop(), 0.0
        while piece := await client.read(_PIECE):
            # Never two at the same moment: a heap does not keep their order.
            due = max(loop.time() + self._delay, due + 1e-6)
            loop.call_at(due, to_server.write, piece)
        await asyncio.sleep(self._delay)
        to_server.write_eof()

    async def _answer(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while piece := await server.read(_PIECE):
            self.passed += len(piece)
            to_client.write(piece)
            await to_client.drain()


def _await_answer(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    import s3fs

    over = time.monotonic() + PATIENCE
    while True:
        if process.poll() is not None or time.monotonic() > over:
            raise SystemExit(f"the store does not answer: {log.read_text(errors='replace')[-500:]}")
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2):
                pass
            os.environ.update(environment_of_client(port))
            files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
            files.mkdir(BUCKET)
            files.pipe_file(f"{BUCKET}/probe", b"x")
            return
        time.sleep(GLANCE)


def _free_ports(count: int) -> list[tuple[int, int]]:
    """Pairs of ports, held all at once so that no two are the same."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 * count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    return list(zip(ports[::2], ports[1::2], strict=True))
