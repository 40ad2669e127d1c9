"""How well a step uses its GPU: arithmetic and memory traffic relative to rates measured on the card, and time by kind of kernel.

Background: model FLOPs utilization (Chowdhery et al. 2022, PaLM, appendix B) is the arithmetic of a step's matrix products,
convolutions and attention, counted on the eager step by torch's `FlopCounterMode`, divided by what the device could have done in
the step's time. The latter is the rate of one large matrix product in the step's own precision, measured here, since no card
reaches its nominal rate at its power limit. Memory traffic is what the operators of the eager step read and write, relative to
the measured rate of a large copy; fusion can push it above 100%. A profile of a few steps says what fraction of the time any
kernel runs, and of which kind.

Output: figures by name, for `TrialRecord.device_use`; unavailable ones are left out. On a CPU there are none.
"""

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._autograd import DeviceType
from torch._ops import HigherOrderOperator
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from compile_sweep.contract.base import Batch
from compile_sweep.contract.seeding import own_random_numbers
from compile_sweep.harness.apply import TrainStep
from compile_sweep.harness.numerics.step_check import run_eagerly
from compile_sweep.harness.steady import synchronize
from compile_sweep.schema.causes.slowness import FASTER_FROM

KINDS = (
    ("communication", r"nccl"),
    ("copies", r"[Mm]em(cpy|set)|copy_kernel|direct_copy|CatArrayBatchedCopy"),
    ("attention", r"flash|fmha|attention|sdpa|mha_"),
    ("convolution", r"conv|fprop|dgrad|wgrad|winograd"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas|triton_(tem|mm)|splitK|gemv|matmul"),
    ("reductions", r"triton_(red|per)|reduce|softmax|norm|Norm"),
    ("pointwise", r"triton_poi|elementwise|pointwise|multi_tensor|foreach|fused_dropout"),
)
"""Kinds of kernels by the names that cuBLAS, cuDNN, torch and Inductor give them; the first match counts."""

MATRIX_SIZE = 8192  # rows and columns of the product that measures the card's rate: 1.1 TFLOP, in bfloat16 400 MB

PROFILED_STEPS = 3
_ALIGNED = 8
"""The sides of a half-precision matrix must be multiples of this many elements for tensor cores to load 16 bytes at a time
(NVIDIA, Matrix Multiplication Background User's Guide).
"""


def kind_of_kernel(name: str) -> str:
    """Returns a kernel's kind, by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


class _Operators(TorchDispatchMode):
    """Counts matrix products, those with a side that is not a multiple of 8, and the bytes that operators read and write."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.unaligned_flops = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # such as flex_attention, which does its work by other operators
            with self:
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            left, right = (one.shape for one in args[-2:])
            flops = 2 * left.numel() * right[-1]
            self.flops += flops
            if any(side % _ALIGNED for side in (*left[-2:], right[-1])):
                self.unaligned_flops += flops
        out = func(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view:
            self.num_bytes += sum(one.nbytes for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor))
        return out


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)
"""Operators whose last two positional arguments are the matrices."""


def count_work(run: Callable[[], object]) -> dict[str, float]:
    """Counts FLOPs, bytes without fusion, and the share of unaligned products of what `run` does eagerly."""
    operators = _Operators()
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter, operators:
        # The counter's hooks on modules fire once more for a compiled model, which changes no count.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks on modules")
        run()
    found = {"flops_per_step": float(counter.get_total_flops()), "eager_bytes_per_step": float(operators.num_bytes)}
    if operators.flops:
        found["unaligned_products"] = operators.unaligned_flops / operators.flops
    return found


def matrix_rate(dtype: torch.dtype, device: torch.device, size: int = MATRIX_SIZE) -> float:
    """Measures the FLOP/s of a square matrix product in this dtype, at the current precision of float32 products."""
    one = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty_like(one)
    return 2 * size**3 / _shortest_s(lambda: torch.mm(one, one, out=out), device)


def copy_rate(device: torch.device, size: int = MATRIX_SIZE) -> float:
    """Measures the bytes/s of a large copy, read and written together."""
    one = torch.zeros(size, size, device=device)
    out = torch.empty_like(one)
    return 2 * one.nbytes / _shortest_s(lambda: out.copy_(one), device)


def _shortest_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest of ten calls after a first one, in seconds."""
    found = []
    for _ in range(11):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def time_by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns each kind's share of the kernels' time."""
    spent = defaultdict[str, float](float)
    for name, duration_us in kernels:
        spent[kind_of_kernel(name)] += duration_us
    total = sum(spent.values())
    return {kind: duration_us / total for kind, duration_us in sorted(spent.items(), key=lambda one: -one[1]) if total}


def profiled(step: Callable[[Batch], Tensor], batch: Batch, step_ms: float, device: torch.device) -> dict[str, float]:
    """Profiles a few steps and returns where the device's time goes; empty if the profiler sees no kernels."""
    step(batch)  # drops the gradients of the eager step before
    # The first profile of a process may hold no kernels, as of GPT-2 small in eager mode on an H200 with torch 2.11.
    kernels = _kernels(step, batch, device) or _kernels(step, batch, device)
    if not kernels:
        return {}
    busy_ms = sum(duration_us for _, duration_us in kernels) / 1e3 / PROFILED_STEPS
    shares = {f"{kind}_share": share for kind, share in time_by_kind(kernels).items()}
    return {"busy": min(1.0, busy_ms / step_ms), "kernels_per_step": len(kernels) / PROFILED_STEPS, **shares}


def _kernels(step: Callable[[Batch], Tensor], batch: Batch, device: torch.device) -> list[tuple[str, float]]:
    """Returns the name and microseconds of each kernel of `PROFILED_STEPS` steps."""
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(PROFILED_STEPS):
            step(batch)
        synchronize(device)
    return [
        (event.name, float(event.time_range.elapsed_us()))
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def device_use(
    step: TrainStep,
    batch: Batch,
    *,
    step_ms: float,
    dtype: torch.dtype,
    device: torch.device,
    speedup_eager: float | None,
) -> dict[str, float]:
    """Returns how well a step uses its GPU, profiled if hardly faster than eager; empty on a CPU. Trains: call it last."""
    if device.type != "cuda":
        return {}
    found: dict[str, float] = {}

    def work() -> dict[str, float]:
        with run_eagerly(), own_random_numbers(device, 0):
            return count_work(lambda: step.forward_and_backward(batch))

    def rates() -> dict[str, float]:
        return {"matrix_flops_per_s": matrix_rate(dtype, device), "copy_bytes_per_s": copy_rate(device)}

    def relative() -> dict[str, float]:
        return {
            "mfu": found["flops_per_step"] / (step_ms / 1e3) / found["matrix_flops_per_s"],
            "bandwidth": found["eager_bytes_per_step"] / (step_ms / 1e3) / found["copy_bytes_per_s"],
        }

    parts: list[Callable[[], dict[str, float]]] = [work, rates, relative]
    if speedup_eager is None or speedup_eager < FASTER_FROM:
        found["kernels_per_step"] = 0.0  # unless the profiler sees some, which another profiler of the card may prevent
        parts.append(lambda: profiled(step, batch, step_ms, device))
    for part in parts:
        try:
            found |= part()
        except Exception as error:
            # An operator that cannot be counted, no memory, a torch without a profiler: the measurement is still valid.
            warnings.warn(f"how steps use the GPU is not wholly known: {error!r}", stacklevel=2)
    return found
