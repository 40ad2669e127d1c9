"""Functions that exported settings contain: `source.py` copies them verbatim, and the copy is what runs.

So they import and use nothing but torch and the standard library, under the names that `source.py` imports. Their docstrings and
comments are for whoever pastes the export into a training script.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo import mark_dynamic
from torch._higher_order_ops.foreach_map import foreach_map
from torch.utils.checkpoint import checkpoint


def with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same bound method on a code object that only modules of one class with weights of the same sizes share.

    torch keeps compiled graphs, their limit and what it learnt of changing sizes for each code object. Where a library wraps the
    forward of every kind of block in one function, as transformers does, kinds would use up each other's limit. So would blocks
    whose width changes from stage to stage, and modules of `torch.nn`, all of which torch compiles within one function; each kind
    of these, by what is in it, gets one of its own.
    """
    function, module = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    if not isinstance(function, FunctionType) or not isinstance(module, torch.nn.Module):
        return forward
    kind: list[Any] = [weight.shape for weight in module.parameters() if not torch.nn.parameter.is_lazy(weight)]
    if function.__module__.startswith("torch.nn."):
        function, kind = _called_by_ours(function), [*map(type, module.modules()), *kind]
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}@{type(module).__qualname__}")
    known = OWN_CODE.setdefault((code, *kind), code)  # torch tells code objects apart by identity
    copy = FunctionType(known, function.__globals__, known.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, module)


def _called_by_ours(function: FunctionType) -> FunctionType:
    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return forward  # type: ignore[return-value]


OWN_CODE: dict[Any, Any] = {}


def checkpointed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module's class; what it computes is not kept for the backward pass, which computes it again."""
    return checkpoint(type(module).forward, module, *args, use_reentrant=False, **kwargs)


