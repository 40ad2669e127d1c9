"""Workloads small enough to compile in seconds, for tests. Named on command lines as `toy_workloads:Name`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.options import Option
from compile_sweep.harness.protocol import Protocol
from compile_sweep.schema.shapes import ShapePolicy

VOCABULARY, WIDTH = 16, 8


class Block(nn.Module):
    """A repeated region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).relu()


class Loss(nn.Module):
    """Cross entropy."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Body(nn.Module):
    """Embedding, three equal blocks, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.output(hidden)
        return logits


class ToyModel(nn.Module):
    """Body and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.loss = Loss()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.spoiled(self.loss(self.body(ids), labels))

    def spoiled(self, loss: Tensor) -> Tensor:
        """Changes the loss; faulty models override it."""
        return loss


class Toy(Workload):
    """Sound."""

    sizes = ("only",)
    batch_size = 3
    max_length = 16
    pool_batches = 4
    model_class: type[ToyModel] = ToyModel
    window_s: float | None = None
    """Replaces the protocol's `cpu_window_s`, for tests that do not need a narrow interval."""

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        if self.window_s is None:
            yield
            return
        from compile_sweep.harness import measure  # loads the compiler, which planning does not need

        with patch.object(measure, "Protocol", partial(Protocol, cpu_window_s=self.window_s)):
            yield

    def build_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.model_class()

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        return [self._batch(policy.padded(longest), rank, device) for longest in (5, 16, 9, 3)[: self.pool_batches]]

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        return self._batch(length, rank, device)

    def regions(self, model: nn.Module) -> Sequence[str]:
        return [name for name, module in model.named_modules() if isinstance(module, Block)]

    def parts(self) -> Sequence[str]:
        return ["body", "loss"]

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        if module.startswith("body.blocks"):
            return {"hidden": (1,)}
        return {"": {"ids": (1,), "labels": (1,)}, "body": {"ids": (1,)}, "loss": {"logits": (1,), "labels": (1,)}}[module]

    def _batch(self, length: int, rank: int, device: torch.device) -> Batch:
        generator = torch.Generator().manual_seed(1000 * rank + length)
        ids = torch.randint(VOCABULARY, (self.batch_size, length + 1), generator=generator)
        inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        return Batch(inputs=on_device, length=length, samples=self.batch_size, tokens=ids[:, 1:].numel())


class EndsAt(ToyModel):
    """Raises what a device without memory left raises, above 11 samples."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if len(ids) > 11:
            raise self.error
        return super().forward(ids, labels)


class Sized(Toy):
    """Takes a batch size, and has memory for 11 samples."""

    options: ClassVar[Mapping[str, Option]] = {"batch_size": int}
    model_class = EndsAt


class _HasMore(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class _Wide(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def spoiled(self, loss: Tensor) -> Tensor:
        hidden = loss.expand(4, 600)
        for layer in self.wide:
            hidden = layer(hidden).tanh()
        return loss + hidden.square().mean()


def make_known(name: str, backend: Callable[[object, object], object]) -> None:
    """Registers a back-end with torch under this name; not on import, because it loads the compiler."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name=name)


class Brief(Toy):
    """Measures briefly, for tests that do not depend on its figures."""

    window_s = 0.0


class UnusedParameters(Toy):
    """Has parameters that no step uses, which several workers must search for."""

    model_class = _HasMore


class Wide(Toy):
    """Its gradients fill several buckets of 1 MiB."""

    model_class = _Wide


class Slow(Brief):
    """Takes about a second to build for the first time, so that a test can act while a trial is running."""

    _is_built = False

    def build_model(self) -> nn.Module:
        if not self._is_built:
            time.sleep(1.0)
            self._is_built = True
        return super().build_model()


class Crowded(Toy):
    """Warms up for some seconds with more work than its share of the cores can do; its steps mostly sleep, and are steady."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self._crowded = False
        model.register_forward_pre_hook(self._crowd_once)
        return model

    def _crowd_once(self, module: nn.Module, inputs: object) -> None:
        if not self._crowded:
            self._crowded = True
            _crowd()
        time.sleep(0.03)


class _SlowWhenEager(ToyModel):
    """Has one block, since each would add kernels to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks = self.body.blocks[:1]

    def spoiled(self, loss: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(0.1)
        return loss


class Paying(Toy):
    """Compiling it certainly pays off; its steps mostly sleep, and are steady."""

    model_class = _SlowWhenEager
    window_s = 2.0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_forward_pre_hook(_rest)
        return model


def _rest(module: nn.Module, inputs: object) -> None:
    time.sleep(0.02)


def _crowd() -> None:
    spin = "import time; ends_at = time.monotonic() + 4\nwhile time.monotonic() < ends_at: pass"
    for process in [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * len(os.sched_getaffinity(0)))]:
        process.wait()


class CountsFrozenObjects(Toy):
    """Writes to the trial's log how many objects the garbage collector leaves out."""

    def build_model(self) -> nn.Module:
        print(f"frozen objects: {gc.get_freeze_count()}")
        return super().build_model()
