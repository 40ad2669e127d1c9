"""A small model whose forward has one fault, and what the compiler makes of it."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def _noticing_unfreezing() -> contextlib.AbstractContextManager[Any]:
    """Has compiled code notice that a parameter's requires_grad changed, as torch itself does from 2.12 on."""
    if TORCH >= (2, 12):
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False)


class Net(nn.Module):
    """One layer, and what models keep besides it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.history: list[Tensor] = []
        self.last: Any = None
        self.count, self.temperature, self.flag = 0, 2.0, True
        self._update_count = 0
        self.seen: set[int] = set()
        self.dropout, self.rest = nn.Dropout(0.1), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.table = torch.zeros(1, 8)
        self.whole_table = torch.zeros(100, 8)
        self.activation: Any = torch.tanh
        self.numpy = np.random.default_rng(1)
        self.generator = torch.Generator().manual_seed(1)
        self.scale: nn.Parameter | None = None
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("heat", torch.tensor(2.0))
        self.register_buffer("queue", torch.zeros(16, 8))
        self.steps: Tensor
        self.heat: Tensor
        self.queue: Tensor


Forward = Callable[[Net, Tensor], Tensor]


def plain(net: Net, x: Tensor) -> Tensor:
    return net.layer(x)


def with_rows(net: Net, x: Tensor) -> Tensor:
    (rows,) = torch.where(x[:, 0] > 0)
    return x.index_add(0, rows, net.layer(x[rows]))


def with_mask(net: Net, x: Tensor) -> Tensor:
    return x + (x[:, 0] > 0).float()[:, None] * net.layer(x)


def with_assert_statement(net: Net, x: Tensor) -> Tensor:
    """Is here because pytest rewrites the assertions of test files."""
    assert x.abs().sum() < 1e9, "too large"
    return net.layer(x)


def with_hook_added(net: Net, x: Tensor) -> Tensor:
    net.layer.register_forward_hook(lambda module, inputs, output: output * 1)
    return net.layer(x)


def with_break_in_loop(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        x = net.layer(x)
        net.last = hashlib.md5(b"a")
    return x


def with_tensor_kept(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = y.sum().detach()
    return y


def with_layers_in_turn(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


FEW = 4
"""Steps in which a graph break is met, and a recompile more than once."""


def run(
    forward: Forward, *, steps: int = 10, dynamic: bool | None = None, around: Callable[[Net, int], Any] | None = None
) -> Diagnostics:
    """Runs training steps of a compiled model with this forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = type("Model", (Net,), {"forward": forward})()
    compiled = torch.compile(net, backend="eager", dynamic=dynamic)
    with _noticing_unfreezing(), capture_diagnostics() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(steps):
            with around(net, number) if around else contextlib.nullcontext():
                compiled(torch.randn(4, 8))
    return found


@cache
def run_mended(forward: Forward, *, dynamic: bool | None = None) -> Diagnostics:
    """Runs a few steps of a model whose fault is mended; once, because many faults are mended the same way."""
    return run(forward, steps=FEW, dynamic=dynamic)


@dataclass(frozen=True)
class Case:
    cause: str
    before: Forward
    after: Forward


def is_clean(found: Diagnostics) -> bool:
    return not (found.graph_break_reasons or found.recompile_limit_hits or found.fallbacks) and found.graphs in (1, 2)
