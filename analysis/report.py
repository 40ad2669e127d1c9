"""`python -m analysis.report DIR`: the sweep in DIR as one HTML file; with `--watch`, as a page that follows its sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from analysis.command_line import Parser, published, run
from analysis.page.page import report_page
from analysis.page.server import ReportServer
from compile_sweep.schema.errors import SweepFolderError

REPORT_FILE = "report.html"


def write_report(folder: str | Path) -> Path:
    """Writes the folder's `report.html`, whole or not at all, and returns its path.

    Raises:
        RecordsError: `sweep.json` or `trials.jsonl` is missing or not what this version writes.
        SweepFolderError: the report cannot be written there.
    """
    folder = Path(folder)
    page = report_page(folder)
    path = folder / REPORT_FILE
    try:
        with published(path) as unfinished:
            unfinished.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); make the folder writable") from None
    return path


def renew_report(folder: str | Path) -> None:
    """Writes the folder's report again if it has one, so that it links what lies beside it since.

    Raises:
        RecordsError, SweepFolderError: as `write_report`.
    """
    if (Path(folder) / REPORT_FILE).exists():
        write_report(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 for what it cannot work with."""
    return run(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m analysis.report", description="Writes DIR/report.html, or serves it while its sweep runs.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder a sweep wrote")
    parser.add_argument(
        "--watch", action="store_true", help="serve the report on 127.0.0.1, following the sweep, until interrupted"
    )
    parser.add_argument(
        "--port", type=int, default=None, metavar="N", help="where to serve it; 0, the default, is any that is free"
    )
    options = parser.parse_args(arguments)
    if options.port is not None and not options.watch:
        parser.error("--port says where --watch serves; give both, or neither")
    if options.watch:
        _watch(options.folder, options.port or 0)
    else:
        print(write_report(options.folder))
    return 0


def _watch(folder: Path, port: int) -> None:
    """Serves the report until interrupted."""
    with suppress(KeyboardInterrupt), ReportServer(folder, port) as server:
        print(server.url, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
