"""Toys with faults that a sweep must notice. Named on command lines as `faulty_workloads:Name`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from torch import Tensor, nn
from toy_workloads import Brief, Toy, ToyModel, make_known

from compile_sweep.contract.base import Batch
from compile_sweep.schema.shapes import PadToLongest, ShapePolicy


class _NanWhenCompiled(ToyModel):
    def spoiled(self, loss: Tensor) -> Tensor:
        return loss * float("nan") if torch.compiler.is_compiling() else loss


class _WrongWhenCompiled(ToyModel):
    def spoiled(self, loss: Tensor) -> Tensor:
        return loss * 1.5 if torch.compiler.is_compiling() else loss


class _BreaksItsGraph(ToyModel):
    def spoiled(self, loss: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return loss * 1.0


class _BreaksInALoop(ToyModel):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.body(ids), labels)
        for _ in range(2):
            torch._dynamo.graph_break()
            loss = sum(part * 1.0 for part in (loss,))  # type: ignore[assignment]
        return loss


@cache
def _compiles_nothing() -> type[ToyModel]:
    class _CompilesNothing(ToyModel):
        @torch._dynamo.disable  # decorating loads the compiler
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return super().forward(ids, labels)

    return _CompilesNothing


class _BypassesItsBlocks(ToyModel):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body.embedding(ids)
        for block in self.body.blocks:
            hidden = hidden + block.linear(hidden).relu()
        loss: Tensor = self.loss(self.body.output(hidden), labels)
        return loss


class NanWhenCompiled(Toy):
    """Silently wrong when compiled: not finite."""

    model_class = _NanWhenCompiled


class WrongWhenCompiled(Toy):
    """Silently wrong when compiled: half as much again."""

    model_class = _WrongWhenCompiled


class BreaksItsGraph(Brief):
    """Two graphs where one was expected."""

    model_class = _BreaksItsGraph


class BreaksInALoop(Toy):
    """Dynamo gives up the whole forward, and compiles only what it calls."""

    model_class = _BreaksInALoop


class CompilesNothing(Toy):
    """Its forward is disabled for Dynamo."""

    def build_model(self) -> nn.Module:
        self.model_class = _compiles_nothing()
        return super().build_model()


class BypassesItsBlocks(Toy):
    """Its blocks' forwards, which scope=regional compiles, are never called."""

    model_class = _BypassesItsBlocks


class SuppressesErrors(Toy):
    """Swallows errors of compiling, as some people configure it, and the back-end compiles nothing."""

    backend = "toy_refuses"

    def __init__(self, size: str, seed: int) -> None:
        super().__init__(size, seed)
        make_known(self.backend, _refuses)

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        with super().process_settings(), torch._dynamo.config.patch(suppress_errors=True):
            yield


def _refuses(graph: object, inputs: object) -> NoReturn:
    raise RuntimeError("this back-end compiles nothing")


class _Deceptive(ToyModel):
    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def spoiled(self, loss: Tensor) -> Tensor:
        if self.fault == "wrong" and torch.compiler.is_compiling():
            return loss * 1.5
        if self.fault == "recompiles":
            self.calls += 1
            return loss + 0.0 * self.calls
        return loss


class Deceptive(SuppressesErrors):
    """Looks fast but is faulty, by pad multiple: 2 is wrong when compiled, 4 recompiles at every step, 16 jumps.

    Its loader is slower than its steps.
    """

    model_class = _Deceptive
    window_s = 0.3

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        multiple = policy.multiple if isinstance(policy, PadToLongest) else None
        self._fault = {2: "wrong", 4: "recompiles", 16: "jumps"}.get(multiple or 0, "")
        return super().pool(policy, rank=rank, device=device)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        assert isinstance(model, _Deceptive)
        model.fault = self._fault
        if self._fault == "jumps":
            model.register_forward_pre_hook(_jump)
        return model

    def loader(self, policy: ShapePolicy, *, rank: int) -> Iterator[Batch]:
        batches = self.pool(policy, rank=rank, device=torch.device("cpu"))
        while True:
            for batch in batches:
                time.sleep(0.02)
                yield batch


