"""Makes a workload's optimizer with the user's function: over parameters, named ones or the model; one or several."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from compile_sweep.contract.arguments import parameters_of
from compile_sweep.schema.choices import optimizer_options
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.settings import OptimizerKind

OptimizerFn = Callable[..., Any]
"""Makes one or several optimizers, like the classes of `torch.optim`. Receives `foreach=` or `fused=` if it accepts them. Its
first argument is `model.parameters()` or, if it is called `named_parameters`, `named` or `model`, what that name says.
"""

_NAMED = ("named_parameters", "named_params", "named")


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers that step together, each over its own parameters, such as Muon for matrices and AdamW for the rest."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([weights for part in parts for group in part.param_groups for weights in group["params"]], {})
        self.parts = list(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes each optimizer's step, in order."""
        for part in self.parts:
            part.step()


def make_optimizer(
    make: OptimizerFn, model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]], kind: OptimizerKind
) -> Any:
    """Makes an optimizer with the user's function; SettingsError if it cannot be fused, WorkloadError if it makes none."""
    name = name_of(make)
    options = options_for(make, kind)
    parameters = list(parameters)
    given: Any
    match first_argument(make):
        case "model":
            given = model
        case called if called in _NAMED:
            given = parameters
        case _:
            given = (weights for _, weights in parameters)
    try:
        made = make(given, **options)
    except Exception as error:
        raise WorkloadError(f"optimizer_fn: {name} failed: {type(error).__name__}: {error}{_hint(name, error)}") from error
    own = {id(weights) for _, weights in parameters}
    parts = list(made.values()) if isinstance(made, Mapping) else list(made) if isinstance(made, list | tuple) else [made]
    for part in parts:
        if not isinstance(part, torch.optim.Optimizer):
            raise WorkloadError(
                f"optimizer_fn: {name} made {type(part).__name__}, no torch.optim.Optimizer; return one, or a list of them"
            )
        if any(one.name == "closure" and one.default is Parameter.empty for one in signature(part.step).parameters.values()):
            raise WorkloadError(f"optimizer_fn: {name_of(make)} needs a closure at each step; use one that steps without")
    if own and not any(id(weights) in own for part in parts for group in part.param_groups for weights in group["params"]):
        raise WorkloadError(
            f"optimizer_fn: {name} made an optimizer over other parameters than the model's, which would never train; make it of "
            "the parameters that it is given"
        )
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)


def _hint(name: str, error: Exception) -> str:
    if "Muon" in name or "2D" in str(error):
        return (
            "; Muon is for matrices: return [torch.optim.Muon([p for p in parameters if p.ndim == 2]), "
            "torch.optim.AdamW([p for p in parameters if p.ndim != 2])] from a function of the list of parameters"
        )
    return "; it is given model.parameters(), or, if its first argument is called model or named_parameters, those"


def first_argument(make: OptimizerFn) -> str:
    """Returns the name of the function's first free argument; empty if it is not known."""
    return next((name for name, one in parameters_of(make).items() if one.kind is not Parameter.KEYWORD_ONLY), "")


def options_for(make: OptimizerFn, kind: OptimizerKind) -> dict[str, bool]:
    """Returns the options of an optimizer kind that the optimizer accepts and does not set itself; fused must be one."""
    taken = parameters_of(make)
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in taken.values())
    preset = {name: taken[name].default for name in ("foreach", "fused") if name in taken}
    wanted = optimizer_options(kind)
    if "fused" in wanted:
        if "fused" not in preset and not takes_any:
            raise SettingsError(f"optimizer=fused: {name_of(make)} takes no fused=; leave optimizer=fused out")
        return {**wanted, "foreach": False} if preset.get("foreach") is True else wanted
    is_open = all(default is None for default in preset.values())
    return wanted if is_open and (takes_any or "foreach" in preset) else {}


def name_of(make: Any) -> str:
    """Returns the name of the class or function, also inside `partial`."""
    while isinstance(make, partial):
        make = make.func
    return getattr(make, "__name__", type(make).__name__)
