"""`python -m analysis.report DIR`: the sweep in DIR as one HTML file; with `--watch`, as a page that follows its sweep."""

import errno
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from analysis.command_line import SweepFolder
from analysis.page.page import report_page
from analysis.page.server import ReportServer
from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.errors import ConfigError, SweepFolderError
from compile_sweep.schema.journal import written_whole

PROG = "python -m analysis.report"
REPORT_FILE = "report.html"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write DIR/report.html, or serve it while its sweep runs."""

    folder: SweepFolder
    """The folder a sweep wrote."""
    watch: Flag = False
    """Serve the report on 127.0.0.1, following the sweep, until interrupted."""
    port: int | None = None
    """Port to serve it on; by default any free one, like 0."""


def write_report(folder: str | Path) -> Path:
    """Writes the folder's `report.html` atomically and returns its path; raises RecordsError or SweepFolderError."""
    folder = Path(folder)
    page = report_page(folder)
    path = folder / REPORT_FILE
    try:
        with written_whole(path) as unfinished:
            unfinished.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        advice = "make room" if error.errno in _NO_ROOM else "make the folder writable, or see it with --watch"
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); {advice}") from None
    return path


def renew_report(folder: str | Path) -> None:
    """Rewrites the folder's report if it has one, so that it links files added since."""
    if (Path(folder) / REPORT_FILE).exists():
        write_report(folder)


def _command(options: Options) -> int:
    if options.port is not None and not options.watch:
        raise ConfigError("--port is where --watch serves the report; give both, or neither")
    if options.watch:
        _watch(options.folder, options.port or 0)
    else:
        print(write_report(options.folder))
    return 0


def serve_until_stdin_closes(folder: str | Path) -> None:
    """Serves the report on 127.0.0.1 while another process holds this one's stdin open; prints its address."""
    with ReportServer(Path(folder), 0) as server:
        print(server.url, flush=True)
        threading.Thread(target=_shut_down_with_stdin, args=[server], daemon=True).start()
        server.serve_forever()


def _shut_down_with_stdin(server: ReportServer) -> None:
    sys.stdin.read()
    server.shutdown()


def _watch(folder: Path, port: int) -> None:
    with suppress(KeyboardInterrupt), ReportServer(folder, port) as server:
        print(server.url, flush=True)
        server.serve_forever()


main = command_line.main_of(Options, _command, PROG)

if __name__ == "__main__":
    sys.exit(main())
