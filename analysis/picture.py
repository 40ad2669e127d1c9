"""`python -m analysis.picture DIR OUT.png`: the front of the sweep in DIR as a picture, drawn by headless Chromium."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from analysis.figures import pareto_figure, pareto_info
from analysis.figures.chart_style import HEIGHT_PX, WIDTH_PX
from analysis.load import SweepInfo, load, load_sweep
from orchestrator.errors import SweepFolderError
from workloads.errors import CompileSweepError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=2",
    "--virtual-time-budget=5000",
)
_DEADLINE_S = 120


class PictureError(CompileSweepError):
    """No picture could be drawn."""


def write_picture(folder: str | Path, path: str | Path) -> Path:
    """Draws the front as a PNG of twice 1200 by 700 pixels, and returns its path.

    Raises:
        RecordsError: the folder holds no sweep that can be read.
        PictureError: there is no Chromium, or it drew nothing.
        SweepFolderError: the picture cannot be written there.
    """
    _browser()  # before anything is read
    return draw(pareto_figure(pareto_info(load(folder)), title=picture_title(load_sweep(folder))), Path(path))


def draw(chart: go.Figure, path: Path) -> Path:
    """Draws any chart as a PNG of twice 1200 by 700 pixels, and returns its path.

    Raises:
        PictureError: there is no Chromium, or it drew nothing.
        SweepFolderError: the picture cannot be written there.
    """
    browser = _browser()
    with tempfile.TemporaryDirectory(prefix="picture-") as scratch:
        page, picture = Path(scratch, "chart.html"), Path(scratch, "chart.png")
        body = chart.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False})
        page.write_text(f'<!doctype html><meta charset="utf-8"><style>body{{margin:0}}</style>{body}', encoding="utf-8")
        _screenshot(browser, page, picture)
        try:
            shutil.copyfile(picture, path)
        except OSError as error:
            raise SweepFolderError(f"{path} cannot be written ({error.strerror}); give a folder that exists") from None
    return path


def picture_title(sweep: SweepInfo) -> str:
    """What was measured on what, as far as `sweep.json` says."""
    where = [str(sweep.environment["gpu"])] if sweep.environment.get("gpu") else []
    where += [f"torch {sweep.environment['torch']}"] if sweep.environment.get("torch") else []
    return " · ".join(filter(None, [sweep.what, *where])) or "sweep"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 where no picture could be drawn."""
    parser = argparse.ArgumentParser(prog="python -m analysis.picture", description="Draws the front of a sweep as a PNG.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder a sweep wrote")
    parser.add_argument("path", metavar="OUT.png", type=Path, help="the picture to write")
    options = parser.parse_args(arguments)
    try:
        print(write_picture(options.folder, options.path))
    except CompileSweepError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _browser() -> str:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise PictureError("no Chromium is installed to draw the picture; install it with `apt-get install chromium`")
    return found


def _screenshot(browser: str, page: Path, picture: Path) -> None:
    command = [
        browser,
        *_FLAGS,
        f"--window-size={WIDTH_PX},{HEIGHT_PX}",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_DEADLINE_S)
    except (subprocess.SubprocessError, OSError) as error:
        raise PictureError(f"{browser} drew no picture ({type(error).__name__}); run it by hand to see why") from None
    if not picture.is_file():
        raise PictureError(f"{browser} ended without a picture; run it by hand to see why")


if __name__ == "__main__":
    sys.exit(main())
