"""Applies settings to training that continues: a sweep's winner, given by its folder, a file or text."""

import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from compile_sweep.contract.inspect_model import tensors_in
from compile_sweep.contract.installed_torch import import_inductor, torch_version
from compile_sweep.harness.source import fixes_sizes
from compile_sweep.schema import record as records
from compile_sweep.schema.journal import read_regular
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.part_settings import settings_of_part
from compile_sweep.schema.settings import CompileSettings, Dynamic, Scope
from compile_sweep.schema.short_names import resolve_name
from compile_sweep.schema.visible_text import for_terminal
from compile_sweep.script.apply.frozen import apply_to_discovered
from compile_sweep.script.apply.graph_memory import before_graphs
from compile_sweep.script.apply.in_place import (
    UNTIL_EXIT,
    OwnCompile,
    apply_to_losses,
    apply_to_modules,
    apply_to_optimizers,
    compiled_forward,
    process_wide,
    set_global_state,
)
from compile_sweep.script.apply.module_names import name_as_the_script_does
from compile_sweep.script.discover import Discovery, Shapes, Target, Watch, changing, leave_out, unwrapped
from compile_sweep.script.job import ScriptError, check_settings
from compile_sweep.script.session import current

Item = TypeVar("Item")

OBSERVED_CALLS = 3  # number of calls after which batches count as having one shape, if marks wait for two lengths


def settings_of(given: CompileSettings | str | Path) -> CompileSettings:
    """Returns the settings that a person names: as text, as a JSON file with a key `settings`, or as a sweep's folder.

    For a folder, these are the settings that its verdict recommends, as the sweep's last lines and `analysis.recommend` do;
    for `DIR:A7`, the settings with that ID.

    Raises:
        ScriptError: There are none, or no script can run under them.
        SettingsError: The text does not describe settings.
    """
    if isinstance(given, CompileSettings):
        found = given
    else:
        given = resolve_name(str(given))
        place = Path(given)
        if place.is_dir():
            found = _best_of(place)
        elif place.is_file():
            found = _stored(place)
        elif "=" in str(given):
            found = CompileSettings.parse(str(given))
        else:
            raise ScriptError(
                f"--settings {given}: there is no such folder or file; give a sweep's folder, a JSON file with settings, or text "
                "such as scope=full,dynamic=auto"
            )
    check_settings(found)
    return found


def _stored(file: Path) -> CompileSettings:
    try:
        values = json.loads(read_regular(file).decode("utf-8"))
        stored = values["settings"]
        return CompileSettings.parse(stored) if isinstance(stored, str) else CompileSettings.from_dict(stored)
    except OSError as error:
        raise ScriptError(f"{file} cannot be read ({error.strerror}); name a JSON file that can") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ScriptError(f'{file} holds no settings ({error}); it should be JSON like {{"settings": "scope=full"}}') from None


_VERDICT = (
    "import json, sys; from pathlib import Path; from analysis.final_summary import ending; ended = ending(Path(sys.argv[1])); "
    "print(json.dumps([ended.settings_key, ended.sentences]))"
)
"""Runs in a process of its own, so that training does not load report libraries; this package does not import the analysis."""


