"""What every test can rely on: a test with a marker for a missing device or browser is skipped, with the reason."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadGroupScheduling

# OpenMP threads that wait for each other spin, and if there are as many as cores, any other process makes each wait as long
# as the kernel lets that process run. Read when torch is loaded, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Makes Inductor believe /proc/cpuinfo instead of compiling three programs for each empty cache folder, which takes about 5 s of
# CPU time, to find that its compiler knows the CPU's vector instructions. Also read on import.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Otherwise Ray replaces print in a process that has shown a worker's output, and torch breaks graphs elsewhere than at print.
os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")

# Ray's workers have 15 by default, with which they hardly progress next to other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

HAS_GPU_FILES = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
"""Whether there may be a GPU, of NVIDIA's, AMD's or under Windows; if not, what needs one is skipped beside other tests."""

COUNT_AS_ALONE = ("alone", "gpu", "nightly") if HAS_GPU_FILES else ("alone", "nightly")
"""Markers: most hosts have one GPU, and clusters fill a machine."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also tests marked nightly, and every fault of tests/chaos")
    parser.addoption("--examples", type=int, help="how many cases each property test draws; 100 by default")
    parser.addoption("--alone", choices=("no", "only"), help="none of the tests that `make test` runs alone, or only those")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the number of examples before any test is imported, because tests read it on import."""
    if examples := config.getoption("--examples"):
        from hypothesis import settings  # takes a second, so only if a test asks

        settings.register_profile("asked for", max_examples=examples)
        settings.load_profile("asked for")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests without looking for garbage, and keeps them as pytest has rewritten them.

    Otherwise, in a container where PYTHONDONTWRITEBYTECODE is set, each process spends ten seconds on rewriting them all.
    """
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode = before


def pytest_sessionstart(session: pytest.Session) -> None:
    """Registers `_leave`, which ends the process, as the last exit handler: before Ray, Arrow and torch are imported."""
    atexit.register(_leave, session)


@pytest.fixture(autouse=True)
def _existing_objects_are_no_garbage() -> None:
    """Exempts existing objects from garbage collection: a measurement collects eight times, and would scan all imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _guards_are_not_timed() -> None:
    """Keeps Dynamo from timing the guards of each graph, for a line in its debug log.

    It flushes the CPU's caches first, which takes 24 ms, a fifth of a small model's compile.
    """
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


@pytest.fixture(autouse=True)
def _graphs_are_not_traced() -> None:
    """Keeps pytest, which listens to all loggers that don't propagate, from torch's trace, which is only made for a listener.

    It takes a tenth of compiling with `aot_eager`. Torch's own listener leaves at the first record.
    """
    if "torch" in sys.modules:
        trace = logging.getLogger("torch.__trace")
        trace.propagate = True
        trace.handlers.clear()


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> None:
    """Drops the graphs of earlier tests: those of code that all workloads share would count as graphs that no longer fit."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """Fails a test that changes torch's process-wide switches, since otherwise a later test would fail instead."""
    before = _torch_switches()
    yield
    after = _torch_switches()
    if before is not None:
        assert after == before, "the test left torch's process-wide switches changed"


def _torch_switches() -> dict[str, object] | None:
    """Returns what a process sets for all of torch; None if torch isn't loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compile"):
        return None
    cuda = torch.backends.cuda
    return {
        "attention kernels": (
            cuda.cudnn_sdp_enabled(),
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
        ),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


def _answered(question: str) -> str:
    """Answers a question of the describer; about a workload of the project's own only once, because its model is built for it."""
    from compile_sweep.contract.workload_names import BUILT_IN
    from compile_sweep.describe import answer_or_error

    if question not in _KNOWN_ANSWERS:
        asked = json.loads(question)
        answer = json.dumps(answer_or_error(asked))
        if asked.get("workload") not in BUILT_IN:
            return answer
        _KNOWN_ANSWERS[question] = answer
    return _KNOWN_ANSWERS[question]


_KNOWN_ANSWERS: dict[str, str] = {}


@pytest.fixture(autouse=True)
def describes_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands that run in this process inspect workloads here, because a new process takes seconds to import torch.

    Tests of that process override the fixture.
    """

    def start(describer: Describer) -> None:
        if describer.with_current_folder:
            monkeypatch.syspath_prepend(os.getcwd())

    def answered(describer: Describer, question: str) -> Mapping[str, Any]:
        answers: Mapping[str, Any] = json.loads(_answered(question))
        return answers

    from orchestrator.plan.describer import Describer, installed_torch

    installed_torch.cache_clear()
    monkeypatch.setattr(Describer, "start", start)
    monkeypatch.setattr(Describer, "_answered", answered)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: threads that wait for each other on a busy host take a hundred times as long as the steps."""
    import torch  # takes seconds, so only if a test asks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Returns the path of an installed Chromium; only for tests marked `browser`, which are skipped if there is none."""
    return _chromium() or pytest.fail("a test that uses a browser lacks the marker browser")


