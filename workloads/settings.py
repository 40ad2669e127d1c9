"""`CompileSettings`: one candidate of a sweep, as a pure, hashable, canonical value.

Two spellings of the same thing are equal: `mode=default, cudagraphs=on` is `mode=reduce-overhead`, because that mode is
nothing else (`torch._inductor.list_mode_options`). What cannot be combined is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from workloads.errors import SettingsError
from workloads.shapes import PadToBuckets, PadToLongest, PadToMax, ShapePolicy, uniform_buckets

RECOMPILE_LIMIT = 8
"""Graphs torch keeps for one function before it gives up and runs it eagerly (`torch._dynamo.config.recompile_limit`)."""

DEFAULT_PAD_MULTIPLE = 8
DEFAULT_BUCKET_SIZE = 32


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


_WITH_CUDAGRAPHS = {
    Mode.DEFAULT: Mode.REDUCE_OVERHEAD,
    Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS: Mode.MAX_AUTOTUNE,
}
_WITHOUT_CUDAGRAPHS = {graphed: plain for plain, graphed in _WITH_CUDAGRAPHS.items()}

_NATURAL_PADDING = {
    Dynamic.STATIC: Padding.MAX,
    Dynamic.AUTO: Padding.LONGEST,
    Dynamic.MARK: Padding.LONGEST,
    Dynamic.TRUE: Padding.LONGEST,
    Dynamic.BUCKETS: Padding.BUCKETS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSettings:
    """One way to compile a training step.

    A field left at None takes the only or the usual value that goes with the others; after construction every field that
    applies has its value, and a field that does not apply is None.

    Raises:
        SettingsError: the fields cannot be combined; the message says why.
    """

    scope: Scope = Scope.FULL
    """eager: nothing; full: model and loss as one; regional: each repeated block; modular: encoder, decoder, loss apart."""

    mode: Mode | None = None
    """`torch.compile`'s mode; None for eager, otherwise default."""

    cudagraphs: bool | None = None
    """Replay kernels as CUDA graphs; None takes what the mode implies."""

    dynamic: Dynamic | None = None
    """static: one length; auto: torch decides; mark: `mark_dynamic`; true: `dynamic=True`; buckets: one static graph each."""

    padding: Padding | None = None
    """max, longest in the batch, or the next bucket; None takes what goes with `dynamic`."""

    pad_multiple: int | None = None
    """Tokens; with padding=longest, lengths are rounded up to a multiple of this. 1 rounds nothing."""

    bucket_size: int | None = None
    """Tokens; with dynamic=buckets, buckets are its multiples up to the workload's maximum length."""

    optimizer: OptimizerKind = OptimizerKind.FOREACH
    """foreach: one kernel for several tensors; fused: one kernel a group; compiled: `torch.compile` of the step."""

    def __post_init__(self) -> None:
        self._coerce()
        if self.scope is Scope.EAGER:
            self._refuse_compiler_fields()
        else:
            self._settle_mode()
            self._set("dynamic", self.dynamic or Dynamic.STATIC)
        self._settle_padding()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CompileSettings:
        """The settings with these fields, as `to_dict` or a person wrote them.

        Raises:
            SettingsError: an unknown field or value, or a combination that cannot work.
        """
        names = [f.name for f in fields(cls)]
        for name in values:
            if name not in names:
                raise SettingsError(f"no setting is called {name!r}; {_nearest(str(name), names)}")
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> CompileSettings:
        """The settings that `key`, or a part of it such as `scope=regional,dynamic=auto`, spells.

        Raises:
            SettingsError: as `from_dict`, and for text that is no list of `field=value`.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise SettingsError(f"{part!r} is no setting; write field=value, for example scope=full")
            if name.strip() in values:
                raise SettingsError(f"the setting {name.strip()!r} is given twice; give it once")
            values[name.strip()] = value.strip()
        return cls.from_dict(values)

    @property
    def key(self) -> str:
        """Canonical text: the same for equal settings, different for different ones, readable by `parse`."""
        return ",".join(f"{name}={_spelled(value)}" for name, value in self.fields_that_apply().items())

    @property
    def label(self) -> str:
        """Short text for a person, without what is usual."""
        words: list[str] = [self.scope]
        if self.mode is not None:
            words.append(self.mode)
        if self.dynamic is Dynamic.BUCKETS:
            words.append(f"buckets of {self.bucket_size}")
        elif self.dynamic is not None:
            words.append(f"dynamic={self.dynamic}" if self.dynamic is Dynamic.TRUE else self.dynamic)
        if self.scope is Scope.EAGER or self.pad_multiple not in (None, DEFAULT_PAD_MULTIPLE):
            words.append(f"pad to {self.padding}" + (f" ×{self.pad_multiple}" if self.pad_multiple else ""))
        if self.optimizer is not OptimizerKind.FOREACH:
            words.append(f"{self.optimizer} optimizer")
        return ", ".join(words)

    def to_dict(self) -> dict[str, str | int | bool | None]:
        """Every field with a JSON value; None where the field does not apply."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(v) if isinstance(v, StrEnum) else v for name, v in values.items()}

    def fields_that_apply(self) -> dict[str, str | int | bool]:
        """`to_dict` without the fields that do not apply."""
        return {name: value for name, value in self.to_dict().items() if value is not None}

    def shape_policy(self, max_length: int) -> ShapePolicy:
        """The policy these settings pad batches by, for sequences of at most `max_length` tokens."""
        if self.padding is Padding.MAX:
            return PadToMax(max_length=max_length)
        if self.padding is Padding.LONGEST:
            return PadToLongest(max_length=max_length, multiple=self.pad_multiple or 1)
        return PadToBuckets(buckets=uniform_buckets(max_length, self.bucket_size or DEFAULT_BUCKET_SIZE))

    def num_graphs(self, max_length: int) -> int:
        """Graphs the compiler is expected to build of each compiled function."""
        if self.scope is Scope.EAGER:
            return 0
        if self.dynamic is Dynamic.BUCKETS:
            return len(self.shape_policy(max_length).lengths())
        return 2 if self.dynamic is Dynamic.AUTO else 1  # auto builds a static graph first, then a dynamic one

    def validate_for(self, max_length: int) -> None:
        """Refuses what cannot work with sequences of at most `max_length` tokens.

        Raises:
            SettingsError: more buckets than the recompile limit, or a multiple or bucket longer than the sequences.
        """
        if self.scope is not Scope.EAGER and self.num_graphs(max_length) > RECOMPILE_LIMIT:
            smallest = -(-max_length // RECOMPILE_LIMIT)
            raise SettingsError(
                f"bucket_size={self.bucket_size} makes {self.num_graphs(max_length)} graphs of {max_length} tokens, above "
                f"torch's recompile limit of {RECOMPILE_LIMIT}, after which it runs eagerly; use {smallest} or more"
            )
        for name, tokens in (("bucket_size", self.bucket_size), ("pad_multiple", self.pad_multiple)):
            if tokens is not None and tokens > max_length:
                raise SettingsError(f"{name}={tokens} is above the workload's {max_length} tokens; use less")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the value is frozen for everyone else

    def _coerce(self) -> None:
        self._set("scope", _choice("scope", Scope, self.scope))
        self._set("optimizer", _choice("optimizer", OptimizerKind, self.optimizer))
        for name, kind in (("mode", Mode), ("dynamic", Dynamic), ("padding", Padding)):
            if (value := getattr(self, name)) is not None:
                self._set(name, _choice(name, kind, value))
        if self.cudagraphs is not None:
            self._set("cudagraphs", _switch("cudagraphs", self.cudagraphs))
        for name in ("pad_multiple", "bucket_size"):
            if (value := getattr(self, name)) is not None:
                self._set(name, _positive(name, value))

    def _refuse_compiler_fields(self) -> None:
        for name in ("mode", "dynamic", "bucket_size"):
            if getattr(self, name) is not None:
                raise SettingsError(f"scope=eager compiles no graph that {name} could act on; leave {name} out")
        if self.cudagraphs:
            raise SettingsError("scope=eager has no compiled graph to capture; leave cudagraphs out")
        self._set("cudagraphs", None)

    def _settle_mode(self) -> None:
        mode = self.mode or Mode.DEFAULT
        if self.cudagraphs is None:
            self._set("cudagraphs", mode in _WITHOUT_CUDAGRAPHS)
        elif self.cudagraphs and mode in _WITH_CUDAGRAPHS:
            if self.mode is Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS:
                raise SettingsError("mode=max-autotune-no-cudagraphs contradicts cudagraphs=on; say mode=max-autotune")
            mode = _WITH_CUDAGRAPHS[mode]
        elif not self.cudagraphs and mode in _WITHOUT_CUDAGRAPHS:
            if mode is Mode.REDUCE_OVERHEAD:
                raise SettingsError("mode=reduce-overhead is CUDA graphs and contradicts cudagraphs=off; say mode=default")
            mode = _WITHOUT_CUDAGRAPHS[mode]
        self._set("mode", mode)
        if self.cudagraphs and self.dynamic is Dynamic.TRUE:
            raise SettingsError(
                "dynamic=true makes every size symbolic, and a CUDA graph is captured for fixed sizes; "
                "use dynamic=mark, static or buckets, or cudagraphs=off"
            )

    def _settle_padding(self) -> None:
        natural = Padding.MAX if self.dynamic is None else _NATURAL_PADDING[self.dynamic]
        padding = self.padding or natural
        if self.scope is Scope.EAGER:
            if padding is Padding.BUCKETS:
                raise SettingsError("eager has no graph for a bucket; use padding=longest with pad_multiple=32, say")
        elif padding is not natural:
            raise SettingsError(_PADDING_CLASH[natural].format(dynamic=self.dynamic, padding=padding))
        self._set("padding", padding)
        if padding is Padding.LONGEST:
            self._set("pad_multiple", self.pad_multiple or DEFAULT_PAD_MULTIPLE)
        elif self.pad_multiple is not None:
            raise SettingsError(f"pad_multiple acts only with padding=longest, not padding={padding}; leave it out")
        if self.dynamic is Dynamic.BUCKETS:
            self._set("bucket_size", self.bucket_size or DEFAULT_BUCKET_SIZE)
        elif self.bucket_size is not None:
            raise SettingsError(f"bucket_size acts only with dynamic=buckets, not dynamic={self.dynamic}; leave it out")


_PADDING_CLASH = {
    Padding.MAX: "dynamic={dynamic} compiles one graph a length, which padding={padding} makes too many; use dynamic=buckets",
    Padding.LONGEST: "padding={padding} with dynamic={dynamic} leaves nothing dynamic; use dynamic=static or buckets",
    Padding.BUCKETS: "dynamic={dynamic} pads to its buckets and padding={padding} contradicts it; leave padding out",
}


def _choice(name: str, kind: type[StrEnum], value: object) -> StrEnum:
    try:
        return kind(str(value))
    except ValueError:
        options = [str(member) for member in kind]
        raise SettingsError(f"{name}={value} is none of {', '.join(options)}; {_nearest(str(value), options)}") from None


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("on", "off", "true", "false"):
        return value in ("on", "true")
    raise SettingsError(f"{name}={value} is neither on nor off")


def _positive(name: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={value} is no number of tokens; use a whole number of 1 or more")
    return value


def _spelled(value: str | int | bool | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _nearest(word: str, options: list[str]) -> str:
    close = get_close_matches(word, options, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(options)}"
