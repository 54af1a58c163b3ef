"""A real coordinator, served by a thread of the test's own process."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.coordinator.__main__ import open_server
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.membership import start
from quorate.coordinator.service import CoordinatorService
from quorate.coordinator.states import JobSettings
from quorate.core.timing import Timing
from quorate.observe.jsonl import JsonlSink

TOKEN = "a-token-of-this-test"


@dataclass(frozen=True)
class Served:
    """Where it listens, and what it wrote down."""

    address: str
    events_file: Path
    stop: Callable[[], object] = lambda: None

    def events(self) -> list[dict[str, Any]]:
        if not self.events_file.exists():
            return []
        return [json.loads(line) for line in self.events_file.read_text().splitlines()]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events()]


@contextlib.contextmanager
def serve(
    folder: Path, *, workers: int, lanes: int = 4, failure_timeout: float = 60.0, incarnation: int = 1, port: int = 0
) -> Iterator[Served]:
    """Serve a coordinator for the length of a block."""
    settings = JobSettings(incarnation, lanes, workers, Timing(failure_timeout))
    events_file = folder / "events.jsonl"
    ready: list[tuple[str, Callable[[], object]]] = []
    started = threading.Event()

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        event_log = EventLog(JsonlSink(events_file))
        service = CoordinatorService(settings, event_log, start(settings, time.monotonic()))
        server, address = open_server(service, TOKEN, "127.0.0.1", port)
        await server.start()
        time_keeping = asyncio.create_task(service.keep_time())
        ready.append((address, lambda: loop.call_soon_threadsafe(stop.set)))
        started.set()
        await stop.wait()
        time_keeping.cancel()
        await server.stop(0)
        event_log.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(60)
    ((address, stop_serving),) = ready
    try:
        yield Served(address, events_file, stop_serving)
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is closed: the test has stopped it
            stop_serving()
        thread.join(60)
        assert not thread.is_alive()