def _best_of(folder: Path) -> CompileSettings:
    """Returns the setting in the sweep's verdict; if the verdict is to stay, the unchanged script."""
    if not any(record.status is Status.OK for record in records.standing(records.read(folder)).values()):
        raise ScriptError(f"{folder} has no trial with a usable figure; name a sweep's folder that has one")
    paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    asked = subprocess.run(
        [sys.executable, "-P", "-c", _VERDICT, str(folder.absolute())],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ScriptError(f"the verdict on {folder} could not be had ({last}); name the setting itself, such as scope=full")
    settings_key, _ = json.loads(asked.stdout)
    return CompileSettings.parse(settings_key or "scope=eager,as_written=on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What was applied."""

    settings: CompileSettings
    modules: tuple[str, ...]  # compiled or captured modules, by name within the model
    optimizers: tuple[str, ...]  # classes of optimizers whose implementation changed

    def __str__(self) -> str:
        done = "captured" if self.settings.scope is Scope.EAGER else "compiled"
        what = [f"{len(self.modules)} modules {done}" if len(self.modules) != 1 else f"{self.modules[0]} {done}"]
        what += [f"{name} {self.settings.optimizer}" for name in self.optimizers]
        return f"{self.settings.label}: {', '.join(what) if self.modules or self.optimizers else 'nothing to change'}"


def apply(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    settings: CompileSettings | str | Path = "best.json",
) -> Applied:
    """Applies settings to a model and its optimizer, in place; call it before the first step.

    The model keeps its class, its attributes and the keys of its `state_dict`. In a sweep this does nothing, because the sweep
    applies settings. With dynamic=mark, and before torch 2.13 with every dynamic length, the model runs eagerly until two
    batches differ in a length, or some had the same one. A length that was never measured costs at most one compile.

    Args:
        model: The model to train; inside `DistributedDataParallel`, the wrapped model is compiled.
        optimizer: One or several optimizers, or none to leave them unchanged.
        settings: A sweep's folder, one of its settings as `DIR:A7`, a JSON file, text such as `scope=regional,dynamic=auto`, or
            the settings themselves.

    Raises:
        ScriptError: There are no such settings.
        SettingsError: The text does not describe settings.
    """
    chosen = settings_of(settings)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    if current() is not None or chosen.as_written:
        return Applied(settings=chosen, modules=(), optimizers=())
    import_inductor()
    process_wide(chosen)
    if chosen.compile_loss:
        warnings.warn("compile_loss: apply() is not given the loss function; compile it with torch.compile", stacklevel=2)
    target = Target(called=model, module=unwrapped(model), name=type(unwrapped(model)).__name__)
    if chosen.needs_blocks and not target.blocks:
        warnings.warn(f"{target.name} has no repeated blocks for {chosen.label!r}, and runs eagerly", stacklevel=2)
        return Applied(settings=chosen, modules=(), optimizers=_changed(chosen, optimizers))
    of_script = replace(target)
    name_as_the_script_does([of_script])
    target.is_left_out = settings_of_part(chosen.parts, of_script.name).compile is False
    waits = chosen.dynamic is Dynamic.MARK or fixes_sizes(chosen, torch_version(), changes=True)
    apply_to_modules(chosen, [target], {}, _compiled_once_known if waits else compiled_forward)
    before_graphs(chosen, [] if target.is_left_out else [target], optimizers)
    is_whole = chosen.compiles_whole or (chosen.scope is Scope.EAGER and chosen.claims_cudagraphs)
    compiled = target.blocks if chosen.scope is Scope.REGIONAL else [target.name] if is_whole else []
    names = [] if target.is_left_out else compiled
    if is_whole and names:
        _warn_if_uncalled(target)
    return Applied(settings=chosen, modules=tuple(names), optimizers=_changed(chosen, optimizers))


_UNCALLED_BACKWARDS = 3  # backward passes after which a model that was not called is told


def _warn_if_uncalled(target: Target) -> None:
    """Warns once a model trains without being called, so that its compiled forward never runs."""
    weights = next((one for one in target.module.parameters() if one.requires_grad and one.is_leaf), None)
    if weights is None:
        return
    backwards = 0

    def count(_: object) -> None:
        nonlocal backwards
        backwards += 1
        if backwards == _UNCALLED_BACKWARDS:
            warnings.warn(
                f"{target.name} trains without being called, as where a method other than its forward does the work, so nothing "
                "of it is compiled; call apply() for each part that the training calls, or start the script by compile_sweep.run",
                stacklevel=2,
            )

    counting = weights.register_post_accumulate_grad_hook(count)
    inner = vars(target.module)["_compiled_call_impl"]

    def call(*args: Any, **kwargs: Any) -> Any:
        counting.remove()
        if vars(target.module).get("_compiled_call_impl") is call:
            vars(target.module)["_compiled_call_impl"] = inner
        return inner(*args, **kwargs)

    vars(target.module)["_compiled_call_impl"] = call


def _changed(settings: CompileSettings, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    for sentence in apply_to_optimizers(settings, optimizers):
        warnings.warn(sentence, stacklevel=3)
    return tuple(type(one).__name__ for one in optimizers) if settings.optimizer != "foreach" else ()


def _compiled_once_known(settings: CompileSettings, module: nn.Module, _dims: object) -> Callable[..., Any]:
    """Returns a forward that is compiled once it is known what changes: after two lengths, or some calls of one shape."""
    plain, signature = module.forward, inspect.signature(MethodType(type(module).forward, module))
    calls: list[Shapes] = []
    compiled: Callable[..., Any] | None = None

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            dims = changing(calls)
            if not dims and len(calls) < OBSERVED_CALLS:
                arguments = signature.bind(*args, **kwargs).arguments
                calls.append({name: tuple(tensor.shape) for name, tensor in tensors_in(arguments)})
                return plain(*args, **kwargs)
            compiled = compiled_forward(settings, module, dims, plain)
        return compiled(*args, **kwargs)

    return forward


def steps(batches: Iterable[Item]) -> Iterator[Item]:
    """Yields the batches unchanged; in a sweep, each marks the beginning of a step, for loops without a torch optimizer.

    Args:
        batches: A loader, or anything else that a training loop iterates over.
    """
    for batch in batches:
        if (session := current()) is not None:
            session.mark_step()
        yield batch
    if (session := current()) is not None:
        session.mark_step()


class Applier:
    """Applies settings to training after discovering its model and optimizers in the first steps, which run eagerly.

    Args:
        settings: Anything that `settings_of` takes.
        say: Called with a sentence about what was applied.
    """

    def __init__(self, settings: CompileSettings | str | Path, *, say: Callable[[str], None] | None = None) -> None:
        self.settings = settings_of(settings)
        self.own_compile = OwnCompile()
        self.is_applied = False
        self._say = say or _say_on_stderr
        self._watch = Watch(lambda: None, self._discovered)

    @property
    def found(self) -> Discovery:
        """What was discovered so far."""
        return self._watch.found

    def begin(self) -> None:
        """Starts the discovery, except in a sweep, which applies settings itself."""
        if current() is not None:
            return
        process_wide(self.settings)
        if self.settings.as_written:
            self._say(f"{self.settings.label}, nothing is changed")
        else:
            import_inductor()
            self._watch.begin()

    def end(self) -> None:
        """Call this when training is over; reports if nothing could be applied."""
        self._watch.end()
        if not (self.is_applied or self.settings.as_written or current() is not None):
            self._say("nothing was applied, because the script ended within its first steps")

    def _discovered(self) -> None:
        found = self._watch.found
        self.is_applied = True
        name_as_the_script_does(found.trained_and_frozen)
        set_global_state(self.settings)
        losses = apply_to_losses(self.settings, found, UNTIL_EXIT)
        waits = ""
        try:
            leave_out(found.trained_and_frozen, self.settings.parts)
            apply_to_discovered(self.settings, found, self.own_compile)
            names = ", ".join(f"{target.name} ({type(target.module).__name__})" for target in found.all_compiled)
            if names and self.settings.scope is not Scope.EAGER and self.settings.backend is None:
                waits = "; the next step compiles it, which may take minutes"
        except ScriptError as error:
            self._say(f"no module is {'captured' if self.settings.scope is Scope.EAGER else 'compiled'}: {error}")
            names = "the optimizers alone"
        for sentence in (*losses, *apply_to_optimizers(self.settings, found.optimizers, together=found.steps_together)):
            self._say(sentence)
        self._say(f"{self.settings.label}, applied to {names or 'nothing'}{waits}")


def _say_on_stderr(sentence: str) -> None:
    """Prints a sentence on a line of its own, above the progress bars of tqdm."""
    text = for_terminal(f"compile_sweep: {sentence}", sys.stderr)
    if bars := getattr(sys.modules.get("tqdm"), "tqdm", None):
        bars.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)


def trainer_callback(settings: CompileSettings | str | Path) -> Any:
    """Returns a callback for `transformers.Trainer(callbacks=[...])`.

    Args:
        settings: A sweep's folder, a JSON file, text or the settings themselves.
    """
    from transformers import TrainerCallback

    return _callback(TrainerCallback, "on_train_begin", settings)


def lightning_callback(settings: CompileSettings | str | Path) -> Any:
    """Returns a callback for `lightning.Trainer(callbacks=[...])`; takes the arguments of `trainer_callback`."""
    try:
        callbacks: Any = import_module("lightning.pytorch.callbacks")
    except ModuleNotFoundError:
        callbacks = import_module("pytorch_lightning.callbacks")
    return _callback(callbacks.Callback, "on_train_start", settings)


def _callback(base: type[Any], begins: str, settings: CompileSettings | str | Path) -> Any:
    """Returns a library's callback that applies the settings when training begins, in the method of that name."""
    applier = Applier(settings)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        applier.begin()

    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        applier.end()

    return type("ApplySettings", (base,), {begins: begin, "on_train_end": end})()
