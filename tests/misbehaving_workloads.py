"""Workloads whose code does in a step or while it builds its model what no one would expect; named by what it does."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.contract.from_model import ModelWorkload, WorkloadFromModel
from compile_sweep.contract.model_and_loss import ModelAndLoss

STEP = 3  # the forward in which something happens


class OwnBase(BaseException):
    """An exception that `except Exception` does not see."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this exception has no text")


class Unpicklable(Exception):
    def __init__(self, one: object, other: object) -> None:
        super().__init__()


def _raise(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _descend() -> None:
    _descend()


def _leave_children() -> None:
    subprocess.Popen(["setsid", "-f", "sleep", "4321"])
    if os.fork() == 0:
        os.setsid()
        time.sleep(4322)
        os._exit(0)


def _start_threads() -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(10**6,), daemon=False).start()


def _print_much() -> None:
    for _ in range(64 * 1024):
        os.write(1, b"x" * 1023 + b"\n")


def _print_bytes() -> None:
    for _ in range(50):
        os.write(1, os.urandom(512))
        os.write(2, b"\x1b[2J\x1b]0;owned\x07\x1b[31m\xff\xfe\x00\r\n")


def _ignore_signals() -> None:
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN)


def _lose_the_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def _empty_temporary_files() -> None:
    for path in Path(os.environ["TMPDIR"]).iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _empty_compile_caches() -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if name in os.environ:
            shutil.rmtree(os.environ[name], ignore_errors=True)


def _replace_compile() -> None:
    torch.compile = lambda model=None, **_: model if model is not None else lambda one: one


def _hook_that_exits() -> None:
    sys.excepthook = lambda *_: os._exit(0)
    raise RuntimeError("with a hook of its own")


def _limit(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def _stop_the_clock() -> None:
    now = time.perf_counter()
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        setattr(time, name, lambda: now)
    time.perf_counter_ns = time.monotonic_ns = lambda: int(now * 1e9)


def _turn_the_clock_back() -> None:
    began = time.time()
    time.time = lambda: began - 10**7


def _hook_imports() -> None:
    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            raise ImportError(f"{name} is not to be imported")

    sys.meta_path.insert(0, Refusing())  # type: ignore[arg-type]


def _replace_json() -> None:
    json.dumps = json.dump = lambda *_, **__: "{}"  # type: ignore[assignment]


def _replace_builtins() -> None:
    builtins.print = builtins.open = None  # type: ignore[assignment]


def _write_to_open_files() -> None:
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b"\xff\n\nnull\n[]\n{}\n[1]\n" + b"[" * 10_000 + b"\n")


def _fork_and_go_on() -> None:
    os.fork()


def _raise_in_a_circle() -> None:
    one, other = ValueError("the first"), ValueError("the second")
    one.__cause__, other.__cause__ = other, one
    raise one


def _raise_a_long_chain() -> None:
    error: BaseException = ValueError("the first of many")
    for number in range(20_000):
        later = ValueError(f"number {number}")
        later.__cause__ = error
        error = later
    raise error


def _raise_several() -> None:
    raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("one of several")])


def _take_output_away() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


WHILE_BUILDING: dict[str, Callable[[], Any]] = {
    "raises_markup": _raise(RuntimeError("while building <script>alert(1)</script> \x1b[31m\x00")),
    "leaves_children": _leave_children,
    "starts_threads": _start_threads,
    "prints_much": _print_much,
    "prints_bytes": _print_bytes,
    "ignores_signals": _ignore_signals,
    "loses_its_folder": _lose_the_folder,
    "empties_temporary_files": _empty_temporary_files,
    "empties_compile_caches": _empty_compile_caches,
    "computes_on_meta": lambda: torch.set_default_device("meta"),
    "computes_in_float64": lambda: torch.set_default_dtype(torch.float64),
    "replaces_compile": _replace_compile,
    "allocates_terabytes": lambda: torch.empty(2**43),
    "clears_the_environment": lambda: os.environ.clear(),
    "closes_standard_streams": lambda: os.closerange(0, 3),
    "closes_files": lambda: os.closerange(3, 4096),
    "allows_few_files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)),
    "never_leaves": lambda: atexit.register(time.sleep, 10**6),
    "takes_all_threads": lambda: torch.set_num_threads(64),
    "is_deterministic": lambda: torch.use_deterministic_algorithms(True),
    "stops_gradients": lambda: torch.set_grad_enabled(False),
    "exits_in_a_hook": _hook_that_exits,
    "kills_its_parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "takes_output_away": _take_output_away,
    "makes_files_unreadable": lambda: os.umask(0o777),
    "may_write_no_files": _limit(resource.RLIMIT_FSIZE, 0),
    "may_use_no_cpu_time": _limit(resource.RLIMIT_CPU, 1),
    "may_start_no_processes": _limit(resource.RLIMIT_NPROC, 1),
    "has_an_alarm": lambda: signal.alarm(1),
    "goes_to_the_root": lambda: os.chdir("/"),
    "stops_the_clock": _stop_the_clock,
    "turns_the_clock_back": _turn_the_clock_back,
    "hooks_imports": _hook_imports,
    "replaces_json": _replace_json,
    "replaces_builtins": _replace_builtins,
    "forgets_modules": lambda: [sys.modules.pop(name) for name in [*sys.modules] if name.startswith(("compile_sweep", "json"))],
    "writes_utf_16": lambda: sys.stdout.reconfigure(encoding="utf-16"),  # type: ignore[union-attr]
    "writes_to_open_files": _write_to_open_files,
    "takes_warnings_for_errors": lambda: warnings.simplefilter("error"),
    "traces": lambda: sys.settrace(lambda *_: None),
    "may_not_recurse": lambda: sys.setrecursionlimit(80),
    "forks_and_goes_on": _fork_and_go_on,
    "detects_anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "is_in_inference_mode": lambda: torch.inference_mode().__enter__(),
}
"""What happens before the model is there."""

