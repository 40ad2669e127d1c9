"""Applies settings to what a script calls: the modules it trains, and frozen networks such as a teacher or an encoder."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from compile_sweep.contract.inspect_model import preferred_memory_format
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.script.apply.captured import capture
from compile_sweep.script.apply.graph_memory import before_graphs, copied_out, wrap_call
from compile_sweep.script.apply.huggingface import without_cache
from compile_sweep.script.apply.in_place import OwnCompile, apply_to_modules, calling, compiled_forward
from compile_sweep.script.apply.padding import Padder, why_not_padded
from compile_sweep.script.discover import Discovery, Target, changing

Call = Callable[..., Any]


def apply_to_discovered(settings: CompileSettings, found: Discovery, own_compile: OwnCompile) -> None:
    """Applies settings to the modules of a script; raises ScriptError if nothing that it trains can be compiled.

    Losses come first, because their state is kept, too.
    """
    apply_to_modules(settings, found.targets, found.block_shapes, own_compile=own_compile)
    apply_to_frozen(settings, found)
    losses = found.loss_modules if settings.compile_loss else []
    before_graphs(settings, found.compiled, found.optimizers, [target.module for target in found.frozen], losses)


def apply_to_frozen(settings: CompileSettings, found: Discovery) -> None:
    """Reorders, compiles or captures, and pads networks that are not trained, as the settings do with those that are.

    They are compiled in evaluations, too, because they can't be told apart. With scope=regional only repeated blocks are.
    """
    for target in found.frozen:
        module = target.module
        if settings.memory_format is not None and settings.memory_format == preferred_memory_format(module):
            cast(Any, module).to(memory_format=getattr(torch, settings.memory_format))
        if settings.scope is not Scope.EAGER and not target.is_left_out:
            _compile(settings, target, found)
        elif settings.claims_cudagraphs and not target.is_left_out:
            capture([target])
        if settings.use_cache is False:
            wrap_call(module, partial(without_cache, module, applies=lambda: True))
        if settings.pad_to_multiple_of is not None and why_not_padded(target) is None:
            wrap_call(module, partial(Padder(module, settings.pad_to_multiple_of).around, applies=lambda: True))


def _compile(settings: CompileSettings, target: Target, found: Discovery) -> None:
    module = target.module
    blocks = [module.get_submodule(name) for name in target.blocks]
    compiled = {block: changing(found.block_shapes.get(block, [])) for block in blocks}
    if settings.compiles_whole:
        compiled = {module: target.changing()}
    for part, dims in compiled.items():
        forward = compiled_forward(settings, part, dims)
        kept = copied_out(forward) if settings.claims_cudagraphs else forward
        vars(part)["_compiled_call_impl"] = calling(part, kept, applies=lambda: True)
    wrap_call(module, partial(_noting_errors, found, target))


def _noting_errors(found: Discovery, target: Target, inner: Call) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except Exception as error:
            found.note_error(error, target)
            raise

    return call
