"""A proxy in front of an HTTP server, with the faults of networks and object stores."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SLOW_S = 0.5
"""Seconds that a slow store delays each answer."""


class Fault(StrEnum):
    NONE = "none"
    SLOW = "slow"
    ERROR_500 = "500"
    TRUNCATED = "truncated"
    FLIPPED = "flipped"
    HANGING = "hanging"


class FaultyProxy(ThreadingHTTPServer):
    """Forwards requests to a port on the loopback; contents (paths with /blobs/) or all requests have the fault."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.fault = Fault.NONE
        self.only_blobs = False
        self.requests = 0

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that gave up."""


@contextmanager
def faulty_proxy(upstream: int) -> Iterator[FaultyProxy]:
    server = FaultyProxy(upstream)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _pass_on(self) -> None:
        self.server.requests += 1
        body = self._body()
        fault = self.server.fault if not self.server.only_blobs or "/blobs/" in self.path else Fault.NONE
        match fault:
            case Fault.ERROR_500:
                self._answer(500, [], b"<Error><Code>InternalError</Code><Message>try again</Message></Error>")
                return
            case Fault.SLOW:
                time.sleep(SLOW_S)
            case Fault.HANGING:
                time.sleep(30)
                return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        own = {name: value for name, value in self.headers.items() if name.lower() not in ("transfer-encoding", "content-length")}
        upstream.request(self.command, self.path, body, own)
        response = upstream.getresponse()
        content = response.read()
        headers = [
            item for item in response.getheaders() if item[0].lower() not in ("connection", "content-length", "date", "server")
        ]
        length = int(response.headers.get("Content-Length") or len(content))
        upstream.close()
        if self.command == "GET" and content and fault is Fault.FLIPPED:
            content = bytes([content[0] ^ 1]) + content[1:]
        if self.command == "GET" and content and fault is Fault.TRUNCATED:
            self._answer(response.status, headers, content[: len(content) // 2], length)
            self.close_connection = True
            return
        self._answer(response.status, headers, content, length)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while length := int(self.rfile.readline().partition(b";")[0], 16):
            chunks.append(self.rfile.read(length))
            self.rfile.readline()
        while self.rfile.readline().strip():
            continue
        return b"".join(chunks)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

    def log_message(self, format: str, *arguments: Any) -> None:
        """Does nothing, to keep the test's output clean."""
