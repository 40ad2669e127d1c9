"""Multi-worker settings as Python: the wrapper, its communication hook, and torch's process-wide switches. Pure.

`source.py` puts these lines into the module that it writes.
"""

from collections.abc import Iterator, Mapping

from compile_sweep.schema.ddp_settings import (
    FIRST_POWERSGD_STEP,
    USUAL_POWERSGD_RANK,
    Around,
    Compression,
    DdpSettings,
    OptimizeDdp,
)

WRAP = "distributed"  # the function that wraps the model

_ARGUMENTS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "batched_grad_copy")
"""Arguments of the wrapper's constructor, by torch's names; `broadcast_buffers` has another name since 2.13."""

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def process_wide(ddp: DdpSettings | None) -> Iterator[str]:
    """Yields statements that come before the model is wrapped."""
    if ddp is None or ddp.optimize_ddp is None:
        return
    yield f'torch._dynamo.config.optimize_ddp = "{ddp.optimize_ddp}"'
    if compiles_backward(ddp):
        yield "torch._dynamo.config.compiled_autograd = True  # so that the reduction is part of a graph"


def compiles_backward(ddp: DdpSettings | None) -> bool:
    """Tells whether the backward pass is compiled again, together with the reduction of gradients."""
    return ddp is not None and ddp.optimize_ddp is OptimizeDdp.PYTHON_REDUCER


def imports(code: str) -> Iterator[str]:
    """Yields imports of the communication hooks that the code names."""
    if names := [name for name in ("bf16_compress_hook", "fp16_compress_hook") if name in code]:
        yield f"from {_HOOKS}.default_hooks import {', '.join(names)}"
    if "powerSGD_hook" in code:
        yield f"from {_HOOKS}.powerSGD_hook import PowerSGDState, powerSGD_hook"


def wrapper(ddp: DdpSettings | None, torch_version: tuple[int, int]) -> Iterator[str]:
    """Yields the function that wraps the model in `DistributedDataParallel`."""
    ddp = ddp or DdpSettings()
    arguments = "".join(f", {name}={value}" for name, value in _arguments(ddp, torch_version).items())
    yield f"def {WRAP}(model: torch.nn.Module) -> torch.nn.Module:"
    yield '    """The model inside DistributedDataParallel; itself where this process trains alone."""'
    yield "    if not torch.distributed.is_initialized():"
    yield "        return model"
    if ddp.compression is None:
        yield f"    return DistributedDataParallel(model{arguments})"
        return
    yield f"    wrapped = DistributedDataParallel(model{arguments})"
    if ddp.compression is Compression.POWERSGD:
        rank, start = ddp.powersgd_rank or USUAL_POWERSGD_RANK, ddp.powersgd_start or FIRST_POWERSGD_STEP
        yield f"    state = PowerSGDState(None, matrix_approximation_rank={rank}, start_powerSGD_iter={start})"
        yield "    wrapped.register_comm_hook(state, powerSGD_hook)"
    else:
        yield f"    wrapped.register_comm_hook(None, {ddp.compression}_compress_hook)"
    yield "    return wrapped"


def wrapped_and_compiled(ddp: DdpSettings | None) -> str:
    """Returns the expression that a step calls: `model` compiled and wrapped, in the order that the settings say.

    Torch recommends compiling the model first and wrapping it. At each compile, the compiler checks whether a wrapper's forward
    is running, so it splits graphs by bucket in either order, also in blocks and parts.
    """
    around_wrapper = ddp is not None and ddp.around is Around.WRAPPER
    return f"compile_model({WRAP}(model))" if around_wrapper else f"{WRAP}(compile_model(model))"


def _arguments(ddp: DdpSettings, torch_version: tuple[int, int]) -> Mapping[str, object]:
    found = {name: value for name in _ARGUMENTS if (value := getattr(ddp, name)) is not None}
    if ddp.broadcast_buffers is False:
        found["broadcast_buffers" if torch_version < (2, 13) else "forward_sync_buffers"] = False
    return found
