"""What to try for a setting that diverges, as a sentence and as settings that are worth a trial of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch._functorch import config as functorch_config

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.numerics.references import References
from compile_sweep.harness.numerics.tolerance import FLOAT32_ROUNDING
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.schema.causes.guards import advice_on_stale_number
from compile_sweep.schema.settings import CompileSettings, Scope

_EAGER_LEVERS = (
    "attention",
    "memory_format",
    "matmul_precision",
    "sdpa_kernel",
    "float8",
    "activation_checkpointing",
    "optimizer",
)
"""Fields that change how eager code computes."""

_MIX = "triton.mix_order_reduction"
_MIXED = f"inductor.{_MIX}=off, which leaves out gradients of norms that share a scale or shift (pytorch 193061)"

_LAYOUT = "layout_optimization"
_LAID_OUT = f"inductor.{_LAYOUT}=off, if the model has convolutions"

_ORDERING = "loop_ordering_after_fusion"


class Advice(NamedTuple):
    """What to try, and what of it is worth a trial, as in `Numerics`."""

    text: str | None
    remedy: str | None = None


def what_to_try(
    references: References,
    settings: CompileSettings,
    recompiles: Sequence[str],
    unsynchronized: Sequence[str],
    *,
    changed: Sequence[str] = (),
    changed_before: Sequence[str] = (),
    changed_in_classes: Sequence[str] = (),
    compiling_branches: Sequence[str] = (),
    is_wrong: bool,
    is_script: bool,
    on_gpu: bool,
) -> Advice:
    """Returns what to try for a setting that diverges; what is known to be at fault comes first.

    Args:
        recompiles: Its recompiles.
        unsynchronized: Its kernels that read back what they store without a barrier.
        changed: Tensors that its forward reads and then changes in place.
        changed_before: Tensors that its forward changes in place and then reads.
        changed_in_classes: Attributes of classes that changed during the run.
        compiling_branches: Functions of the user's that ask whether they are being compiled.
        is_wrong: Whether its gradients are known not to belong to its loss, or not to be eager's.
    """
    advice = _advice(references, settings, recompiles, is_wrong=is_wrong, is_script=is_script, on_gpu=on_gpu)
    advice = _with_unsynchronized(advice, unsynchronized, settings)
    advice = _with_redrawn(advice, references.eager, settings)
    advice = _with_stale_class(advice, changed_in_classes, settings)
    advice = _with_branches(advice, compiling_branches, settings)
    changed_before = changed_before if settings.scope is not Scope.EAGER else ()
    if changed:  # all are named at once, because one that is left may be the one at fault
        names = list(dict.fromkeys((*changed, *changed_before)))
        return _put_first(advice_on_changed(names), advice, advice.remedy)
    return _put_first(advice_on_changed_before(changed_before), advice, advice.remedy) if changed_before else advice


def advice_on_changed_before(names: Sequence[str]) -> str:
    """Says what to write instead where the forward changes tensors in place and then reads them."""
    new = "self.{0} = self.{0} + 1 or torch.lerp(self.{0}, new, 0.1)"
    return (
        f"{_assign_anew(new, names)}: the forward reads it after the change, and the backward pass that torch 2.13 compiles may "
        "make the same change once more"
    )


def advice_on_changed(names: Sequence[str]) -> str:
    """Says what to write instead where the forward reads tensors and then changes them in place."""
    return (
        f"{_assign_anew('self.{0} = torch.lerp(self.{0}, new, 0.1)', names)}: the forward has read it, and the compiled backward "
        "pass may read it again, even if the forward made a clone (pytorch 197039)"
    )


def _assign_anew(code: str, names: Sequence[str]) -> str:
    others = f" (and so {', '.join(names[1:3])})" if len(names) > 1 else ""
    new = code.format(names[0].rpartition(".")[2])
    return (
        f"assign a new tensor, as in {new}, instead of changing {names[0]} in place{others}, or change it after the backward pass"
    )


def _advice(
    references: References,
    settings: CompileSettings,
    recompiles: Sequence[str],
    *,
    is_wrong: bool,
    is_script: bool,
    on_gpu: bool,
) -> Advice:
    bisect = "--bisect with this setting, which names the module"
    options, uses_inductor = settings.inductor_options, settings.backend is None
    if is_wrong and settings.scope is Scope.NESTED:
        return Advice("use scope=full: torch computes wrong gradients of nested compile regions for some models, such as GPT-2")
    if is_wrong:
        others = [
            *([] if is_script else [f"{bisect}, then scope=regional or parts.NAME.compile=off, which leave parts eager"]),
            *(["mode=default, which has no CUDA graphs"] if settings.claims_cudagraphs else []),
            *(["scope=regional"] if is_script and settings.compiles_whole else []),
        ]
        others = others or ["backend=aot_eager, which shows whether Inductor's code is at fault"]
        named = {_LAYOUT: _LAID_OUT, _MIX: _MIXED}
        named = {
            option: text
            for option, text in named.items()
            if uses_inductor and option not in options and (on_gpu or option != _MIX)
        }
        text = f"try {'; '.join([*others, *named.values()])}"
        return Advice(text, ",".join(f"inductor.{option}=off" for option in named) or None)
    if stale := advice_on_stale_number(recompiles):
        return Advice(stale)
    if settings.scope is Scope.EAGER:
        eager = CompileSettings(scope=Scope.EAGER)
        pulled = [name for name in _EAGER_LEVERS if getattr(settings, name) != getattr(eager, name)]
        together = len(pulled) > 1
        return Advice(f"try it without {' or without '.join(pulled)}, to see which is at fault" if together else None)
    rounds = references.rounding > FLOAT32_ROUNDING
    possible = [
        (uses_inductor and rounds, "emulate_precision_casts", "inductor.emulate_precision_casts=on, which rounds as eager does"),
        (
            uses_inductor and references.eager.random,
            "fallback_random",
            "inductor.fallback_random=on, which draws eager's random numbers",
        ),
        (
            uses_inductor,
            "pattern_matcher",
            "inductor.pattern_matcher=off, because before 2.15 torch's rewrites lose alpha in x.add(a @ b, alpha=0.1) and addmm",
        ),
        (uses_inductor and on_gpu, _MIX, _MIXED),
        (uses_inductor, _LAYOUT, _LAID_OUT),
        (uses_inductor, "", "backend=aot_eager, which shows whether Inductor's code is at fault"),
        (not is_script, "", bisect),
    ]
    tries = {option or text: text for applies, option, text in possible if applies and option not in options}
    # Together they cost one trial. fallback_random mends nothing, and layout_optimization=off makes convolutions slow.
    mending = {"emulate_precision_casts": "on", "pattern_matcher": "off", _MIX: "off"}
    remedy = ",".join(f"inductor.{option}={value}" for option, value in mending.items() if option in tries)
    return Advice(f"try {'; '.join(tries.values())}" if tries else None, remedy or None)


def _with_unsynchronized(found: Advice, kernels: Sequence[str], settings: CompileSettings) -> Advice:
    """Returns the advice on kernels that read back what they store, if there are any, before other advice."""
    if not kernels or settings.backend is not None or _ORDERING in settings.inductor_options:
        return found
    why = (
        f"Inductor's kernel {kernels[0]} reads back what it has just stored, without a barrier, and may read what the step "
        "before left there (pytorch 190517)"
    )
    return _put_first(f"try inductor.{_ORDERING}=off: {why}", found, f"inductor.{_ORDERING}=off")


def _put_first(first: str, found: Advice, remedy: str | None) -> Advice:
    return Advice(f"{first}; or {found.text}" if found.text else first, remedy)


def _with_redrawn(found: Advice, eager: Trajectory, settings: CompileSettings) -> Advice:
    """Returns the advice on random numbers that a memory budget has drawn again in the backward pass, before other advice."""
    chosen = settings.activation_memory_budget
    budget = functorch_config.activation_memory_budget if chosen is None else chosen
    if budget >= 1 or not eager.random or settings.scope is Scope.EAGER:
        return found
    name = "activation_memory_budget"
    what = f"set torch._functorch.config.{name} = 1" if chosen is None else f"try it without {name}"
    why = f"at {budget:g} the backward pass may draw other random numbers for dropout than the forward (pytorch 190758)"
    return _put_first(f"{what}: {why}", found, found.remedy)


def _with_branches(found: Advice, branches: Sequence[str], settings: CompileSettings) -> Advice:
    """Returns the advice on code that does something else while it is compiled, if there is any, before other advice."""
    if not branches or settings.scope is Scope.EAGER:
        return found
    others = f" (and {len(branches) - 1} more)" if len(branches) > 1 else ""
    asks = f"{branches[0]}{others} asks torch.compiler.is_compiling()"
    why = "what it computes in only one of both cases makes compiled training another than eager"
    return _put_first(f"compute the same in both branches where {asks}: {why}", found, found.remedy)


_FOLLOWS_CLASSES = (2, 13)  # first version of torch whose compiled code notices that an attribute of a class changed


def _with_stale_class(found: Advice, changed: Sequence[str], settings: CompileSettings) -> Advice:
    """Returns the advice on attributes of classes that change, where torch does not notice it, before other advice."""
    if not changed or torch_version() >= _FOLLOWS_CLASSES or settings.scope is Scope.EAGER:
        return found
    own = changed[0].rpartition(".")[2]
    why = "before torch 2.13 compiled code does not notice that an attribute of a class changed (pytorch 176851)"
    return _put_first(f"keep {changed[0]} in the model, as self.{own}, or in a global of a file: {why}", found, found.remedy)
