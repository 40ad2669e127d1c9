"""`python -m analysis.picture DIR OUT.png`: the front, or another chart, of the sweep in DIR, drawn by headless Chromium."""

import html
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import plotly.graph_objects as go
import tyro

from analysis.command_line import SweepFolder
from analysis.figures import break_even_figure, break_even_info, pareto_figure, pareto_info
from analysis.figures.chart_style import HEIGHT_PX, WIDTH_PX
from analysis.load import SweepInfo, load_for_analysis, load_sweep
from analysis.page.charts import page_charts
from compile_sweep import command_line
from compile_sweep.schema.errors import CompileSweepError, SweepFolderError
from compile_sweep.schema.record import read_warm_starts

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
FRONT = "front"
PROG = "python -m analysis.picture"

_TO_SVG = """
Plotly.toImage('{plot_id}', {format: 'svg', width: null, height: %d}).then((url) => {
  const drawn = document.createElement('pre');
  drawn.id = 'svg';
  drawn.textContent = decodeURIComponent(url.slice(url.indexOf(',') + 1));
  document.body.replaceChildren(drawn);
});
"""
"""Script that leaves the chart in the page as text, for `--dump-dom`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Draw a chart of a sweep's report."""

    folder: SweepFolder
    """The folder a sweep wrote."""
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The picture to write: a PNG, or an SVG if it ends in .svg."""
    chart: str = FRONT
    """Which chart: front, break-even, phases, steps, memory, …"""


class PictureError(CompileSweepError):
    """No picture could be drawn."""


def write_picture(folder: str | Path, path: str | Path, chart: str = FRONT) -> Path:
    """Draws a chart of the sweep's report, and returns the picture's path; see `draw`.

    Args:
        path: Path of the picture; an SVG if it ends in .svg, otherwise a PNG.
        chart: The front, or the ID of a chart of the report.

    Raises:
        RecordsError: The folder has no readable sweep.
        PictureError: The report has no such chart, there is no Chromium, or it drew nothing.
        SweepFolderError: The path is not writable.
    """
    _browser()  # before anything is read
    folder = Path(folder)
    (df, attempts), sweep = load_for_analysis(folder), load_sweep(folder)
    if chart == FRONT:
        return draw(pareto_figure(pareto_info(df), title=picture_title(sweep)), Path(path))
    charts = page_charts(df, attempts, read_warm_starts(folder), sweep)
    drawn = {one.name: go.Figure(one.figure) for one in charts}
    if (jobs := break_even_info(df)).settings:
        drawn["break-even"] = break_even_figure(jobs)
    if chart not in drawn:
        raise PictureError(f"the report on {folder} has no chart {chart!r}; use one of {', '.join([FRONT, *sorted(drawn)])}")
    return draw(drawn[chart], Path(path))


def draw(chart: go.Figure, path: Path) -> Path:
    """Draws any chart in its own size, as SVG for .svg, else as a PNG of twice the size; PictureError if it cannot."""
    browser = _browser()
    height_px = int(chart.layout.height or HEIGHT_PX)
    is_svg = path.suffix.lower() == ".svg"
    with tempfile.TemporaryDirectory(prefix="picture-") as scratch:
        page, picture = Path(scratch, "chart.html"), Path(scratch, "chart.png")
        after = _TO_SVG % height_px if is_svg else None
        body = chart.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False}, post_script=after)
        page.write_text(f'<!doctype html><meta charset="utf-8"><style>body{{margin:0}}</style>{body}', encoding="utf-8")
        if is_svg:
            content = _svg(_run(browser, page, height_px, "--dump-dom")).encode()
        else:
            _run(browser, page, height_px, f"--screenshot={picture}")
            if not picture.is_file():
                raise PictureError(f"{browser} ended without a picture; run it by hand to see why")
            content = picture.read_bytes()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); give a folder that exists") from None
    return path


def picture_title(sweep: SweepInfo) -> str:
    """Says what was measured on which machine, as far as `sweep.json` says."""
    where = [str(sweep.environment["gpu"])] if sweep.environment.get("gpu") else []
    where += [f"torch {sweep.environment['torch']}"] if sweep.environment.get("torch") else []
    return " · ".join(filter(None, [sweep.what, *where])) or "sweep"


def _command(options: Options) -> int:
    print(write_picture(options.folder, options.path, options.chart))
    return 0


def _browser() -> str:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise PictureError("no Chromium is installed to draw the picture; install it with `apt-get install chromium`")
    return found


def _run(browser: str, page: Path, height_px: int, what: str) -> str:
    """Opens the page in the browser without a window; returns the browser's output."""
    command = [browser, *_FLAGS, f"--window-size={WIDTH_PX},{height_px}", f"--user-data-dir={page.parent / 'profile'}", what]
    try:
        done = subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=_DEADLINE_S)
    except (subprocess.SubprocessError, OSError) as error:
        raise PictureError(f"{browser} drew no picture ({type(error).__name__}); run it by hand to see why") from None
    return done.stdout.decode(errors="replace")


def _svg(page: str) -> str:
    found = re.search(r'<pre id="svg">(.*?)</pre>', page, re.DOTALL)
    if found is None:
        raise PictureError("Chromium ended without a picture; run it by hand to see why")
    return html.unescape(found.group(1))


main = command_line.main_of(Options, _command, PROG)

if __name__ == "__main__":
    sys.exit(main())
