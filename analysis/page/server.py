"""The report as a page that follows its sweep: served on this machine only, made anew when a record is added.

The server gives the page at `/`, `best.py` and `compare.html` if they lie beside it, the trials' logs under `/logs/`, and at
`/version` that of the page, for which an open one asks every two seconds. While the folder cannot be read, that stays, and the
reason is in a second line and on the page. It answers nothing but GET and HEAD, and only to a browser that knows it as 127.0.0.1
or localhost: a page from elsewhere cannot read it through a name of its own.
"""

from __future__ import annotations

import hashlib
import html
import socket
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from analysis.page.page import LINKED, report_page
from analysis.page.table import read_end
from compile_sweep.schema.errors import CompileSweepError, SweepFolderError
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE

ADDRESS = "127.0.0.1"
NOT_READ = "not up to date: "
"""On the page before the reason why the folder cannot be read, there and in `page.js`."""
_LIVE = '<span id="live" role="status">{}</span>'
"""Of the page, where it says that it follows its sweep."""
_NAMES = ("127.0.0.1", "localhost")
_MOST_LOG_BYTES = 4 * 2**20
"""Of a longer log the end is shown."""

_MOST_CONNECTIONS = 32
"""At once; further ones are closed. A browser opens six."""
_CONNECTION_S = 120.0
"""Seconds that a connection may take as a whole: a client that is slow, or silent, holds a thread no longer."""

_INERT = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy of what was not made here: nothing in it runs, whoever wrote it."""


class LivePage:
    """The page of a folder, made anew when the folder's records have changed. For several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._state = ""
        self._version = ""
        self._page = ""
        self._problem = ""

    def version(self) -> str:
        """The version of `page`; where the folder cannot be read any more, that and, in a second line, why.

        Raises:
            CompileSweepError: it cannot be read, and never could.
        """
        with self._lock:
            self._renew()
            return f"{self._version}\n{self._problem}" if self._problem else self._version

    def page(self) -> str:
        """The page for what the folder holds now; where that cannot be read, the last page that could, with the reason.

        Raises:
            CompileSweepError: it cannot be read, and never could.
        """
        with self._lock:
            self._renew()
            if not self._problem:
                return self._page
            return self._page.replace(_LIVE.format("watching"), _LIVE.format(html.escape(NOT_READ + self._problem)), 1)

    def _renew(self) -> None:
        """Makes the page anew if the folder's state is another; a state that cannot be read is not tried twice."""
        names = (SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE, *LINKED)
        state = _digest(*(_state(self._folder / name) for name in names))
        if state == self._state:
            return
        try:
            self._page, self._version, self._problem = report_page(self._folder, version=state), state, ""
        except CompileSweepError as error:
            if not self._page:
                raise
            self._problem = " ".join(str(error).split())
        self._state = state


class ReportServer(ThreadingHTTPServer):
    """Serves one folder's report on 127.0.0.1.

    Args:
        folder: the sweep's folder.
        port: 0 for any that is free.

    Raises:
        RecordsError: the folder holds no sweep that can be read.
        SweepFolderError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.live = LivePage(folder)
        self.live.page()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SweepFolderError(f"port {port} of {ADDRESS} cannot be served ({reason}); give another, or 0 for any") from None
        self._free = threading.Semaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread of its own, or closes it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection, for as long as it may take."""
        ends = threading.Timer(_CONNECTION_S, _close, (request,))
        ends.daemon = True
        ends.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            ends.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that went away, or was sent away, before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        name, _, port = (self.headers.get("Host") or "").partition(":")  # browsers leave out port 80
        if name not in _NAMES or not (port.isdecimal() or port == ""):
            self._answer(HTTPStatus.FORBIDDEN, "This server answers only to its own address.", "text/plain")
            return
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            self._page()
        elif path == "/version":
            self._answer(HTTPStatus.OK, self.server.live.version(), "text/plain")
        elif path.removeprefix("/") in LINKED:
            self._linked(path.removeprefix("/"))
        elif path.startswith("/logs/"):
            self._log(path)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "There is nothing here.", "text/plain")

    do_HEAD = do_GET

    def log_message(self, format: str, *_: object) -> None:
        """Requests are not worth a line each."""

    def _page(self) -> None:
        try:
            self._answer(HTTPStatus.OK, self.server.live.page(), "text/html")
        except CompileSweepError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"<p>{html.escape(str(error))}</p>", "text/html")

    def _linked(self, name: str) -> None:
        """A file that lies beside the report, if it really does."""
        path = self.server.folder / name
        try:
            if path.resolve().parent == self.server.folder.resolve():
                self._answer(HTTPStatus.OK, path.read_text(encoding="utf-8", errors="replace"), LINKED[name], policy=_INERT)
                return
        except OSError:
            pass
        self._answer(HTTPStatus.NOT_FOUND, "There is nothing here.", "text/plain")

    def _log(self, path: str) -> None:
        """A trial's log as text, or what its folder holds."""
        logs = (self.server.folder / "logs").resolve()
        try:
            wanted = (self.server.folder / path.lstrip("/")).resolve()
            inside = wanted.is_relative_to(logs) and wanted != logs
            if inside and wanted.is_dir():
                self._answer(HTTPStatus.OK, "\n".join(sorted(one.name for one in wanted.iterdir())), "text/plain")
                return
            if inside and wanted.is_file():
                self._answer(HTTPStatus.OK, read_end(wanted, _MOST_LOG_BYTES), "text/plain")
                return
        except (OSError, ValueError):  # gone meanwhile, or no path at all
            pass
        self._answer(HTTPStatus.NOT_FOUND, "There is no such log.", "text/plain")

    def _answer(self, status: HTTPStatus, words: str, kind: str, policy: str = "") -> None:
        content = words.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(content)
            except ConnectionError:  # the browser went on
                self.close_connection = True


def _close(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def _state(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return f"{path.name} missing"
    return f"{path.name} {found.st_size} {found.st_mtime_ns}"


def _digest(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