_BROWSER = ExitStack()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Any:
    """A browser, the same one for all tests in a row that are marked `browser`: starting it takes 3 s of CPU time."""
    return _started(chromium)


@cache
def _started(chromium: str) -> Any:
    from report_browser import FLAGS, PATIENCE_MS, sync_api  # not always installed

    playwright = _BROWSER.enter_context(sync_api.sync_playwright())
    running = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE_MS)
    _BROWSER.callback(_started.cache_clear)
    _BROWSER.callback(running.close)
    return running


@pytest.hookimpl(trylast=True)  # after fixtures, which may close pages
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Closes the browser before a file's tests that have no use for it, which could not use asyncio beside it."""
    if nextitem is None or not (nextitem.get_closest_marker("browser") or nextitem.path == item.path):
        _BROWSER.close()


def pytest_sessionfinish() -> None:
    """Closes the browser if pytest stops at a failure."""
    _BROWSER.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    """Assigns whole files to processes, and all tests of a group to one process, with `--dist loadgroup`.

    Those of tests/sweeps without Ray are one group, too, because they share a process that has imported torch.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # not always installed: a host with a GPU may have only pytest

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = str(super()._split_scope(nodeid)).split("::", 1)[0]
            return "sweeps" if scope.startswith("tests/sweeps/") else scope

    return Files(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips importing files that cannot hold a chosen test: `-m gpu` then needs only what tests on a GPU import.

    Importing all files takes 20 s, for the few tests that run alone.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    wanted: list[tuple[str, ...]] = []
    if (marker := config.getoption("markexpr")).isidentifier():
        wanted.append((marker,))
    if config.getoption("--alone") == "only":
        wanted.append(tuple(one for one in COUNT_AS_ALONE if one != "nightly" or config.getoption("--nightly")))
    if not wanted:
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if all(any(f"mark.{marker}" in text for marker in markers) for markers in wanted) else True


@pytest.hookimpl(tryfirst=True)  # before -m chooses by markers, and xdist by groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what counts as `alone`, and puts first what takes longest, since one process would have to wait for it at the end.

    Tests marked `ray` start processes that wait for each other, and keep one core busy rather than all. They form one group: one
    process runs them one after the other, next to the others' tests. Several Ray sessions at once would compete for cores and
    memory. Tests marked `browser` form another, and share one.

    Deselects what `--alone` excludes. Skips tests marked `gpu` without a CUDA device, `browser` without a Chromium, and `nightly`
    unless they are requested.
    """
    for item in items:
        if any(map(item.get_closest_marker, COUNT_AS_ALONE)):
            item.add_marker("alone")
        for group in filter(item.get_closest_marker, ("ray", "browser")):
            if config.getoption("loadgroup", default=False):
                _put_into(item, group)
    _choose(config, items)
    items.sort(key=_place)
    for marker, is_there, reason in (
        ("nightly", lambda: bool(config.getoption("--nightly")), "part of `make nightly`"),
        ("gpu", _has_gpu, "no CUDA device"),
        ("browser", lambda: _chromium() is not None, "no Chromium installed"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _put_into(item: pytest.Item, group: str) -> None:
    """Ends a test's id with its group, by which xdist distributes.

    For pytest 9.2, xdist 3.8 does not: it changes an attribute that pytest no longer has. Can go when it does.
    """
    if item.parent is not None and hasattr(item, "_id"):
        item._id = item.parent.id.child(f"{item.name}@{group}")
    else:
        item.add_marker(pytest.mark.xdist_group(group))


def _place(item: pytest.Item) -> int:
    """Returns a test's place in the order: Ray's, mypy and whole sweeps, then browsers and compilers, then slow ones."""
    if item.get_closest_marker("ray") or item.path.name == "test_types.py" or "sweeps" in item.path.parts:
        return 0
    compiles = {"harness", "contract", "workloads", "scripts", "chaos", "test_examples.py"}.intersection(item.path.parts)
    if compiles or item.get_closest_marker("browser"):
        return 1
    return 2 if item.get_closest_marker("slow") else 3


def _choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what `--alone` excludes; a separate option because pytest uses only the last of two `-m`."""
    if which := config.getoption("--alone"):
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[(item.get_closest_marker("alone") is None) is (which == "no")].append(item)
        items[:] = parts[True]
        config.hook.pytest_deselected(items=parts[False])


def _leave(session: pytest.Session) -> None:
    """Ends the process here, before C++ libraries destroy their static objects.

    Ray, Arrow and torch leave threads in this process that run until its end, and one run ended by SIGSEGV after its last test
    had passed. Sweeps are processes of their own, whose exit codes tests check.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(session.exitstatus))


def _has_gpu() -> bool:
    import torch  # takes seconds, so only if a test asks

    return torch.cuda.is_available()


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)
