"""Models with a graph break caused by a part of torch (autograd, hooks, checkpoints, modules), and the same models mended."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from faulty_models import Case, Net, plain, with_hook_added
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def with_input_that_needs_a_gradient(net: Net, x: Tensor) -> Tensor:
    x.requires_grad_()
    return net.layer(x)


def with_gradient_switched_on(net: Net, x: Tensor) -> Tensor:
    x.requires_grad = True
    return net.layer(x)


def with_new_parameter(net: Net, x: Tensor) -> Tensor:
    if net.scale is None:
        net.scale = nn.Parameter(torch.ones(8))
    return net.layer(x) * net.scale


def with_parameter_assigned(net: Net, x: Tensor) -> Tensor:
    net.layer.weight = nn.Parameter(net.layer.weight.data)
    return net.layer(x)


def with_gradient(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(net.layer(x).square().sum(), x)[0]


def with_func_grad(net: Net, x: Tensor) -> Tensor:
    return torch.func.grad(lambda places: net.layer(places).square().sum())(x)


class Cleared(torch.autograd.Function):
    """Calls a method of its context that torch.compile does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.maybe_clear_saved_tensors()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Doubled(torch.autograd.Function):
    """The same operation, from torch operators alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def with_function(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Cleared.apply(net.layer(x))  # type: ignore[no-untyped-call]
    return y


def with_plain_function(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Doubled.apply(net.layer(x))  # type: ignore[no-untyped-call]
    return y


def with_anomalies_detected(net: Net, x: Tensor) -> Tensor:
    torch.autograd.set_detect_anomaly(False)
    return net.layer(x)


_library = torch.library.Library("tests_break_causes", "FRAGMENT")
for _name in ("unknown", "known"):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, lambda x: 2 * x, "CPU")
torch.library.register_fake("tests_break_causes::known", torch.empty_like, lib=_library)


def with_unknown_operator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.ops.tests_break_causes.unknown(x)


def with_known_operator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.ops.tests_break_causes.known(x)


def with_jacobian(net: Net, x: Tensor) -> Tensor:
    jacobian: Tensor = torch.autograd.functional.jacobian(lambda seen: net.layer(seen).sum(), x)  # type: ignore[no-untyped-call]
    return jacobian


def with_func_jacobian(net: Net, x: Tensor) -> Tensor:
    jacobian: Tensor = torch.func.jacrev(lambda seen: net.layer(seen).sum())(x)
    return jacobian


def with_anomalies_looked_for(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly():
        return net.layer(x)


def with_gradient_kept(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    y.retain_grad()
    return y


def with_hook_on_a_tensor(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    y.register_hook(lambda gradient: print(end=""))
    return y


_recurrent = nn.GRU(8, 8)


def with_recurrent_layer(net: Net, x: Tensor) -> Tensor:
    hidden: Tensor = _recurrent(net.layer(x))[0]
    return hidden


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(nn.Linear(8, 8))
    _traced = torch.jit.trace(nn.Linear(8, 8), torch.zeros(4, 8))


def with_scripted_module(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _scripted(net.layer(x))
    return y


def with_checkpointed_sequence(net: Net, x: Tensor) -> Tensor:
    y: Tensor = checkpoint_sequential(nn.Sequential(net.layer, net.layers[0]), 2, x, use_reentrant=False)
    return y


class Recomputed(torch.autograd.Function):
    """Computes its forward again in its backward, as reversible networks and those from before checkpointing do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        y: Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


