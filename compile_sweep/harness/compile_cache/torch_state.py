"""The parts of torch's state that make compile-cache artifacts invalid or wrong in another process.

Torch's own keys contain most of it, but not all. For example, AOTAutograd's keys ignore which back-ends of scaled dot-product
attention are enabled, so that a process that forbids one would be handed a graph that calls it; and a graph compiled for a CPU
has its number of threads in its code. Facts that torch's keys contain are listed here anyway, so that they can be named to a
reader who asks why two environments do not share.
"""

import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from compile_sweep.contract.precision import convolutions_allow_tf32, fp32_precision_overrides, matmul_precision

_CONFIGS: tuple[tuple[str, Any], ...] = (
    ("inductor", inductor_config), ("dynamo", dynamo_config), ("functorch", functorch_config),
)  # fmt: skip
_OF_NO_MATTER = re.compile(
    r".*(cache_dir|compile_threads|worker_start_method|_pool|remote_cache|debug_dir|base_dir|cutlass_dir|verbose|trace\.)"
    r"|trace.*|(.*_)?log(s|ging|path|_.*)?|.*_logs?_.*|.*caching_precompile|.*job_id|fx_graph_cache|force_disable_caches",
    re.IGNORECASE,
)
"""Settings for where and how verbosely a process compiles, which do not change the result."""
_ENVIRONMENT = re.compile(r"TORCHINDUCTOR_.*|TORCHDYNAMO_.*|TORCH_COMPILE.*|TRITON_.*|PYTORCH_.*|CUBLAS_.*|NVIDIA_TF32_OVERRIDE")
_ENVIRONMENT_OF_NO_MATTER = re.compile(
    r".*(_DIR|_THREADS|_POOL|_PID|_PATH|_LOGS|_LOG|_VERBOSE|REMOTE_CACHE|REDIS_URL|ALLOC_CONF|DISABLE_CACHES|START|JOB_ID)"
    r"|TORCH_COMPILE_DEBUG|TORCHINDUCTOR_WRITE.*|TRITON_HOME"
)


def torch_configuration() -> dict[str, str]:
    """Returns each component by name. Leaves out what differs by host (versions, GPU, CPU), except for what torch itself brings.

    Compile settings change some of these for their own trial only; such changes are in torch's keys.
    """
    return dict(sorted(_components()))


def _components() -> Iterator[tuple[str, str]]:
    for prefix, config in _CONFIGS:
        yield from _changed(prefix, config)
    for name, value in os.environ.items():
        if _ENVIRONMENT.fullmatch(name) and not _ENVIRONMENT_OF_NO_MATTER.fullmatch(name):
            yield f"environment.{name}", value
    yield "torch_build", f"{torch.version.git_version} cuda={torch.version.cuda} hip={torch.version.hip}"
    yield "float32_matmul_precision", matmul_precision()
    if newer := fp32_precision_overrides():
        yield "float32_precision", " ".join(f"{name}={value}" for name, value in newer.items())
    yield "default_dtype", str(torch.get_default_dtype())
    yield _flags(
        "deterministic",
        algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    if torch.version.cuda is None:
        yield "cpu_threads", str(torch.get_num_threads())
        return
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield _flags(
        "attention_backends",
        flash=cuda.flash_sdp_enabled(), efficient=cuda.mem_efficient_sdp_enabled(),
        math=cuda.math_sdp_enabled(), cudnn=cuda.cudnn_sdp_enabled(),
    )  # fmt: skip
    tf32, deterministic = convolutions_allow_tf32(), cudnn.deterministic
    yield _flags("cudnn", enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=deterministic, tf32=tf32)
    yield _flags(
        "reduced_precision_reductions",
        fp16=bool(cuda.matmul.allow_fp16_reduced_precision_reduction),
        bf16=bool(cuda.matmul.allow_bf16_reduced_precision_reduction),
    )
    yield "ptxas", _assembler()


def _changed(prefix: str, config: Any) -> Iterator[tuple[str, str]]:
    """Yields the settings in one of torch's configuration modules that are not at their default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading a deprecated setting warns
        for name, value in config.save_config_portable().items():
            if _OF_NO_MATTER.fullmatch(name) or config._is_default(name):
                continue
            if value != config._config[name].default:  # a setting that was changed and restored still counts as changed for torch
                yield f"{prefix}.{name}", re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _flags(component: str, **switches: bool) -> tuple[str, str]:
    return component, " ".join(f"{name}={'on' if on else 'off'}" for name, on in switches.items())


def _assembler() -> str:
    """Returns the version of the assembler that Triton uses in this process: its own or, by the environment, another."""
    try:
        from triton import knobs

        return str(knobs.nvidia.ptxas.version)
    except Exception as missing:  # no Triton, no CUDA back-end, or an assembler that does not run
        return f"none ({type(missing).__name__})"
