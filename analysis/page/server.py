"""The report as a page that follows its sweep: served on this machine only, and renewed when a record is added.

The server provides the page at `/`, `best.py` and `compare.html` if they exist, the trials' logs under `/logs/`, and the page's
version at `/version`, which an open page requests every two seconds. While the folder cannot be read, the version stays, and the
reason is in its second line and on the page. It answers only GET and HEAD, and only requests to 127.0.0.1 or localhost, so that a
page from elsewhere cannot read it through a domain name of its own.
"""

import hashlib
import html
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from analysis.page.page import LINKED, report_page
from analysis.page.table import read_end
from compile_sweep.schema.errors import CompileSweepError, SweepFolderError
from compile_sweep.schema.journal import read_regular
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE
from compile_sweep.schema.redact import redact_text

ADDRESS = "127.0.0.1"
NOT_READ = "not up to date: "  # text before the reason why the folder cannot be read, here and in `page.js`
_LIVE = '<span id="live" role="status">{}</span>'  # text of the page that says that it follows its sweep
_NAMES = ("127.0.0.1", "localhost")
_MOST_LOG_BYTES = 4 * 2**20  # maximum bytes of a log that are shown, from its end
_ANSWERING_S = 120.0  # seconds without progress that an answer may take, such as a page over a slow tunnel

_INERT = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy for content from elsewhere: nothing in it runs."""


class LivePage:
    """The page of a folder, renewed when the folder's records change. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._state = ""
        self._version = ""
        self._page = ""
        self._problem = ""

    def version(self) -> str:
        """Returns the version of `page`, with the reason on a second line if the folder can no longer be read."""
        with self._lock:
            self._renew()
            return f"{self._version}\n{self._problem}" if self._problem else self._version

    def page(self) -> str:
        """Returns the page for the folder's current contents; if they cannot be read, the last readable page with the reason."""
        with self._lock:
            self._renew()
            if not self._problem:
                return self._page
            return self._page.replace(_LIVE.format("watching"), _LIVE.format(html.escape(NOT_READ + self._problem)), 1)

    def _renew(self) -> None:
        """Renders the page again if the folder's state has changed; a state that cannot be read is not tried twice."""
        names = (SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE, *LINKED)
        files = "\n".join(_state(self._folder / name) for name in names)
        state = hashlib.sha256(files.encode()).hexdigest()[:16]
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
    """Serves one folder's report on 127.0.0.1; raises RecordsError or, if the port is not available, SweepFolderError."""

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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnected, or were disconnected, before they had their answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 10.0  # seconds without a byte of the request after which the connection is closed

    def do_GET(self) -> None:
        self.connection.settimeout(_ANSWERING_S)
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
        """Does nothing, because requests are not worth a line each."""

    def _page(self) -> None:
        try:
            self._answer(HTTPStatus.OK, self.server.live.page(), "text/html")
        except CompileSweepError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"<p>{html.escape(str(error))}</p>", "text/html")

    def _linked(self, name: str) -> None:
        """Sends a file next to the report, if it exists."""
        path = self.server.folder / name
        try:
            if path.resolve().parent == self.server.folder.resolve():
                self._answer(HTTPStatus.OK, read_regular(path).decode("utf-8", "replace"), LINKED[name], policy=_INERT)
                return
        except OSError:
            pass
        self._answer(HTTPStatus.NOT_FOUND, "There is nothing here.", "text/plain")

    def _log(self, path: str) -> None:
        """Sends a trial's log as text, or a listing of its folder."""
        logs = (self.server.folder / "logs").resolve()
        try:
            wanted = (self.server.folder / path.lstrip("/")).resolve()
            inside = wanted.is_relative_to(logs) and wanted != logs
            if inside and wanted.is_dir():
                self._answer(HTTPStatus.OK, "\n".join(sorted(one.name for one in wanted.iterdir())), "text/plain")
                return
            if inside and wanted.is_file():
                self._answer(HTTPStatus.OK, redact_text(read_end(wanted, _MOST_LOG_BYTES)), "text/plain")
                return
        except (OSError, ValueError):  # removed in the meantime, or not a valid path
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
            except ConnectionError:  # the browser disconnected
                self.close_connection = True


def _state(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return f"{path.name} missing"
    return f"{path.name} {found.st_size} {found.st_mtime_ns}"