def with_forward_computed_again(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Recomputed.apply(net.norm(x), net.layer)  # type: ignore[no-untyped-call]
    return y


class Noted(torch.autograd.Function):
    """Appends to a list of its class."""

    seen: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Noted.seen.append(len(x))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def with_list_of_a_function(net: Net, x: Tensor) -> Tensor:
    return net.layer(Noted.apply(x))  # type: ignore[no-untyped-call]


def with_checkpoints(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def _counts(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x)


def with_counter_in_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(_counts, net, x, use_reentrant=False)
    return y


def with_counter_beside_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    net.steps = net.steps + 1
    y: Tensor = checkpoint(net.layer, x, use_reentrant=False)
    return y


def _collects(net: Net, x: Tensor) -> Tensor:
    net.history.append(x)
    return net.layer(x)


def with_list_in_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(_collects, net, x, use_reentrant=False)
    return y


def with_jacobian_of_a_layer(net: Net, x: Tensor) -> Tensor:
    jacobian: Tensor = torch.autograd.functional.jacobian(net.layer, x)  # type: ignore[no-untyped-call]
    return jacobian


def with_stacked_parameters(net: Net, x: Tensor) -> Tensor:
    stacked, _ = torch.func.stack_module_state([net.layer, *net.layers])
    return x @ stacked["weight"].sum(0)


def with_summed_parameters(net: Net, x: Tensor) -> Tensor:
    return x @ (net.layer.weight + net.layers[0].weight)  # type: ignore[operator]


def with_traced_module(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _traced(net.layer(x))
    return y


def with_linearized(net: Net, x: Tensor) -> Tensor:
    y, derivative = torch.func.linearize(net.layer, x)
    return y + derivative(torch.ones_like(x))


def with_jvp(net: Net, x: Tensor) -> Tensor:
    y, derivative = torch.func.jvp(net.layer, (x,), (torch.ones_like(x),))
    return y + derivative


def with_two_vjps(net: Net, x: Tensor) -> Tensor:
    y, back = torch.func.vjp(net.layer, x)
    derivative: Tensor = torch.func.vjp(lambda u: back(u)[0], torch.zeros_like(y))[1](torch.ones_like(x))[0]
    return y + derivative


_quantizer = FakeQuantize()


def with_quantizer(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _quantizer(net.layer(x))
    return y


def with_quantized(net: Net, x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(net.layer(x), net.heat, torch.zeros(1, dtype=torch.int32), -128, 127)


def with_divergence(net: Net, x: Tensor) -> Tensor:
    """Uses a kind of distribution that no other test uses, because torch keeps what it looks up."""
    exponential = torch.distributions.Exponential
    return torch.distributions.kl_divergence(exponential(net.layer(x).exp()), exponential(torch.ones(4, 8)))


def with_divergence_written_out(net: Net, x: Tensor) -> Tensor:
    ratio = (-net.layer(x)).exp()
    return ratio - 1 - ratio.log()


def with_optimizer_made_there(net: Net, x: Tensor) -> Tensor:
    if net.last is None:
        net.last = torch.optim.SGD(net.layers.parameters(), 0.1)
    return net.layer(x)


BREAKS_OF_TORCH = [
    Case("backward in compiled code", with_forward_computed_again, with_checkpoints),
    Case("state in a class", with_list_of_a_function, plain),
    Case("optimizer made in the forward", with_optimizer_made_there, plain),
    Case("KL divergence", with_divergence, with_divergence_written_out),
    Case("torch.func.linearize", with_linearized, with_jvp),
    Case("torch.func.linearize", with_linearized, with_two_vjps),
    Case("modules of torch.ao", with_quantizer, with_quantized),
    Case("checkpoints of a sequence", with_checkpointed_sequence, with_checkpoints),
    Case("function handed to torch.autograd.functional", with_jacobian_of_a_layer, with_func_jacobian),
    Case("requires_grad_() in the forward", with_stacked_parameters, with_summed_parameters),
    Case("TorchScript module", with_traced_module, plain),
    Case("side effect in a checkpoint", with_counter_in_a_checkpoint, with_counter_beside_a_checkpoint),
    Case("side effect in a checkpoint", with_list_in_a_checkpoint, with_checkpoints),
    Case("TorchScript module", with_scripted_module, plain),
    Case("recurrent layer", with_recurrent_layer, plain),
    Case("function handed to torch.autograd.functional", with_jacobian, with_func_jacobian),
    Case("setting of torch", with_anomalies_looked_for, plain),
    Case("retain_grad() in the forward", with_gradient_kept, plain),
    Case("hooks", with_hook_on_a_tensor, plain),
    Case("setting of torch", with_anomalies_detected, plain),
    Case("operator without a fake implementation", with_unknown_operator, with_known_operator),
    Case("requires_grad_() in the forward", with_input_that_needs_a_gradient, plain),
    Case("requires_grad_() in the forward", with_gradient_switched_on, plain),
    Case("parameter made in the forward", with_new_parameter, plain),
    Case("parameter made in the forward", with_parameter_assigned, plain),
    Case("gradient taken in the forward", with_gradient, with_func_grad),
    Case("hooks", with_hook_added, plain),
    Case("custom autograd.Function", with_function, with_plain_function),
]
