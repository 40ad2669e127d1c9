"""The report that follows its sweep: on this machine only, renewed with every record, with logs and nothing else."""

from __future__ import annotations

import html
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from report_browser import PATIENCE_MS
from sweep_folders import MakeSweep, trial

from analysis import load, report
from analysis.page import server as server_module
from analysis.page.server import LivePage, ReportServer
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import append

sync_api = pytest.importorskip("playwright.sync_api")


class Answer(NamedTuple):
    status: int
    words: str
    kind: str


@contextmanager
def serving(folder: Path) -> Iterator[ReportServer]:
    with ReportServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: ReportServer, path: str, *, host: str | None = None, method: str = "GET") -> Answer:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return Answer(response.status, response.read().decode(), response.headers["Content-Type"])
    finally:
        connection.close()


@pytest.fixture
def small_page(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serves the settings of a sweep, read from its folder, in place of the report, which takes seconds to draw.

    Returns:
        The version of each page that was asked for, also of those that could not be made.
    """
    versions: list[str] = []

    def page(folder: Path, *, version: str) -> str:
        versions.append(version)
        settings = html.escape(" ".join(load(folder)["settings_label"]))
        return f'<html data-version="{version}"><span id="live" role="status">watching</span>{settings}</html>'

    monkeypatch.setattr(server_module, "report_page", page)
    return versions


@pytest.mark.slow
def test_it_serves_the_report_on_this_machine_only(make_sweep: MakeSweep) -> None:
    with serving(make_sweep()) as server:
        assert server.server_address[0] == "127.0.0.1"
        page = get(server, "/")
        assert (page.status, page.kind) == (200, "text/html; charset=utf-8")
        assert "Verdict" in page.words
        assert get(server, "/", method="HEAD").words == ""
        assert get(server, "/trials.jsonl").status == 404


@pytest.mark.slow
@pytest.mark.usefixtures("small_page")
def test_a_client_that_ends_no_request_is_closed_soon(make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    with serving(make_sweep()) as server, socket.create_connection(server.server_address[:2], timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert client.recv(1) == b""
        assert get(server, "/version").status == 200


@pytest.mark.usefixtures("small_page")
def test_a_page_from_elsewhere_cannot_read_it_under_another_name(make_sweep: MakeSweep) -> None:
    with serving(make_sweep()) as server:
        port = server.server_address[1]
        for name in (f"evil.example:{port}", "localhost:80:80", "127.0.0.1:evil.example", "evil.example", "[::1]:80", ""):
            answer = get(server, "/", host=name)
            assert (answer.status, "watching" in answer.words) == (403, False), name
        for name in (f"localhost:{port}", "127.0.0.1", "localhost"):  # on port 80 a browser names no port
            answer = get(server, "/", host=name)
            assert (answer.status, "watching" in answer.words) == (200, True), name


@pytest.mark.usefixtures("small_page")
def test_the_version_and_the_page_change_with_a_record(make_sweep: MakeSweep) -> None:
    folder = make_sweep()
    with serving(folder) as server:
        before = get(server, "/version").words
        assert f'data-version="{before}"' in get(server, "/").words
        assert get(server, "/version").words == before
        append(folder, trial("scope=full,mode=max-autotune,dynamic=mark", 5000, 1, trial_id="new"))
        after = get(server, "/version").words
        page = get(server, "/").words
        assert after != before
        assert f'data-version="{after}"' in page
        assert "full, max-autotune, mark" in page


@pytest.mark.usefixtures("small_page")
def test_a_record_that_cannot_be_read_leaves_the_page_that_was_and_its_version_and_says_why(make_sweep: MakeSweep) -> None:
    folder = make_sweep()
    with serving(folder) as server:
        before, version = get(server, "/").words, get(server, "/version").words
        damage(folder)
        for _ in range(2):
            told, problem = get(server, "/version").words.split("\n")
            assert told == version
            assert "trials.jsonl line 10" in problem
            note = f'<span id="live" role="status">not up to date: {html.escape(problem)}</span>'
            expected = before.replace('<span id="live" role="status">watching</span>', note)
            assert expected != before
            assert get(server, "/") == Answer(200, expected, "text/html; charset=utf-8")
        damage(folder, undo=True)
        append(folder, trial("scope=full,mode=max-autotune,dynamic=mark", 5000, 1, trial_id="new"))
        after = get(server, "/version").words
        assert after not in (version, "")
        assert "\n" not in after
        page = get(server, "/").words
        assert f'data-version="{after}"' in page
        assert "not up to date" not in page


def test_a_state_that_cannot_be_read_is_not_tried_again_and_again(make_sweep: MakeSweep, small_page: list[str]) -> None:
    folder = make_sweep()
    live = LivePage(folder)
    live.page()
    damage(folder)
    assert len({live.version() for _ in range(3)}) == 1
    live.page()
    assert len(small_page) == 2


def damage(folder: Path, *, undo: bool = False) -> None:
    """Appends half a record as a tenth line, or removes it again."""
    log = folder / "trials.jsonl"
    half = '{"schema_version": 2, "trial_id"\n'
    log.write_text(log.read_text().removesuffix(half) if undo else log.read_text() + half)


@pytest.mark.slow
def test_logs_are_text_and_nothing_outside_them_is_served(make_sweep: MakeSweep) -> None:
    folder = make_sweep([trial("scope=full", status=Status.FAILED, trial_id="a b")])
    (folder / "logs" / "a b").mkdir(parents=True)
    (folder / "logs" / "a b" / "worker-0.log").write_text("<script>alert(1)</script>")
    with serving(folder) as server:
        assert 'href="logs/a%20b/worker-0.log"' in get(server, "/").words
        log = get(server, "/logs/a%20b/worker-0.log")
        assert log == Answer(200, "<script>alert(1)</script>", "text/plain; charset=utf-8")
        assert get(server, "/logs/a%20b/").words == "worker-0.log"
        for path in (
            "/logs/../sweep.json",
            "/logs/%2e%2e/sweep.json",
            "/logs/",
            "/logs/%00",
            "/logs//etc/hostname",
            "/logs/none",
        ):
            assert get(server, path).status == 404, path


@pytest.mark.slow
def test_the_command_says_where_and_ends_when_interrupted(make_sweep: MakeSweep) -> None:
    # A shell makes background processes ignore SIGINT, and their children inherit that.
    interruptible = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = "runpy.run_module('analysis.report', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", interruptible + run, str(make_sweep()), "--watch", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.usefixtures("small_page")
def test_a_folder_or_port_that_cannot_be_served_is_refused(
    make_sweep: MakeSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path / "none"), "--watch"]) == 2
    folder = make_sweep()
    with serving(folder) as server:
        assert report.main([str(folder), "--watch", "--port", str(server.server_address[1])]) == 2
    assert report.main([str(folder), "--watch", "--port", "99999"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "there is no folder" in first
    assert "cannot be served" in second
    assert "port 99999" in third


def test_a_port_without_watching_is_refused(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(make_sweep()), "--port", "0"]) == 2
    assert "--watch" in capsys.readouterr().err


@pytest.mark.browser
def test_an_open_page_says_what_cannot_be_read_and_shows_a_new_trial_with_what_was_chosen(
    browser: sync_api.Browser, make_sweep: MakeSweep
) -> None:
    folder = make_sweep()
    with serving(folder) as server, browser.new_page() as page:
        page.set_default_timeout(PATIENCE_MS)
        loads: list[str] = []
        errors: list[str] = []
        page.on("load", lambda loaded: loads.append(loaded.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        note = page.locator("#live")
        sync_api.expect(note).to_have_text("watching")
        damage(folder)
        sync_api.expect(note).to_contain_text("not up to date: ")
        sync_api.expect(note).to_contain_text("trials.jsonl line 10")
        for _ in range(2):  # two more looks, after which the page is still the one that was opened
            with page.expect_response("**/version"):
                pass
        assert loads == [server.url]
        page.reload()
        sync_api.expect(note).to_contain_text("trials.jsonl line 10")
        page.wait_for_selector("html[data-drawn=all]", state="attached")  # from then on a choice is kept
        page.get_by_text("peak memory", exact=True).first.click()
        page.locator("#filter").fill("dynamic=mark")
        page.locator("#filter").blur()
        damage(folder, undo=True)
        append(folder, trial("scope=full,mode=max-autotune,dynamic=mark", 5000, 1, trial_id="new"))
        sync_api.expect(page.locator("#trials tbody")).to_contain_text("5,000")
        # The rows are in the page before its scripts have run, so wait for what they restore.
        sync_api.expect(page.locator("#filter")).to_have_value("dynamic=mark")
        sync_api.expect(page.get_by_role("radio", name="peak memory")).to_be_checked()
        sync_api.expect(note).to_have_text("watching")
        page.wait_for_load_state()
        assert len(loads) == 3
        assert errors == []
