"""The values that fields of `CompileSettings` take, with torch's own names where torch has one.

`resolve_mode` reconciles the two ways to ask for CUDA graphs, `mode` and `cudagraphs`; `resolve_padding` reconciles padding and
`dynamic`.
"""

from enum import StrEnum

from compile_sweep.schema.errors import SettingsError


class Scope(StrEnum):
    """How much of the training step is compiled."""

    EAGER = "eager"
    FULL = "full"
    REGIONAL = "regional"
    MODULAR = "modular"
    NESTED = "nested"


class Mode(StrEnum):
    """The `mode` of `torch.compile`."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"
    LITE = "lite"
    """Graphs of eager's own kernels, almost without Inductor's passes, where the installed torch has it."""


class Dynamic(StrEnum):
    """How the compiler handles sequence lengths that change."""

    STATIC = "static"
    AUTO = "auto"
    MARK = "mark"
    TRUE = "true"
    BUCKETS = "buckets"


class Padding(StrEnum):
    """The length a batch is padded to."""

    MAX = "max"
    LONGEST = "longest"
    BUCKETS = "buckets"


class OptimizerKind(StrEnum):
    """The implementation of the optimizer's step."""

    FOREACH = "foreach"
    FUSED = "fused"
    COMPILED = "compiled"
    FOREACH_MAP = "foreach_map"


COMPILED_OPTIMIZERS = (OptimizerKind.COMPILED, OptimizerKind.FOREACH_MAP)  # kinds whose step is compiled

MOST_CAPTURED_SHAPES = 16
"""Kinds of calls, by shapes or values, that CUDA graphs without compiling are captured for; other calls run eagerly. With more,
the searcher tries no CUDA graphs: a Conformer's blocks, compiled with them, ran at a quarter of eager speed while shapes came.
"""


def optimizer_options(kind: OptimizerKind) -> dict[str, bool]:
    """Returns arguments for the optimizer's constructor. A compiled optimizer is a foreach one whose step is compiled later."""
    return {"fused": True} if kind is OptimizerKind.FUSED else {"foreach": True}


class MatmulPrecision(StrEnum):
    """The argument of `torch.set_float32_matmul_precision`."""

    HIGHEST = "highest"
    HIGH = "high"
    MEDIUM = "medium"


class Stance(StrEnum):
    """The stance of the compiler (`torch.compiler.set_stance`) that runs a function's first call without compiling it.

    From the second call torch knows which sizes change, so that dynamic=auto makes no graph of the first sizes alone.
    """

    EAGER_THEN_COMPILE = "eager_then_compile"
    AOT_EAGER_THEN_COMPILE = "aot_eager_then_compile"
    """Like `EAGER_THEN_COMPILE`, but AOTAutograd runs the first call, which keeps to an activation memory budget."""


class Autocast(StrEnum):
    """The dtype autocast runs in; fp16 brings a gradient scaler."""

    BF16 = "bf16"
    FP16 = "fp16"
    OFF = "off"


class Attention(StrEnum):
    """The attention implementation of a Hugging Face model."""

    SDPA = "sdpa"
    """torch's fused kernel."""
    UNMASKED = "unmasked"
    """The fused kernel without mask tensors, where causal order suffices."""
    EAGER = "eager"
    """Plain matrix products and a softmax."""
    FLEX = "flex"
    """FlexAttention."""


class MemoryFormat(StrEnum):
    """The memory order of tensors that have channels, by torch's names (`torch.memory_format`)."""

    CHANNELS_LAST = "channels_last"
    """For 4-D tensors, as convolutions on tensor cores prefer it."""
    CHANNELS_LAST_3D = "channels_last_3d"
    """For 5-D tensors, for volumes and videos."""

    @property
    def ndim(self) -> int:
        """Number of dimensions of the tensors that the format is for."""
        return 4 if self is MemoryFormat.CHANNELS_LAST else 5


class SdpaKernel(StrEnum):
    """The kernel that `torch.nn.functional.scaled_dot_product_attention` uses; see `torch.nn.attention.SDPBackend`."""

    FLASH = "flash"
    CUDNN = "cudnn"
    EFFICIENT = "efficient"
    MATH = "math"


class Float8Recipe(StrEnum):
    """How torchao scales the operands of float8 products in training, by its names (`Float8LinearRecipeName`)."""

    TENSORWISE = "tensorwise"
    """One scale for each tensor: the fastest."""
    ROWWISE = "rowwise"
    """One scale for each row: more accurate."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """As rowwise, with the weights' gradients in the model's own precision."""


class ActivationCheckpointing(StrEnum):
    """Which activations are recomputed in the backward pass instead of being kept (`torch.utils.checkpoint`)."""

    BLOCKS = "blocks"
    """Activations inside each repeated block; the block's inputs are kept."""
    OFF = "off"
    """None, although a script asks for it."""


class Pipeline(StrEnum):
    """Where the batches of the throughput measurement come from."""

    RESIDENT = "resident"
    """Prepared beforehand on the device: only the compute is timed."""
    REAL = "real"
    """The workload's own loader, as in a training job."""


WITH_CUDAGRAPHS = {
    Mode.DEFAULT: Mode.REDUCE_OVERHEAD,
    Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS: Mode.MAX_AUTOTUNE,
}
"""Each mode that has a counterpart with CUDA graphs, and that counterpart (`torch._inductor.list_mode_options`)."""

WITHOUT_CUDAGRAPHS = {graphed: plain for plain, graphed in WITH_CUDAGRAPHS.items()}


def resolve_mode(given: Mode | None, cudagraphs: bool | None) -> tuple[Mode, bool]:
    """Returns the mode and whether it uses CUDA graphs, from whichever was given; raises SettingsError if both contradict."""
    mode = given or Mode.DEFAULT
    if mode is Mode.LITE and cudagraphs:
        raise SettingsError("mode=lite has no variant with CUDA graphs; leave cudagraphs out, or use mode=reduce-overhead")
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


_DEFAULT_PADDING = {
    Dynamic.STATIC: Padding.MAX,
    Dynamic.AUTO: Padding.LONGEST,
    Dynamic.MARK: Padding.LONGEST,
    Dynamic.TRUE: Padding.LONGEST,
    Dynamic.BUCKETS: Padding.BUCKETS,
}

_PADDING_CONFLICTS = {
    Padding.MAX: "dynamic={dynamic} compiles one graph per length, too many with padding={padding}; use dynamic=buckets",
    Padding.LONGEST: "padding={padding} with dynamic={dynamic} leaves nothing dynamic; use dynamic=static or buckets",
    Padding.BUCKETS: "dynamic={dynamic} pads to its buckets, which padding={padding} contradicts; leave padding out",
}


def resolve_padding(given: Padding | None, scope: Scope, dynamic: Dynamic | None) -> Padding:
    """Returns the padding, or the dynamic strategy's default if none is given; raises SettingsError if they contradict."""
    default = Padding.MAX if dynamic is None else _DEFAULT_PADDING[dynamic]
    padding = given or default
    if scope is Scope.EAGER and padding is Padding.BUCKETS:
        raise SettingsError("scope=eager compiles no graph per bucket; use padding=longest with, say, pad_multiple=32")
    if scope is not Scope.EAGER and padding is not default:
        raise SettingsError(_PADDING_CONFLICTS[default].format(dynamic=dynamic, padding=padding))
    return padding
