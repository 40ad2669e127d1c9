"""`CompileSettings`: one candidate of a sweep, as a pure, hashable, canonical value.

Two spellings of the same thing are equal: `mode=default, cudagraphs=on` is `mode=reduce-overhead`, because
`torch._inductor.list_mode_options` defines that mode so. A combination that cannot work raises `SettingsError` with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Self

from compile_sweep.schema.choices import (
    WITHOUT_CUDAGRAPHS,
    ActivationCheckpointing,
    Attention,
    Autocast,
    Dynamic,
    Float8Recipe,
    MatmulPrecision,
    MemoryFormat,
    Mode,
    OptimizerKind,
    Padding,
    Scope,
    SdpaKernel,
    Stance,
    resolve_mode,
    resolve_padding,
)
from compile_sweep.schema.ddp_settings import DdpSettings, check_ddp_with_scope, parse_ddp
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.part_settings import PartSettings, parse_parts, to_json_value
from compile_sweep.schema.setting_text import (  # fmt: skip
    DEFAULT_PAD_MULTIPLE,
    Scalar,
    Value,
    Values,
    as_torch_takes_it,
    check_name,
    describe,
    flatten,
    format_value,
    group_by_field,
    parse_choice,
    parse_fraction,
    parse_lengths,
    parse_options,
    parse_pairs,
    parse_switch,
    parse_torch_option,
    parser,
)
from compile_sweep.schema.shapes import ShapePolicy, make_policy

__all__ = [
    "RECOMPILE_LIMIT", "ActivationCheckpointing", "Attention", "Autocast", "CompileSettings", "Dynamic", "MatmulPrecision",
    "MemoryFormat", "Mode", "OptimizerKind", "Padding", "PartSettings", "Scope", "SdpaKernel",
]  # fmt: skip

RECOMPILE_LIMIT = 8
"""Number of graphs that torch keeps for one function before it runs it eagerly (`torch._dynamo.config.recompile_limit`)."""

DEFAULT_BUCKET_SIZE = 32
INDUCTOR = "inductor"


def _setting(
    values: Values,
    *,
    torch_default: object = None,
    compiles: bool = False,
    inductor: bool = False,
    inductor_option: str | None = None,
    config: str | None = None,
    in_label: bool = False,
) -> Any:
    """Declares a field of `CompileSettings` whose default is None. Everything that is specific to the field is said here.

    Args:
        values: Values of the field, as `setting_text.parser` takes them.
        torch_default: torch's own value, which is stored as None so that keys stay short.
        compiles: acts only on compiled code, so scope=eager refuses it.
        inductor: acts only with the Inductor backend.
        inductor_option: the option of `torch.compile` that the value is passed on as.
        config: the process-wide setting of torch that holds the value, as `dynamo.NAME`, `functorch.NAME` or `compiler.NAME`.
        in_label: the label names the field and its value.
    """
    metadata = {
        "parse": parser(values),
        "torch_default": torch_default,
        "compiles": compiles,
        "inductor": inductor or inductor_option is not None,
        "inductor_option": inductor_option,
        "config": config,
        "in_label": in_label,
    }
    return field(default=None, metadata=metadata)


def _parse_backend(name: str, value: Any) -> str:
    check_name(name, value)
    return str(value)


_parse_torch_options = partial(parse_options, parse=parse_torch_option)


CONFIG_MODULES = {"dynamo": "torch._dynamo.config", "functorch": "torch._functorch.config", "compiler": "torch.compiler.config"}
"""Fields that hold process-wide settings of torch by name, and the module that each sets."""

_DOTTED = {INDUCTOR: "options"} | {name: name for name in ("options", "parts", "workload", "ddp", *CONFIG_MODULES)}
"""First components of dotted names, and the fields that take the rest."""

_TIMES_KERNELS = ("max_autotune", "coordinate_descent_tuning")  # beginnings of the names of Inductor's options

_CONFIG_THAT_IS_FIELDS = {"dynamo.cache_size_limit": "recompile_limit", "dynamo.optimize_ddp": "ddp.optimize_ddp"}
"""Names in torch's configuration that a field stands for without declaring it as `config`."""

