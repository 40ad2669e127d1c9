"""The values that fields of `CompileSettings` take, each by torch's own name where torch has one.

Modes and CUDA graphs: two ways to say one thing, settled here.
"""

from __future__ import annotations

from enum import StrEnum

from compile_sweep.schema.errors import SettingsError


class Scope(StrEnum):
    """How much of the training step is compiled."""

    EAGER = "eager"
    FULL = "full"
    REGIONAL = "regional"
    MODULAR = "modular"


class Mode(StrEnum):
    """`torch.compile`'s `mode`."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


class Dynamic(StrEnum):
    """How the compiler meets sequence lengths that change."""

    STATIC = "static"
    AUTO = "auto"
    MARK = "mark"
    TRUE = "true"
    BUCKETS = "buckets"


class Padding(StrEnum):
    """To which length a batch is padded."""

    MAX = "max"
    LONGEST = "longest"
    BUCKETS = "buckets"


class OptimizerKind(StrEnum):
    """How the optimizer's step runs."""

    FOREACH = "foreach"
    FUSED = "fused"
    COMPILED = "compiled"
    FOREACH_MAP = "foreach_map"


COMPILED_OPTIMIZERS = (OptimizerKind.COMPILED, OptimizerKind.FOREACH_MAP)
"""Those whose step is compiled."""


class MatmulPrecision(StrEnum):
    """`torch.set_float32_matmul_precision`."""

    HIGHEST = "highest"
    HIGH = "high"
    MEDIUM = "medium"


class Autocast(StrEnum):
    """The dtype autocast runs in; fp16 comes with a gradient scaler."""

    BF16 = "bf16"
    FP16 = "fp16"
    OFF = "off"


class Attention(StrEnum):
    """Which attention a model of Hugging Face's runs."""

    SDPA = "sdpa"
    """torch's fused one."""
    UNMASKED = "unmasked"
    """The same without mask tensors, where the order of the tokens says enough."""
    EAGER = "eager"
    """Plain products and a softmax."""
    FLEX = "flex"
    """FlexAttention."""


class Pipeline(StrEnum):
    """Where the batches that throughput is measured on come from."""

    RESIDENT = "resident"
    """Prepared beforehand, on the device: what is timed is the compute alone."""
    REAL = "real"
    """The workload's own loader, as a training job would have it."""


WITH_CUDAGRAPHS = {
    Mode.DEFAULT: Mode.REDUCE_OVERHEAD,
    Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS: Mode.MAX_AUTOTUNE,
}
"""The mode that is another one with CUDA graphs (`torch._inductor.list_mode_options`)."""

WITHOUT_CUDAGRAPHS = {graphed: plain for plain, graphed in WITH_CUDAGRAPHS.items()}


def resolve_mode(given: Mode | None, cudagraphs: bool | None) -> tuple[Mode, bool]:
    """The mode and whether it uses CUDA graphs, from whichever of the two a person named.

    Raises:
        SettingsError: they contradict each other.
    """
    mode = given or Mode.DEFAULT
    if cudagraphs is None:
        return mode, mode in WITHOUT_CUDAGRAPHS
    if cudagraphs and mode in WITH_CUDAGRAPHS:
        if given is Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS:
            raise SettingsError("mode=max-autotune-no-cudagraphs contradicts cudagraphs=on; say mode=max-autotune")
        return WITH_CUDAGRAPHS[mode], True
    if not cudagraphs and mode in WITHOUT_CUDAGRAPHS:
        if mode is Mode.REDUCE_OVERHEAD:
            raise SettingsError("mode=reduce-overhead is CUDA graphs and contradicts cudagraphs=off; say mode=default")
        return WITHOUT_CUDAGRAPHS[mode], False
    return mode, cudagraphs
