"""The page while runs go on: served to this machine, with the newest numbers whenever the page asks."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..errors import FedflatError
from .content import Content
from .page import embedded, make_page, plotly_script

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class ReportServer(ThreadingHTTPServer):
    """Serves the page at `/` and its data at `/data.json`, and nothing else."""

    daemon_threads = True

    def __init__(self, content: Content, host: str, port: int, every: float) -> None:
        self.host, self.every = host, every
        self._content, self._library = content, plotly_script()
        self._reading = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (
            OSError,
            OverflowError,
            UnicodeError,
            TypeError,
        ) as problem:  # the last two: letters that no host has
            odd = "this is no name of a host" if isinstance(problem, UnicodeError | TypeError) else problem
            reason = getattr(problem, "strerror", None) or odd
            shown = host if host.isprintable() else repr(host)
            raise FedflatError(
                f"Nothing can be served at {shown}, port {port}: {reason}. Choose another --port; 0 is a free one."
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Without asking for this machine's name, which takes long where there is no network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def content(self) -> dict[str, Any]:
        """What there is now; one request at a time reads the runs."""
        with self._reading:
            return self._content.page()

    def page(self) -> bytes:
        """The page with what there is now."""
        return make_page(self.content(), self._library, self.every).encode()

    def data(self) -> bytes:
        """What there is now."""
        return embedded(self.content()).encode()

    def knows(self, host: str) -> bool:
        """Whether a request is meant for this server: another name could be a page elsewhere that reads along."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.lower() in ("localhost", self.host.lower()) or _is_address(name.strip("[]"))


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "fedflat", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, its data, or a refusal."""
        if not self.server.knows(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"Ask for this page by its address, as it was printed.\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._answer(HTTPStatus.NOT_FOUND, b"There is only the page here.\n")
            return
        try:
            text, kind = (
                (self.server.page(), "text/html") if path == "/" else (self.server.data(), "application/json")
            )
        except FedflatError as problem:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{problem}\n".encode())
            return
        mark = f'"{hashlib.sha256(text).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == mark:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", mark=mark)
        else:
            self._answer(HTTPStatus.OK, text, kind, mark)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, text: bytes, kind: str = "text/plain", mark: str = "") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if mark:
            self.send_header("ETag", mark)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the terminal is for what a person should know."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can ask."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