def nested(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's forward as a region that modules of one class share when the model around them is compiled.

    The region is given the module as an argument: of bound methods, torch 2.13 uses the first module's weights in all.
    """
    method = module.forward
    function = method.__func__ if isinstance(method, MethodType) else type(module).forward
    region = REGIONS.setdefault((type(module), function), torch.compiler.nested_compile_region(function))

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return region(module, *args, **kwargs)

    return MethodType(forward, module)  # a deep copy of the module then runs its own weights


REGIONS: dict[Any, Any] = {}


def mark(arguments: dict[str, Any], dims: dict[str, tuple[int, ...]], **bounds: int) -> None:
    """Tells the compiler which dimensions of the named tensors change from batch to batch."""
    for name, dimensions in dims.items():
        if isinstance(tensor := value_at(arguments, name), torch.Tensor):
            for dimension in dimensions:
                mark_dynamic(tensor, dimension, **bounds)


def value_at(arguments: dict[str, Any], name: str) -> Any:
    """The argument of that name, `pair.0` being the first in the list, tuple or dictionary `pair`; None if there is none."""
    if name in arguments:
        return arguments[name]
    found: Any = arguments
    for step in name.split("."):
        if isinstance(found, dict):
            found = found.get(step)
        else:
            able = isinstance(found, list | tuple) and step.isdecimal() and int(step) < len(found)
            found = found[int(step)] if able else None
    return found


def marked_forward(module: torch.nn.Module, compiled: Callable[..., Any], dims: dict[str, tuple[int, ...]]) -> Callable[..., Any]:
    """A forward that marks its arguments before the compiled one sees them: marks do not work inside what is compiled.

    The marks end with the call. The tensors may be given to another module, with which their dimensions do not change, and where
    a mark is an error.
    """
    signature = inspect.signature(MethodType(type(module).forward, module))

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        tensors = [one for name in dims if isinstance(one := value_at(arguments, name), torch.Tensor)]
        before = [marks_of(one) for one in tensors]
        mark(arguments, dims)
        try:
            return compiled(*args, **kwargs)
        finally:
            for tensor, marks in zip(tensors, before, strict=True):
                for name in marks_of(tensor):
                    delattr(tensor, name)
                vars(tensor).update(marks)

    return forward


def marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Copies of what the compiler notes about a tensor's dimensions."""
    noted = {name: value for name, value in vars(tensor).items() if name.startswith(("_dynamo_", "_has_dynamo_"))}
    return {name: value.copy() if isinstance(value, set | dict) else value for name, value in noted.items()}


def in_memory_format(inputs: dict[str, Any], memory_format: torch.memory_format, ndim: int) -> dict[str, Any]:
    """The inputs with every tensor of `ndim` dimensions in this memory format; one that is in it already is not copied."""
    return {
        name: value.contiguous(memory_format=memory_format) if isinstance(value, torch.Tensor) and value.ndim == ndim else value
        for name, value in inputs.items()
    }


def use_float8(model: torch.nn.Module, recipe: str) -> None:
    """Replaces linear layers in the model by float8 ones, which share their weights."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)  # pads the number of tokens
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: suits_float8(layer))


def suits_float8(layer: Any) -> bool:
    """Whether a layer can be replaced: float8 products need widths that are multiples of 16, and hooks would be lost."""
    if type(layer) is not torch.nn.Linear or type(layer.weight) is not torch.nn.Parameter:
        return False
    return layer.in_features % 16 == layer.out_features % 16 == 0 and not (layer._forward_hooks or layer._forward_pre_hooks)


def split_batch(inputs: dict[str, Any], samples: int, parts: int) -> Iterator[dict[str, Any]]:
    """The inputs in equal parts along their samples; what has no row for each sample is in every part.

    Raises:
        ValueError: nothing has so many rows, as in a smaller last batch.
    """
    rows = {name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim and len(value) == samples}
    if not rows:
        raise ValueError(f"no input has {samples} rows to split into {parts} parts; leave out smaller batches (drop_last=True)")
    size = samples // parts
    for start in range(0, samples, size):
        yield {name: value[start : start + size] if name in rows else value for name, value in inputs.items()}


def keep_gradients(model: torch.nn.Module) -> None:
    """Gives every parameter a gradient that stays where it is; zero it in place from now on."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            torch._dynamo.mark_static_address(parameter.grad)


def run_backward(loss: torch.Tensor) -> None:
    """The backward pass, to be compiled with what reduces gradients after it."""
    loss.backward()


def moving_average(model: torch.nn.Module, decay: float) -> Callable[[], None]:
    """Keeps an exponential moving average of the weights; call what this returns after each update of them.

    The averages are in its attribute `averages`, by parameter name.
    """
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = dict(model.named_parameters())
    weights: list[torch.Tensor] = [parameters[name] for name in averages]

    @torch.no_grad()
    def update() -> None:
        torch._foreach_lerp_(list(averages.values()), weights, 1 - decay)

    update.averages = averages  # type: ignore[attr-defined]
    return update


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether it is one of torch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def graphed_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The optimizer's compiled step, but its plain step where SGD or an optimizer that is not torch's creates its state.

    What a CUDA graph creates is overwritten when the graph runs again. Torch's other optimizers create theirs outside of it.
    Graphs are skipped for what they change at no fixed address, so state that a second plain step changes in place is marked.
    """
    creates = isinstance(optimizer, torch.optim.SGD) and any(group["momentum"] for group in optimizer.param_groups)
    of_torch = is_of_torch(optimizer)  # whose state Dynamo marks itself
    if of_torch and not creates:
        return compiled
    begun: set[torch.Tensor] = set()
    settled: set[torch.Tensor] = set()

    def state_of(parameter: torch.Tensor) -> dict[int, torch.Tensor]:
        state = optimizer.state.get(parameter, {})
        values = state.values() if isinstance(state, dict) else ()
        return {id(value): value for value in values if isinstance(value, torch.Tensor)}

    def stepped(*args: Any, **kwargs: Any) -> Any:
        used = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None} - settled
        if not used:
            return compiled(*args, **kwargs)
        before = {p: state_of(p) for p in used}
        returned = step(*args, **kwargs)
        for p in used:
            after = state_of(p)
            for same in before[p].keys() & after.keys():
                torch._dynamo.mark_static_address(after[same], guard=False)
            if of_torch or before[p] or p in begun:
                settled.add(p)
        begun.update(used)
        return returned

    return stepped


def refuse_unless_plain_adam(optimizer: torch.optim.Optimizer) -> None:
    """Raises a TypeError for an optimizer whose own step is another formula than that of `foreach_map_adam`."""
    others = [name for group in optimizer.param_groups for name in ("weight_decay", "amsgrad", "maximize") if group.get(name)]
    if type(optimizer) is not torch.optim.Adam or others:
        own = " with ".join([type(optimizer).__name__, *others[:1]])
        raise TypeError(f"optimizer=foreach_map is plain Adam's update, and this optimizer is {own}; use optimizer=compiled")


def foreach_map_adam(optimizer: torch.optim.Optimizer, **compile_options: Any) -> Callable[[], None]:
    """Adam's update of every parameter as a compiled `foreach_map`; call it instead of `optimizer.step()`.

    The state is that of `torch.optim.Adam`, so checkpoints stay the same. Formula: Kingma and Ba, "Adam: A Method for
    Stochastic Optimization", algorithm 1, without weight decay or AMSGrad.

    Raises:
        TypeError: the optimizer is another one.
    """
    refuse_unless_plain_adam(optimizer)

    def moved_mean(mean, gradient, beta):  # type: ignore[no-untyped-def]
        return mean + (gradient - mean) * (1 - beta)

    def moved_square(square, gradient, beta):  # type: ignore[no-untyped-def]
        return square * beta + gradient * gradient * (1 - beta)

    def moved_parameter(parameter, mean, square, step, lr, beta1, beta2, eps):  # type: ignore[no-untyped-def]
        denominator = (square / (1 - beta2**step)).sqrt() + eps
        return parameter - lr * (mean / (1 - beta1**step)) / denominator

    def next_step(step):  # type: ignore[no-untyped-def]
        return step + 1

    def update_group(parameters, gradients, means, squares, steps, lr, beta1, beta2, eps):  # type: ignore[no-untyped-def]
        torch._foreach_copy_(steps, foreach_map(next_step, steps))
        torch._foreach_copy_(means, foreach_map(moved_mean, means, gradients, beta1))
        torch._foreach_copy_(squares, foreach_map(moved_square, squares, gradients, beta2))
        torch._foreach_copy_(parameters, foreach_map(moved_parameter, parameters, means, squares, steps, lr, beta1, beta2, eps))

    compiled: Callable[..., None] = torch.compile(update_group, **compile_options)
    marked: set[torch.Tensor] = set()

    def state_of(parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        if parameter not in marked:  # CUDA graphs change only what stays where it is
            marked.add(parameter)
            for tensor in state.values():
                torch._dynamo.mark_static_address(tensor)
        return state

    @torch.no_grad()
    def update() -> None:
        for group in optimizer.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [state_of(parameter) for parameter in parameters]
            kept = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
            gradients = [parameter.grad for parameter in parameters]
            compiled(parameters, gradients, *kept, group["lr"], *group["betas"], group["eps"])

    return update
