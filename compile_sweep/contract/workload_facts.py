"""What a plan must know about a workload: plain values, because they come from another process. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from compile_sweep.contract.options import Option
from compile_sweep.schema.choices import Attention, MemoryFormat
from compile_sweep.schema.setting_text import Scalar

_WHOLE_NUMBER = "int"  # represents, in JSON, an option that accepts any integer


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """Facts about a workload in one size, or about a script, for which most are unknown before it runs."""

    max_length: int
    """Longest sequence, in tokens."""
    min_length: int = 1
    """Tokens in the shortest possible batch."""
    batch_size: int = 1
    """Samples per step and worker."""
    row_lengths: tuple[int, ...] = ()
    """Tokens of a representative sample of rows; empty if the workload does not say."""
    batch_lengths: tuple[int, ...] = ()
    """Tokens of the longest row in each batch, if `row_lengths` are not known; empty if not known either."""
    unpadded_reason: str | None = None
    """Why its batches are not padded; None if they are."""
    parts: tuple[str, ...] | None = None
    """Short names of what scope=modular compiles separately; None for any."""
    attentions: tuple[Attention, ...] = tuple(Attention)
    """Attention implementations that the workload can run."""
    workload: str = "workload"
    """Name of its class, for messages."""
    size: str = ""
    """One of its sizes."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Options of the workload itself that settings may vary."""
    job_options: frozenset[str] = frozenset()
    """Those `options` that change what a sample is."""
    has_own_step: bool = False
    """Whether its own function runs the backward pass, so that it is not compiled as a whole."""
    trains: bool = True
    """False for inference."""
    needs_gpu: Mapping[tuple[str, Scalar], str] = field(default_factory=dict)
    """Option values that need a GPU, with the reason."""
    memory_format: MemoryFormat | None = None
    """The memory format that the model's convolutions may gain from; None without convolutions."""
    has_blocks: bool | None = None
    """Whether the model has repeated blocks; None if that is not known."""
    regional_share: float | None = None
    """Compile time of scope=regional divided by that of scope=full, estimated from the repeated blocks that differ in
    structure or shapes: small if blocks repeat, above 1 if hardly any two are alike. None if it is not known.
    """
    kinds_of_blocks: int | None = None
    """Number of graphs that the forward of one class may take with scope=regional; None if it is not known."""
    num_weights: int | None = None
    """Number of the model's parameter tensors, with which compile time grows; None if it is not known."""
    num_operators: int | None = None
    """Number of operators with gradients in the forward of what a script trains; None if that is not known."""
    us_per_operator: float | None = None
    """Microseconds of a step of a script, as it is, for each of these operators; None if that is not known, or the device is
    behind with what was launched.
    """
    num_shapes: int | None = None
    """Number of shapes that a script's batches had; None if that is not known."""
    has_attention: bool | None = None
    """Whether the model computes attention; None if that is not known."""
    has_optimizer: bool | None = None
    """Whether a script steps an optimizer of torch's; None if that is not known."""
    has_fused: bool | None = None
    """Whether torch has a fused implementation of one of a script's optimizers; None if that is not known."""
    can_compile_optimizer: bool | None = None
    """Whether torch can compile one of a script's optimizers, which sparse gradients forbid; None if that is not known."""
    is_fused: bool = False
    """Whether all of a script's optimizers are fused as it is."""
    loops_over_weights: bool | None = None
    """Whether one of a script's optimizers is torch's and updates weight after weight, as Muon does; None if it is not known."""
    has_loss_outside: bool | None = None
    """Whether a script calls a loss function outside of its modules; None if that is not known."""
    can_compile: bool | None = None
    """Whether anything that a script trains can be compiled, which differentiating its gradients again forbids; None if that is
    not known.
    """
    recomputes: bool | None = None
    """Whether a script recomputes activations in the backward pass; None if that is not known."""
    makes_cache: bool | None = None
    """Whether a script's model makes a cache of keys and values while it trains; None if that is not known."""
    float32_experts: bool | None = None
    """Whether a script's model has experts that autocast leaves in float32; None if that is not known."""
    can_pad: bool | None = None
    """Whether a script's batches are texts that change in length and can be padded further; None if that is not known."""
    batches_change: bool | None = None
    """Whether a script's batches change in shape; None if that is not known."""
    shapes_recur: bool | None = None
    """Whether the shapes of a script's batches come again soon, which CUDA graphs need; None if that is not known."""
    autocasts: bool = False
    """Whether the products of a step on a GPU have less than float32's precision anyway: by autocast, weights of 16 bits, or
    TF32. Of a script its first trial tells, since many have an option for it that is off.
    """
    has_loader: bool = False
    """Whether it has an input pipeline for `--pipeline real`."""
    folder: str | None = None
    """The folder that contains its module."""
    is_script: bool = False
    """Whether it is a script, which pads and batches by itself."""

    @property
    def has_one_shape(self) -> bool:
        """Whether every batch has the same shape, so that none is padded."""
        return self.min_length == self.max_length

    @property
    def has_lengths(self) -> bool:
        """Whether batches are known, or may be expected, to differ in length."""
        return not self.has_one_shape and set(self.batch_lengths) != {self.max_length}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        options = {name: _WHOLE_NUMBER if isinstance(able, type) else list(able) for name, able in self.options.items()}
        needs_gpu = [[name, value, why] for (name, value), why in self.needs_gpu.items()]
        values = {field.name: getattr(self, field.name) for field in fields(WorkloadFacts)}
        return {**values, "options": options, "needs_gpu": needs_gpu, "job_options": sorted(self.job_options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores the facts from the result of `to_dict`."""
        parts, layout = values["parts"], values["memory_format"]
        return cls(
            **{
                **values,
                "row_lengths": tuple(values["row_lengths"]),
                "batch_lengths": tuple(values["batch_lengths"]),
                "parts": None if parts is None else tuple(parts),
                "attentions": tuple(map(Attention, values["attentions"])),
                "options": {name: int if able == _WHOLE_NUMBER else tuple(able) for name, able in values["options"].items()},
                "job_options": frozenset(values["job_options"]),
                "needs_gpu": {(name, value): why for name, value, why in values["needs_gpu"]},
                "memory_format": None if layout is None else MemoryFormat(layout),
            }
        )


ANY_LENGTH = 2**20
"""Replaces the longest sequence, which a script does not name, so that no setting is refused for being longer."""

SCRIPT_FACTS = WorkloadFacts(max_length=ANY_LENGTH, attentions=(), workload="ScriptWorkload", size="script", is_script=True)
"""What a plan knows about any script."""


def shown_name(name: str) -> str:
    """Returns the name of a batch's tensor as sentences show it: in quotes if it is a place in a tuple or list."""
    return repr(name) if name[:1].isdigit() else name
