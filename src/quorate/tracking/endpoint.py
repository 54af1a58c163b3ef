"""The HTTP server in the launcher that Prometheus and health checks ask: a few pages, nothing but GET."""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from quorate.core.addresses import join_address
from quorate.core.errors import RequestError
from quorate.core.processes import close_in_children

PATIENCE = 5.0
"""Seconds for which one that has connected may say nothing."""

_LOOK_EVERY = 0.2


@dataclass(frozen=True)
class Answer:
    """What a page says."""

    content: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[str], Answer]
"""Gives the answer for an Accept header. One that raises is an error 500, and disturbs nobody else."""


class Endpoint:
    """Serves pages by their paths, from its making until it is closed."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        """Raises RequestError if the address cannot be had: before anything is trained."""
        try:
            self._server = _Server(host, port, pages)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(
                f"track.prometheus: nothing can listen on {join_address(host, port)} ({reason}). Choose another port, "
                "or 0 for any free one."
            ) from None
        close_in_children(self._server.socket)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_EVERY,), name="endpoint", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it can be reached: also from other machines, where it listens for them."""
        host, port = str(self._server.server_address[0]), int(self._server.server_address[1])
        return join_address(_own_address(self._server.address_family) if host in ("0.0.0.0", "::") else host, port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)


def _own_address(family: int) -> str:
    """The address of this machine from which it would speak to others; its name where it knows no way to them."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as nobody:
        # An address for documentation, and nothing is sent: only the way there is looked up.
        nobody.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))
        return str(nobody.getsockname()[0])
    return socket.gethostname()


class _Server(ThreadingHTTPServer):
    """With a thread for each request: one that is slow to ask holds up neither others nor the end of the job."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Without asking for the name of the host, as HTTPServer does: nobody needs it, and it may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Somebody has hung up, or says nothing: nobody has to know."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE
    server_version = "quorate"
    sys_version = ""

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            pages = ", ".join(self.server.pages)
            answer = Answer(f"there is no such page; there are {pages}\n".encode(), 404)
        else:
            try:
                answer = page(self.headers.get("Accept", ""))
            except Exception as error:
                answer = Answer(f"{error!r}\n".encode(), 500)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Not to the terminal, where a progress bar is."""
