"""The report of a sweep while it runs: a server in a process of its own, which neither slows the sweep nor outlives it."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

_SERVE = "import sys; from analysis.report import serve_until_stdin_closes; serve_until_stdin_closes(sys.argv[1])"
_ENDING_S = 5.0


@contextmanager
def served_report(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serves the folder's report on 127.0.0.1 while the block runs.

    The server ends when its stdin closes, so also when this process is killed. It has a session of its own: Ctrl-C, which lets
    the trial in flight finish, does not end it.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    politely = ["nice", "-n", "10"] if shutil.which("nice") else []
    server = subprocess.Popen(
        [*politely, sys.executable, "-P", "-c", _SERVE, str(folder.absolute())],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    stdin, stdout = server.stdin, server.stdout
    assert stdin is not None
    assert stdout is not None
    ended = threading.Event()

    def announce() -> None:
        url = stdout.readline().strip()
        if url or not ended.is_set():  # a short sweep may end before its server is up
            say(_where(url))

    first_line = threading.Thread(target=announce, name="served-report", daemon=True)
    first_line.start()
    try:
        yield
    finally:
        ended.set()
        with suppress(OSError):
            stdin.close()
        try:
            server.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        first_line.join(_ENDING_S)
        stdout.close()


def _where(url: str) -> str:
    """Where the report is served; an empty address stands for a server that did not start."""
    if not url:
        return "the report is not served, because its server did not start; compile-sweep report DIR --watch says why"
    port = urlsplit(url).port
    return f"report: {url} (from another machine: ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()})"
