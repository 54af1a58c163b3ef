"""A local HTTP server that takes webhooks, and answers as it is told."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Answers with these codes, one after the other."""

    daemon_threads = True

    def __init__(self, codes: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.codes = codes
        self.bodies: list[Any] = []
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/a-secret-path"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.codes.pop(0))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...
