"""A real sweep with planted secrets: none is in anything it writes or prints, and nothing of it listens beyond this host.

It is stopped with Ctrl-C and finished by another runner, since a sweep on Ray takes half a minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from listening import addresses, is_loopback

from analysis.page.server import ReportServer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = "NOTHING_LEAKS"
"""Environment variable that distinguishes this test's processes from others."""

PLANTED = {
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret",
    "AWS_SESSION_TOKEN": "planted-session-token",
    "HF_TOKEN": "hf_planted_token",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
    "COMPILE_SWEEP_CACHE_KEY": "5ec7e75ec7e7" * 8,
}
ADDRESS = "redis://:planted-redis-p%40ssword@127.0.0.1:1"
"""No server is there, which costs a sweep nothing."""

SETTINGS = ("scope=eager,padding=longest,pad_multiple=2", "scope=regional", "scope=eager")
"""The first fails."""

SECRETS = [value.encode() for value in (*PLANTED.values(), "planted-redis-p%40ssword", "planted-redis-p@ssword")]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Contains everything that the sweep's processes store outside its folder; short, because Ray puts sockets there."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as made:
        _take_headers_to(Path(made))
        yield Path(made)


def _take_headers_to(scratch: Path) -> None:
    """Takes the host's precompiled C++ headers, which contain nothing of a sweep, but cost 10 s to compile and to search."""
    from compile_sweep.harness.toolchain import cpp_header_folder, warm_cpp_headers

    warm_cpp_headers()
    known = cpp_header_folder()
    own = scratch / known.parent.name
    own.mkdir()
    (own / known.name).symlink_to(known)


def ours() -> list[int]:
    """Returns this test's processes."""
    mine = str(os.getpid())
    return [one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(RUN) == mine]


def state_of(path: Path) -> tuple[int, int]:
    """Returns when the file was changed, and its size."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def leaks(folder: Path, seen: dict[Path, tuple[int, int]], *, but: str = "?") -> set[str]:
    """Returns files with a secret in their content or name; reads no file that was seen in its present state before."""
    found = set()
    for parent, folders, files in os.walk(folder):  # tolerates files that disappear in the meantime
        for name in (*folders, *files):
            path = Path(parent, name)
            relative = str(path.relative_to(folder))
            content = b""
            try:
                if name in files and path.is_file() and seen.get(path) != (state := state_of(path)):
                    content, seen[path] = path.read_bytes(), state
            except OSError:
                continue
            if not relative.startswith(but) and any(secret in os.fsencode(relative) or secret in content for secret in SECRETS):
                found.add(relative)
    return found


def test_a_sweep_keeps_its_secrets_on_the_loopback_ends_at_ctrl_c_and_goes_on_with_another_runner(
    tmp_path: Path, scratch: Path, repository: Path
) -> None:
    output = tmp_path / "sweep"

    def start(*words: str, to: int | IO[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.sweep", "--output", str(output), "--cache-store", ADDRESS, *words],
            cwd=repository / "tests",
            env={**os.environ, **PLANTED, "PYTHONPATH": str(repository), "TMPDIR": str(scratch), RUN: str(os.getpid())},
            stdout=to,
            stderr=subprocess.STDOUT,
        )

    process = start("--workload", "faulty_workloads:Leaky", "--settings", *SETTINGS, "--starts", "shared", "--no-confirm",
                    "--no-warm-start", to=subprocess.PIPE)  # fmt: skip
    listened: set[str] = set()
    leaked: set[str] = set()
    seen: dict[Path, tuple[int, int]] = {}
    # A search may take as long as a trial.
    interrupt = threading.Thread(target=_interrupt_in_second_trial, args=(process, output))
    interrupt.start()
    try:
        while process.poll() is None:
            listened |= {address for address, _ in addresses(ours())}
            leaked |= leaks(scratch, seen)
            leaked |= leaks(output, seen, but="logs/") if output.exists() else set()  # a trial's log is cleared when it ends
            time.sleep(2)
    finally:
        process.kill()
        printed, _ = process.communicate(timeout=60)
        interrupt.join()
    assert process.returncode == 130, printed.decode()
    assert "Ctrl-C again stops now" in printed.decode()
    assert f"--resume --output {output}" in printed.decode().replace("\n", " ")
    assert listened, "nothing was seen to listen, so this test saw nothing"
    assert [address for address in listened if not is_loopback(address)] == []

    failed, ran = records_of(output)
    assert (failed["label"], "denied" in failed["reason"]) == ("exception", True), failed["reason"]
    assert ran["compile_s"] is not None, ran
    for trial in (failed, ran):
        log = (output / "logs" / trial["trial_id"] / "worker-0.log").read_text()
        assert "'HF_TOKEN': '***'" in log
        assert "caches are not watched" not in log  # the worker did get the full address
    assert (output / "report.html").stat().st_size > 1_000_000
    assert list(scratch.glob("ray-*")) == []

    with Path("/dev/full").open("w") as full:  # where nothing can be printed
        assert start("--resume", "--runner", "local", "--no-confirm", "--no-warm-start", to=full).wait(400) == 0
    assert records_of(output)[:2] == [failed, ran]
    assert [one["status"] for one in records_of(output)] == ["failed", "ok", "ok"]
    assert json.loads((output / "sweep.json").read_text())["config"]["cache"] == "redis://***@127.0.0.1:1"
    assert len(list((output / "logs").iterdir())) == 3
    assert leaked | leaks(output, {}) == set()
    assert not any(secret in printed for secret in SECRETS)

    with ReportServer(output, 0) as server:
        found = [address for address, port in addresses([os.getpid()]) if port == server.server_address[1]]
        assert found == ["127.0.0.1"]


def _interrupt_in_second_trial(process: subprocess.Popen[bytes], output: Path) -> None:
    """Sends Ctrl-C once the second trial writes: it finishes, and the third does not start."""
    while process.poll() is None:
        if len(list(output.glob("logs/*/worker-0.log"))) == 2:
            process.send_signal(signal.SIGINT)
            return
        time.sleep(0.1)


def records_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines()]