_OPTIONS_THAT_ARE_FIELDS = {
    "triton.cudagraphs": "cudagraphs",
    "shape_padding": "shape_padding",
    "max_autotune": "mode",
    "freezing": "workload.weights=frozen where the workload has that option",  # Dynamo reads it from the process's configuration
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSettings:
    """One way to compile a training step.

    A field left at None takes the default that goes with the other fields. From `fullgraph` on, None means that torch's or the
    workload's own choice is kept, or that the field does not apply.

    Raises:
        SettingsError: the fields cannot be combined; the message says why.
    """

    scope: Scope = Scope.FULL
    """eager: nothing; full: model and loss together; regional: each repeated block; modular: encoder, decoder, loss apart;
    nested: as full, with each repeated block compiled once inside it (`torch.compiler.nested_compile_region`)."""

    mode: Mode | None = _setting(Mode, compiles=True, inductor=True)
    """`torch.compile`'s mode. None for eager and for backends other than Inductor, otherwise `default`."""

    cudagraphs: bool | None = _setting(parse_switch)
    """Replay kernels as CUDA graphs. None takes what the mode implies. With scope=eager, of a script: capture the forward and
    backward of each module without compiling them."""

    dynamic: Dynamic | None = _setting(Dynamic, compiles=True)
    """static: one length; auto: torch decides; mark: `mark_dynamic`; true: `dynamic=True`; buckets: a static graph per bucket."""

    padding: Padding | None = _setting(Padding)
    """Pad to the maximum, to the longest row in the batch, or to the next bucket. None takes the default for `dynamic`."""

    pad_multiple: int | None = _setting("tokens")
    """Tokens. With padding=longest, round lengths up to a multiple of this. 1 only raises a length of 1 to `shortest`."""

    bucket_size: int | None = _setting("tokens", compiles=True)
    """Tokens. With dynamic=buckets, the buckets are the multiples of this up to the workload's maximum length."""

    optimizer: OptimizerKind = OptimizerKind.FOREACH
    """foreach: one kernel for several tensors; fused: one kernel per parameter group; compiled: `torch.compile` of the step;
    foreach_map: Adam written with `foreach_map` and compiled, which makes one kernel of it."""

    fullgraph: bool | None = _setting(parse_switch, torch_default=False, compiles=True, in_label=True)
    """Fail at a graph break instead of running in pieces."""

    backend: str | None = _setting(_parse_backend, torch_default=INDUCTOR, compiles=True)
    """A backend name that `torch.compile` accepts. None for Inductor."""

    shape_padding: bool | None = _setting(parse_switch, compiles=True, inductor_option="shape_padding", in_label=True)
    """Let Inductor pad matrix sizes to multiples that the hardware prefers. None leaves it to torch."""

    parts: tuple[tuple[str, PartSettings], ...] | None = _setting(lambda name, value: parse_parts(value), compiles=True)
    """With scope=modular: parts that have their own mode or dynamic strategy, by name. The others take the fields above.
    With other scopes: modules of a script that stay eager."""

    static_gradients: bool | None = _setting(parse_switch, torch_default=False, in_label=True)
    """Keep gradients at fixed addresses and zero them in place, so that CUDA graphs need not copy them."""

    dynamic_min: int | None = _setting("tokens", in_label=True)
    """Tokens. With scope=full and dynamic=mark, the lower bound given to the compiler; shorter batches are padded up to it."""

    dynamic_max: int | None = _setting("tokens", in_label=True)
    """Tokens. With scope=full and dynamic=mark, the upper bound given to the compiler."""

    recompile_limit: int | None = _setting(
        "graphs", torch_default=RECOMPILE_LIMIT, config="dynamo.recompile_limit", in_label=True
    )
    """Graphs torch keeps for one function. None for torch's own limit of 8."""

    unbacked: bool | None = _setting(parse_switch, torch_default=False, compiles=True, in_label=True)
    """With dynamic=mark, mark by `mark_unbacked`: the compiler may neither guard on a length nor specialize on one of 0 or 1."""

    buckets: tuple[int, ...] | None = _setting(parse_lengths, compiles=True)
    """Tokens. With dynamic=buckets, the bucket lengths themselves, instead of `bucket_size`."""

    group_window: int | None = _setting("batches", torch_default=1)
    """Batches. Samples of similar length within a window of this many batches are batched together. None keeps their order."""

    matmul_precision: MatmulPrecision | None = _setting(MatmulPrecision, torch_default=MatmulPrecision.HIGHEST, in_label=True)
    """Argument of `torch.set_float32_matmul_precision`. None for torch's default, highest."""

    autocast: Autocast | None = _setting(Autocast, in_label=True)
    """The dtype of autocast. None for the workload's own."""

    attention: Attention | None = _setting(Attention, in_label=True)
    """The attention implementation. None for the workload's own."""

    memory_format: MemoryFormat | None = _setting(MemoryFormat, in_label=True)
    """Order in memory of the weights and inputs of convolutions. None for contiguous (channels first), PyTorch's default."""

    sdpa_kernel: SdpaKernel | None = _setting(SdpaKernel, in_label=True)
    """The kernel that `scaled_dot_product_attention` uses on a GPU, where it can. None for the workload's or torch's choice."""

    float8: Float8Recipe | None = _setting(Float8Recipe, in_label=True)
    """Linear layers multiply in float8, by this recipe of torchao's. None for the precision that the model has."""

    activation_memory_budget: float | None = _setting(
        parse_fraction,
        torch_default=1.0,
        compiles=True,
        inductor=True,
        config="functorch.activation_memory_budget",
        in_label=True,
    )
    """Share of the activations' memory that compiled code may keep for the backward pass, from 0 (recompute what can be) to 1."""

    activation_checkpointing: ActivationCheckpointing | None = _setting(ActivationCheckpointing, in_label=True)
    """blocks: the activations inside each repeated block are computed again in the backward pass, eager or compiled. off: all are
    kept, although a script recomputes some.
    """

    accumulate: int | None = _setting("parts", torch_default=1, in_label=True)
    """Parts into which each batch is split along its samples, a forward and backward each, before one step of the optimizer."""

    options: tuple[tuple[str, Value], ...] | None = _setting(_parse_torch_options, compiles=True, inductor=True)
    """More Inductor options by name (`torch._inductor.list_options`), written `inductor.NAME=value`."""

    dynamo: tuple[tuple[str, Value], ...] | None = _setting(_parse_torch_options, compiles=True)
    """Settings of `torch._dynamo.config` by name, written `dynamo.NAME=value`."""

    functorch: tuple[tuple[str, Value], ...] | None = _setting(_parse_torch_options, compiles=True)
    """Settings of `torch._functorch.config`, AOTAutograd's, by name, written `functorch.NAME=value`."""

    compiler: tuple[tuple[str, Value], ...] | None = _setting(_parse_torch_options, compiles=True)
    """Settings of `torch.compiler.config` by name, written `compiler.NAME=value`."""

    workload: tuple[tuple[str, Scalar], ...] | None = _setting(parse_options)
    """Variations of the workload itself (`Workload.options`), written `workload.NAME=value`. None for its default form."""

    ddp: DdpSettings | None = _setting(lambda name, value: parse_ddp(value))
    """How several workers reduce gradients (`DistributedDataParallel`), written `ddp.NAME=value`. None keeps torch's choice."""

    compile_loss: bool | None = _setting(parse_switch, torch_default=False, compiles=True, in_label=True)
    """With scope=full, of a script: also compile the loss functions that it calls outside its modules."""

    use_cache: bool | None = _setting(parse_switch, torch_default=True)
    """off: while a script trains them, models of transformers make no cache of keys and values, which only generation reads."""

    autocast_experts: bool | None = _setting(parse_switch, torch_default=False, in_label=True)
    """on: of a script, the experts of transformers' mixtures are cast as well; autocast does not reach `grouped_mm`."""

    pad_to_multiple_of: int | None = _setting("tokens", torch_default=1)
    """Tokens. While a script trains modules that are called with `input_ids` and an `attention_mask`, texts are padded to
    multiples of this, and outputs are cut to their former length, so that batches have few shapes."""

    stance: Stance | None = _setting(Stance, compiles=True, in_label=True)
    """Run the first call eagerly, or by AOTAutograd alone, and compile what torch then knows to change as dynamic."""

    as_written: bool | None = _setting(parse_switch, torch_default=False)
    """With scope=eager, of a script: nothing is changed, and what the script compiles itself stays compiled."""

    def __post_init__(self) -> None:
        self._coerce()
        if self.as_written and (self.scope is not Scope.EAGER or self.cudagraphs or self.optimizer is not OptimizerKind.FOREACH):
            raise SettingsError("as_written leaves a script as it is, so it goes with scope=eager and no other setting")
        if self.compile_loss and self.scope is not Scope.FULL:
            raise SettingsError(f"compile_loss goes with scope=full, not scope={self.scope}; leave it out")
        if self.scope is Scope.EAGER:
            self._refuse_compiler_fields()
        else:
            self._settle_backend()
            if self.backend in (None, INDUCTOR):
                mode, cudagraphs = resolve_mode(self.mode, self.cudagraphs)
                self._set("mode", mode)
                self._set("cudagraphs", cudagraphs)
            if self.cudagraphs and self.dynamic is Dynamic.TRUE:
                raise SettingsError(
                    "dynamic=true makes every size symbolic, but a CUDA graph is captured for fixed sizes; "
                    "use dynamic=mark, static or buckets, or cudagraphs=off"
                )
            of_fields = {one.metadata["config"]: one.name for one in _DECLARED if one.metadata["config"]} | _CONFIG_THAT_IS_FIELDS
            for name, _ in self.written_config:
                if (field_name := of_fields.get(name)) is not None:
                    raise SettingsError(f"{name} has its own setting; use {field_name}")
            self._set("dynamic", self.dynamic or Dynamic.STATIC)
            if self.stance is not None and self.dynamic is not Dynamic.AUTO:
                raise SettingsError(f"stance finds out which sizes change, so it goes with dynamic=auto, not {self.dynamic}")
            if self.unbacked and not self.marks:
                raise SettingsError(f"unbacked is how dynamic=mark marks lengths, not dynamic={self.dynamic}; leave it out")
            for name, part in self.parts or ():
                part.check_against_whole(name, self.scope, self.mode, self.dynamic)
        self._settle_padding()
        self._check_bounds()
        if self.ddp is not None:
            check_ddp_with_scope(self.ddp, self.scope, fullgraph=self.fullgraph, static_gradients=self.static_gradients)
        for declared in _DECLARED:
            default = declared.metadata["torch_default"]
            if default is not None and getattr(self, declared.name) == default:
                self._set(declared.name, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompileSettings):
            return NotImplemented
        # Python says that 1 == True == 1.0, but an Inductor option accepts only one of them, and their keys differ.
        return _values(self) == _values(other) and (self is other or self.key == other.key)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds settings from fields as `to_dict` or a person wrote them; names may be dotted as in a key.

        Raises:
            SettingsError: an unknown field or value, or a combination that cannot work.
        """
        return cls(**group_by_field(values, [f.name for f in fields(cls)], _DOTTED))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `key`, or a part of it such as `scope=regional,dynamic=auto`.

        Raises:
            SettingsError: The fields are invalid, as in `from_dict`, or the text is not a list of `field=value`.
        """
        return cls.from_dict(dict(parse_pairs(text)))

    @property
    def key(self) -> str:
        """Canonical text: the same for equal settings, different for different ones, and readable by `parse`."""
        named = {INDUCTOR if name == "options" else name: value for name, value in self.fields_that_apply().items()}
        return ",".join(f"{name}={format_value(value)}" for name, value in flatten(named))

    @property
    def label(self) -> str:
        """Description for a person, without defaults."""
        return ", ".join(describe(self).values())

    @property
    def compiles_whole(self) -> bool:
        """Whether the model is compiled as a whole, with its loss."""
        return self.scope in (Scope.FULL, Scope.NESTED)

    @property
    def changes_blocks(self) -> bool:
        """Whether something other than compiling it apart is done to each repeated block of the model."""
        return self.scope is Scope.NESTED or self.activation_checkpointing is ActivationCheckpointing.BLOCKS

    @property
    def needs_blocks(self) -> bool:
        """Whether anything is done to each repeated block of the model."""
        return self.scope is Scope.REGIONAL or self.changes_blocks

    def without_blocks(self, whose: str) -> str:
        """Says that there are no repeated blocks for what these settings do to each."""
        if self.scope in (Scope.REGIONAL, Scope.NESTED):
            return f"scope={self.scope}: {whose} has no repeated blocks; use scope=full"
        return f"activation_checkpointing={self.activation_checkpointing}: {whose} has no repeated blocks; leave it out"

    @property
    def written_config(self) -> list[tuple[str, Value]]:
        """Lists the process-wide settings of torch that were written by name, such as `dynamo.assume_static_by_default`."""
        return [(f"{module}.{name}", value) for module in CONFIG_MODULES for name, value in getattr(self, module) or ()]

    @property
    def config(self) -> dict[str, Value]:
        """Returns the process-wide settings of torch by their full names, including those that a field stands for."""
        by_field = [(one.metadata["config"], getattr(self, one.name)) for one in _DECLARED if one.metadata["config"]]
        found = [*self.written_config, *((name, value) for name, value in by_field if value is not None)]
        split = [(*name.partition("."), value) for name, value in found]
        return {f"{CONFIG_MODULES[module]}.{name}": value for module, _, name, value in split}

    @property
    def claims_cudagraphs(self) -> bool:
        """Whether any part of the step should be replayed as CUDA graphs."""
        return bool(self.cudagraphs) or any(part.mode in WITHOUT_CUDAGRAPHS for _, part in self.parts or ())

    @property
    def compiles_graphs(self) -> bool:
        """Whether compiled code should be replayed as CUDA graphs; scope=eager captures modules as they are."""
        return self.claims_cudagraphs and self.scope is not Scope.EAGER

    @property
    def is_unchanged_script(self) -> bool:
        """Whether a script runs as it is, which a sweep of it begins with and compares others with."""
        return bool(self.as_written) and self.batch_size is None

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay at their addresses: what a CUDA graph returned is overwritten when the graph runs again."""
        return bool(self.static_gradients or (self.accumulate and self.claims_cudagraphs))

    @property
    def batch_size(self) -> int | None:
        """Samples per step and worker; None for the workload's own batch size."""
        value = dict(self.workload or ()).get("batch_size")
        return value if type(value) is int else None

    def with_batch_size(self, size: int | None) -> Self:
        """Returns the settings with another batch size; None for the workload's own."""
        others = [option for option in self.workload or () if option[0] != "batch_size"]
        chosen = others if size is None else [*others, ("batch_size", size)]
        return replace(self, workload=tuple(sorted(chosen)) or None)

    @property
    def tunes(self) -> bool:
        """Whether Inductor times variants of its kernels, as max-autotune and coordinate descent do."""
        modes = {self.mode, *(part.mode for _, part in self.parts or ())}
        by_option = any(name.startswith(_TIMES_KERNELS) and value is True for name, value in self.options or ())
        return by_option or bool(modes & {Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS})

    @property
    def draws_eagers(self) -> bool:
        """Whether compiled code draws eager's random numbers; Inductor has its own, unless fallback_random=on."""
        return self.backend in ("eager", "aot_eager") or dict(self.options or ()).get("fallback_random") is True

    @property
    def marks(self) -> bool:
        """Whether any part is compiled with `mark_dynamic`."""
        return self.dynamic is Dynamic.MARK or any(part.dynamic is Dynamic.MARK for _, part in self.parts or ())

    @property
    def shortest(self) -> int:
        """Fewest tokens that a batch is padded to with padding=longest.

        It is at least two if varying sizes are compiled: torch specializes on a size of 1, and rejects one that is marked.
        """
        least = 2 if self.pad_multiple == 1 and self.scope is not Scope.EAGER else 1
        return max(self.dynamic_min or 1, least)

    @property
    def inductor_options(self) -> dict[str, Value]:
        """Returns Inductor's options by its own names: those that fields stand for and those written `inductor.NAME=value`."""
        by_field = {
            one.metadata["inductor_option"]: getattr(self, one.name) for one in _DECLARED if one.metadata["inductor_option"]
        }
        written = {name: as_torch_takes_it(name, value) for name, value in self.options or ()}
        return written | {name: value for name, value in by_field.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Every field as a JSON value; None where the field does not apply or torch's choice is kept."""
        return {f.name: to_json_value(getattr(self, f.name)) for f in fields(self)}

    def fields_that_apply(self) -> dict[str, Any]:
        """`to_dict` without the fields that are None."""
        return {name: value for name, value in self.to_dict().items() if value is not None}

    def shape_policy(self, max_length: int, min_length: int = 1) -> ShapePolicy:
        """Returns the policy that these settings batch and pad by, for batches of `min_length` to `max_length` tokens."""
        buckets = self.buckets or (self.bucket_size if self.padding is Padding.BUCKETS else None)
        multiple = self.pad_multiple if self.padding is Padding.LONGEST else None
        window, shortest = self.group_window, self.shortest
        return make_policy(
            max_length, multiple=multiple, buckets=buckets, shortest=shortest, min_length=min_length, window=window
        )

    def eager_counterpart(self) -> Self:
        """Returns the eager settings of the same precision that a run is compared with, on the same batches.

        They use the workload's own attention, because another implementation must give the same numbers, reduce gradients the
        same way, and accumulate as many parts, because a mean over parts may weigh samples otherwise than one over the batch.
        """
        # Another memory format, attention kernel or float8 is part of the setting under test, so the reference has none of them.
        precision: dict[str, Any] = {"matmul_precision": self.matmul_precision, "autocast": self.autocast}
        ddp = self.ddp.for_eager() if self.ddp is not None else None
        return type(self)(scope=Scope.EAGER, workload=self.workload, accumulate=self.accumulate, ddp=ddp, **precision)

    def num_graphs(self, max_length: int, min_length: int = 1) -> int:
        """Returns how many graphs the compiler should build of each compiled function."""
        if self.scope is Scope.EAGER:
            return 0
        if self.dynamic is Dynamic.BUCKETS:
            return len(self.shape_policy(max_length, min_length).lengths())
        # auto builds a static graph first, then, once a length has changed, a dynamic one
        return 2 if self.dynamic is Dynamic.AUTO and min_length < max_length else 1

    def validate_for(self, max_length: int, min_length: int = 1) -> None:
        """Refuses settings that cannot work with batches of `min_length` to `max_length` tokens."""
        if min_length == max_length:
            self._refuse_lengths()
            return
        limit = self.recompile_limit or RECOMPILE_LIMIT
        if self.scope is not Scope.EAGER and (graphs := self.num_graphs(max_length, min_length)) > limit:
            smallest = -(-max_length // limit)
            what = f"bucket_size={self.bucket_size}" if self.bucket_size else f"{graphs} buckets"
            raise SettingsError(
                f"{what} makes {graphs} graphs for up to {max_length} tokens, above torch's recompile limit of {limit}, beyond "
                f"which it runs eagerly; use {smallest} or more tokens per bucket, or set recompile_limit={graphs}"
            )
        for name in ("bucket_size", "pad_multiple", "dynamic_min"):
            if (tokens := getattr(self, name)) is not None and tokens > max_length:
                raise SettingsError(f"{name}={tokens} is above the workload's {max_length} tokens; use less")
        if self.dynamic_max is not None and self.dynamic_max < max_length:
            raise SettingsError(f"dynamic_max={self.dynamic_max} is below the workload's {max_length} tokens; use at least that")
        if self.buckets is not None and self.buckets[-1] != max_length:
            raise SettingsError(f"buckets={format_value(self.buckets)} must end with the workload's {max_length} tokens")

    def for_lengths_below_the_multiple(self, max_length: int) -> Self:
        """Returns the settings for batches so short that rounding up to the usual multiple would leave a single length."""
        is_short = self.pad_multiple == DEFAULT_PAD_MULTIPLE > max_length
        return replace(self, pad_multiple=1) if is_short else self

    def for_one_shape(self) -> Self:
        """Returns the settings for batches that all have one shape, which no padding changes."""
        padding = Padding.MAX if self.scope is Scope.EAGER else self.padding
        return replace(self, padding=padding, pad_multiple=None)

    def _refuse_lengths(self) -> None:
        one_shape = "every batch of this workload has one shape"
        if self.marks or self.dynamic is Dynamic.BUCKETS:
            name = Dynamic.BUCKETS if self.dynamic is Dynamic.BUCKETS else Dynamic.MARK
            raise SettingsError(
                f"dynamic={name} is for lengths that change, and {one_shape}; use auto, torch's default, or static"
            )
        if self.pad_multiple not in (None, DEFAULT_PAD_MULTIPLE):
            raise SettingsError(f"pad_multiple={self.pad_multiple} pads lengths, and {one_shape}; leave it out")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen after construction

    def _coerce(self) -> None:
        self._set("scope", parse_choice("scope", Scope, self.scope))
        self._set("optimizer", parse_choice("optimizer", OptimizerKind, self.optimizer))
        for declared in _DECLARED:
            if (value := getattr(self, declared.name)) is not None:
                self._set(declared.name, declared.metadata["parse"](name=declared.name, value=value))

    def _refuse_compiler_fields(self) -> None:
        for declared in _DECLARED:
            name, acts_on_code = declared.name, declared.metadata["compiles"]
            if acts_on_code and getattr(self, name) not in (None, False):
                raise SettingsError(f"scope=eager compiles nothing that {name} could act on; leave {name} out")
            if acts_on_code or (name == "cudagraphs" and not self.cudagraphs):
                self._set(name, None)
        if self.recompile_limit is not None:
            raise SettingsError("scope=eager never recompiles; leave recompile_limit out")

    def _settle_backend(self) -> None:
        if self.backend in (None, INDUCTOR):
            for name, _ in self.options or ():
                if name in _OPTIONS_THAT_ARE_FIELDS:
                    raise SettingsError(f"inductor.{name} has its own setting; use {_OPTIONS_THAT_ARE_FIELDS[name]}")
            return
        for declared in _DECLARED:
            name = declared.name
            if declared.metadata["inductor"] and getattr(self, name) is not None:
                raise SettingsError(f"{name} belongs to Inductor, and backend={self.backend} has none; leave {name} out")
        if any(part.mode for _, part in self.parts or ()):
            raise SettingsError(f"a part's mode belongs to Inductor, and backend={self.backend} has none; leave it out")
        graphed = self.backend == "cudagraphs"
        if self.cudagraphs not in (None, graphed):
            uses = "always uses" if graphed else "cannot use"
            raise SettingsError(f"backend={self.backend} {uses} CUDA graphs; leave cudagraphs out")
        self._set("cudagraphs", graphed)

    def _settle_padding(self) -> None:
        self._set("padding", resolve_padding(self.padding, self.scope, self.dynamic))
        if self.padding is Padding.LONGEST:
            self._set("pad_multiple", self.pad_multiple or DEFAULT_PAD_MULTIPLE)
        elif self.pad_multiple is not None:
            raise SettingsError(f"pad_multiple acts only with padding=longest, not padding={self.padding}; leave it out")
        for name in ("bucket_size", "buckets"):
            if self.dynamic is not Dynamic.BUCKETS and getattr(self, name) is not None:
                raise SettingsError(f"{name} acts only with dynamic=buckets, not dynamic={self.dynamic}; leave it out")
        if self.bucket_size and self.buckets:
            raise SettingsError("bucket_size and buckets both define the buckets; leave one of them out")
        if self.dynamic is Dynamic.BUCKETS and not self.buckets:
            self._set("bucket_size", self.bucket_size or DEFAULT_BUCKET_SIZE)

    def _check_bounds(self) -> None:
        for name in ("dynamic_min", "dynamic_max"):
            if getattr(self, name) is None:
                continue
            if not self.marks:
                raise SettingsError(f"{name} is a bound for dynamic=mark, not dynamic={self.dynamic}; leave it out")
            if not self.compiles_whole:
                others = f"with scope={self.scope} other dimensions change with it, such as twice the length"
                raise SettingsError(f"{name} bounds the length of a batch, but {others}; leave it out, or use scope=full")
        if self.dynamic_min and self.dynamic_max and self.dynamic_min >= self.dynamic_max:
            raise SettingsError(f"dynamic_min={self.dynamic_min} must be below dynamic_max={self.dynamic_max}")
        if self.dynamic_max is not None and self.dynamic_max <= 2:
            raise SettingsError(f"dynamic_max={self.dynamic_max} must be above 2, the smallest size that torch makes dynamic")
        if self.static_gradients and self.scope is Scope.EAGER and self.optimizer in (OptimizerKind.FOREACH, OptimizerKind.FUSED):
            raise SettingsError("static_gradients only helps compiled code, and nothing is compiled; leave it out")


_DECLARED = [declared for declared in fields(CompileSettings) if declared.metadata]
_values = attrgetter(*(f.name for f in fields(CompileSettings)))