def _jump(module: nn.Module, inputs: object) -> None:
    time.sleep(0.02 * random.SystemRandom().random())  # a generator of its own, which no seed makes repeatable


_STEPS: dict[str, Tensor] = {}


class _CountsItsSteps(ToyModel):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        _STEPS[labels.device.type].add_(1)
        return super().forward(ids, labels)


class CountsItsSteps(Toy):
    """Writes to a tensor outside its model, which a CUDA graph cannot replay. A step computes the same without it."""

    model_class = _CountsItsSteps

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        _STEPS[device.type] = torch.zeros((), device=device)
        return super().pool(policy, rank=rank, device=device)


class Faulty(Toy):
    """Fails by pad multiple: 2 raises, 4 loses its worker, 8 hangs with a child process while warming up."""

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        multiple = policy.multiple if isinstance(policy, PadToLongest) else None
        if multiple == 2:
            raise RuntimeError("this workload does not like multiples of 2")
        if multiple == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        self._hang = multiple == 8
        return super().pool(policy, rank=rank, device=device)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self._hang:
            model.register_forward_pre_hook(_hang)
        return model


def _hang(module: nn.Module, inputs: object) -> None:
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


class EndsItsSweep(Brief):
    """With lengths padded to multiples of 4, ends the process that runs it, like a host that runs out of memory."""

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        if isinstance(policy, PadToLongest) and policy.multiple == 4:
            fork_server = psutil.Process(os.getppid())
            fork_server.parent().kill()  # the command
            time.sleep(600)
        return super().pool(policy, rank=rank, device=device)


class Leaky(Brief):
    """Prints its whole environment and, with lengths padded to multiples of 2, raises with it."""

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        print(dict(os.environ), flush=True)
        if policy.padded(1) == 2:
            raise RuntimeError(f"denied: {dict(os.environ)}")
        return super().pool(policy, rank=rank, device=device)


class _Halt(BaseException):
    """Not an `Exception`."""


class _Silent(Exception):
    """Has no text, and raises when asked for it."""

    def __str__(self) -> str:
        raise RuntimeError("there is none")


class Halts(Toy):
    """Raises what `except Exception` does not catch."""

    def build_model(self) -> nn.Module:
        raise _Halt


class Silent(Toy):
    """Raises an error that cannot be formatted."""

    def build_model(self) -> nn.Module:
        raise _Silent


class TakesOutputAway(Toy):
    """Closes the process's standard output."""

    def build_model(self) -> nn.Module:
        sys.stdout = None  # type: ignore[assignment]
        sys.stderr.close()
        return super().build_model()


class EmptiesTemporaryFolder(Toy):
    """Removes everything from the folder for temporary files, and prints more than a log keeps."""

    def build_model(self) -> nn.Module:
        from torch._inductor import codecache  # loads the compiler

        print("temporary files:", *os.listdir(tempfile.gettempdir()))
        print("headers here:", codecache._HEADER_DIR)
        print("headers of a child:", *map(os.path.realpath, Path(tempfile.gettempdir()).glob("torchinductor_*/*")))
        assert os.environ["TMPDIR"] == tempfile.gettempdir()
        if len(Path(tempfile.gettempdir()).parts) > 2 and "compile-sweep-7-" in tempfile.gettempdir():
            for entry in Path(tempfile.gettempdir()).iterdir():
                shutil.rmtree(entry, ignore_errors=True)
            shutil.rmtree(tempfile.gettempdir())
            os.mkdir(tempfile.gettempdir())
            print("emptied")
        return super().build_model()


class Sleeps(Toy):
    """Never ends."""

    def build_model(self) -> nn.Module:
        time.sleep(600)
        return super().build_model()