IN_A_STEP: dict[str, Callable[[], Any]] = {
    "raises_a_formula": _raise(ValueError("=cmd|' /C calc'!A0 </script><script>alert(2)</script> \u202e \x00")),
    "exits_with_3": lambda: os._exit(3),
    "exits_with_0": lambda: os._exit(0),
    "aborts": os.abort,
    "reads_address_0": lambda: ctypes.string_at(0),
    "calls_sys_exit": lambda: sys.exit(0),
    "raises_keyboard_interrupt": _raise(KeyboardInterrupt()),
    "raises_own_base": _raise(OwnBase("mine")),
    "descends": _descend,
    "raises_unprintable": _raise(Unprintable()),
    "raises_unpicklable": _raise(Unpicklable(1, 2)),
    "raises_8_megabytes": _raise(ValueError("A" * (8 << 20))),
    "raises_stop_iteration": _raise(StopIteration()),
    "raises_generator_exit": _raise(GeneratorExit()),
    "sleeps": lambda: time.sleep(3),
    "raises_in_a_circle": _raise_in_a_circle,
    "raises_a_long_chain": _raise_a_long_chain,
    "raises_several": _raise_several,
    "computes_later_in_float16": lambda: torch.set_default_dtype(torch.float16),
    "changes_threads": lambda: torch.set_num_threads(1),
    "signals_itself": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "hangs_up": lambda: os.kill(os.getpid(), signal.SIGHUP),
    "makes_later_files_unreadable": lambda: os.umask(0o777),
}
"""What happens in one forward."""

LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "is_nan": lambda loss: loss * float("nan"),
    "is_infinite": lambda loss: loss * float("inf"),
    "differs_each_time": lambda loss: loss * (1 + random.Random().random()),
    "has_rows": lambda loss: loss * torch.ones(4, 16),
    "has_no_gradient": lambda loss: loss.detach(),
    "is_whole": lambda loss: (loss * 0).long(),
    "is_none": lambda loss: None,
    "is_a_tuple": lambda loss: (loss, loss),
    "is_complex": lambda loss: loss * 1j,
    "is_huge": lambda loss: loss * 1e38,
    "is_a_python_number": lambda loss: float(loss),
    "is_a_condition": lambda loss: loss > 0,
    "is_empty": lambda loss: loss.new_empty(0),
    "is_sparse": lambda loss: loss.to_sparse(),
    "is_in_float16": lambda loss: loss.half(),
    "has_no_finite_gradient": lambda loss: loss + (loss * 0).sqrt(),
    "is_a_list": lambda loss: [loss],
    "is_text": str,
}
"""What becomes of the loss."""

FAULTS = ("none", "seeds_anew", *WHILE_BUILDING, *IN_A_STEP, *LOSSES)


class Net(nn.Module):
    """Two layers, and a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        WHILE_BUILDING.get(fault, lambda: None)()
        self.fault, self.forwards = fault, 0
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.forwards += 1
        if self.forwards == STEP:
            IN_A_STEP.get(self.fault, lambda: None)()
        if self.fault == "seeds_anew":
            torch.manual_seed(0)
        loss = nn.functional.mse_loss(self.leave(self.enter(x).relu()), y)
        return LOSSES.get(self.fault, lambda one: one)(loss)


def _batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 16), "y": torch.randn(4, 16)}


_Sound: type[ModelWorkload] = WorkloadFromModel(lambda: Net("none"), _batch, lambda model, batch: model(**batch))


def _with(fault: str) -> type[ModelWorkload]:
    def build_model(self: ModelWorkload) -> nn.Module:
        torch.manual_seed(self.seed)
        return ModelAndLoss(Net(fault), type(self).loss_fn).train()

    return type(fault, (_Sound,), {"build_model": build_model, "__module__": __name__})


def _named() -> Iterator[tuple[str, type[ModelWorkload]]]:
    for fault in FAULTS:
        yield fault, _with(fault)


globals().update(_named())
