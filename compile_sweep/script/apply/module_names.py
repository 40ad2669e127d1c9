"""Names of the modules that a script trains, as it has them itself."""

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_sweep.schema.causes.places import is_harness, is_installed
from compile_sweep.script.discover import Target, unwrapped


def name_as_the_script_does(targets: list[Target]) -> None:
    """Names targets by the script's global variables; otherwise by their class.

    Those that their class does not tell apart, as three of `nn.Sequential`, are named by local variables of the script's
    functions that run, and by attributes of `self` in its methods. Call it while the script trains.
    """
    _name_targets(targets, vars(sys.modules["__main__"]))
    named = Counter(target.name.partition(" ")[0] for target in targets)
    unclear = [
        target
        for target in targets
        if (own := type(target.module)).__name__ == target.name.partition(" ")[0]
        and (own.__module__.startswith("torch.nn.") or named[own.__name__] > 1)
    ]
    taken = {target.name for target in targets if target not in unclear}
    _name_targets(unclear, {name: value for name, value in _local_modules().items() if name not in taken})


def _local_modules() -> dict[str, nn.Module]:
    """Returns the modules that the script's running functions hold, by variables and attributes of `self`, the outermost's first.

    Of a module that is a part of another, such as the layer of a loop over layers, the path in that one is the name.
    """
    frames, frame = [], sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        path = frame.f_code.co_filename
        if frame.f_code.co_name != "<module>" and not (is_harness(path) or is_installed(path)):
            frames.append(frame)
    found: dict[str, Any] = {}
    for frame in reversed(frames):
        variables = dict(frame.f_locals)
        owner = variables.pop("self", None)
        if isinstance(owner, nn.Module):
            variables |= dict(owner.named_children())
        elif hasattr(owner, "__dict__"):
            variables |= vars(owner)
        found = {**variables, **found}
    modules = {name: value for name, value in found.items() if isinstance(value, nn.Module)}
    inside = {id(part) for module in modules.values() for at, part in module.named_modules() if at}
    return {name: module for name, module in modules.items() if id(module) not in inside}


def _name_targets(targets: list[Target], namespace: Mapping[str, Any]) -> None:
    """Names targets as the script does, by a variable that holds them or a module around them; otherwise by their class."""
    modules = {name: unwrapped(value) for name, value in namespace.items() if isinstance(value, nn.Module)}
    inner = {id(part): f"{name}.{at}" for name, module in modules.items() for at, part in module.named_modules() if at}
    for target in targets:
        held = (name for name, value in modules.items() if value is target.module)
        name = next(held, inner.get(id(target.module), type(target.module).__name__))
        taken = sum(other.name.partition(" ")[0] == name for other in targets)
        target.name = f"{name} {taken + 1}" if taken else name
