"""Every cause of graph breaks is recognized in a model that has it, and its advice fixes that model: run before and after."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import random
import re
import sys
import threading
import time
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from faulty_models import (
    FEW,
    TORCH,
    Case,
    Forward,
    Net,
    is_clean,
    plain,
    run,
    with_assert_statement,
    with_break_in_loop,
    with_hook_added,
    with_mask,
    with_rows,
)
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from tqdm import tqdm, trange

from compile_sweep.harness.diagnostics.capture import capture_diagnostics
from compile_sweep.schema.causes import breaks

_log = logging.getLogger("a model of the tests")


def with_item(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = y.sum().item()
    return y


def with_tensor_kept(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = y.sum().detach()
    return y


def with_branch(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if y.sum() > 0:
        y = y * 2
    return y


def with_where(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.where(y.sum() > 0, y * 2, y)


def with_python_random(net: Net, x: Tensor) -> Tensor:
    if random.random() > 0.2:
        x = x + net.layer(x)
    return x


def with_torch_random(net: Net, x: Tensor) -> Tensor:
    return x + (torch.rand(()) > 0.2) * net.layer(x)


def with_generator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x + torch.randn(x.shape, generator=net.generator))


def with_default_generator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x + torch.randn(x.shape))


def with_numpy_generator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * net.numpy.random()


def with_generator_made_there(net: Net, x: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(1)
    return net.layer(x) * torch.rand(8, generator=generator)


def with_seed(net: Net, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return net.layer(x + torch.rand(8))


def with_drawn_noise(net: Net, x: Tensor) -> Tensor:
    return net.layer(x + torch.rand(8))


def with_standard_output(net: Net, x: Tensor) -> Tensor:
    sys.stdout.write("")
    return net.layer(x)


def with_folder(net: Net, x: Tensor) -> Tensor:
    net.last = os.getcwd()
    return net.layer(x)


def with_input_that_needs_a_gradient(net: Net, x: Tensor) -> Tensor:
    x.requires_grad_()
    return net.layer(x)


def with_gradient_switched_on(net: Net, x: Tensor) -> Tensor:
    x.requires_grad = True
    return net.layer(x)


def with_sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), net.layer(x))


def with_dense(net: Net, x: Tensor) -> Tensor:
    return torch.eye(4) @ net.layer(x)


def with_packed(net: Net, x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(net.layer(x)[None], torch.tensor([4]), batch_first=True).data


def with_print(net: Net, x: Tensor) -> Tensor:
    print("step")
    return net.layer(x)


def with_print_unless_compiling(net: Net, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        print("step")
    return net.layer(x)


def with_logging(net: Net, x: Tensor) -> Tensor:
    _log.warning("step")
    return net.layer(x)


def with_warning(net: Net, x: Tensor) -> Tensor:
    warnings.warn("step", stacklevel=1)
    return net.layer(x)


def with_logging_unless_compiling(net: Net, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        _log.warning("step")
    return net.layer(x)


def with_clock(net: Net, x: Tensor) -> Tensor:
    net.last = time.perf_counter()
    return net.layer(x)


def with_new_parameter(net: Net, x: Tensor) -> Tensor:
    if net.scale is None:
        net.scale = nn.Parameter(torch.ones(8))
    return net.layer(x) * net.scale


def with_gradient(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(net.layer(x).square().sum(), x)[0]


def with_func_grad(net: Net, x: Tensor) -> Tensor:
    return torch.func.grad(lambda places: net.layer(places).square().sum())(x)


def with_deepcopy(net: Net, x: Tensor) -> Tensor:
    return net.layer(copy.deepcopy(x))


def with_clone(net: Net, x: Tensor) -> Tensor:
    return net.layer(x.clone())


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


_lock = threading.Lock()


def with_lock(net: Net, x: Tensor) -> Tensor:
    with _lock:
        return net.layer(x)


def with_hash(net: Net, x: Tensor) -> Tensor:
    net.last = hashlib.md5(b"a").digest_size
    return net.layer(x)


def with_loop(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        x = net.layer(x)
    return x


def with_open_file(net: Net, x: Tensor) -> Tensor:
    open("/dev/null").close()
    return net.layer(x)


def with_explicit_break(net: Net, x: Tensor) -> Tensor:
    x = net.layer(x)
    torch._dynamo.graph_break()
    return x


@torch.compiler.disable
def doubled(x: Tensor) -> Tensor:
    return x * 2


def with_disabled(net: Net, x: Tensor) -> Tensor:
    return doubled(net.layer(x))


def doubled_in_graph(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * 2


def with_builtin(net: Net, x: Tensor) -> Tensor:
    net.last = id(x) and memoryview(b"a")
    return net.layer(x)


def with_numpy_random(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * np.random.rand()


def with_numpy_permutation(net: Net, x: Tensor) -> Tensor:
    return net.layer(x)[np.random.permutation(4)]


def with_torch_permutation(net: Net, x: Tensor) -> Tensor:
    return net.layer(x)[torch.randperm(4)]


def with_token(net: Net, x: Tensor) -> Tensor:
    net.last = uuid.uuid4()
    return net.layer(x)


def with_state_kept(net: Net, x: Tensor) -> Tensor:
    net.last = torch.get_rng_state()
    return net.layer(x)


def with_forked_state(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return net.layer(x + torch.rand(8))


def with_counted_classes(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) @ nn.functional.one_hot(torch.arange(8)).float()


def with_known_classes(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) @ nn.functional.one_hot(torch.arange(8), num_classes=8).float()


def with_interpolation(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * float(np.interp(0.5, [0, 1], [0, 1]))


_twice_in_numpy = np.frompyfunc(lambda value: 2 * value, 1, 1)


def with_ufunc(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * float(_twice_in_numpy(0.5))


def with_text_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.last = repr(x)
    return net.layer(x)


def with_root_logger(net: Net, x: Tensor) -> Tensor:
    logging.info("step")
    return net.layer(x)


def with_anomalies_detected(net: Net, x: Tensor) -> Tensor:
    torch.autograd.set_detect_anomaly(False)
    return net.layer(x)


def with_sparse_made_there(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.sparse_coo_tensor([[0], [0]], [1.0], (4, 8)).to_dense()


def with_zeros(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.zeros(4, 8)


def with_nested(net: Net, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([net.layer(x)])


def with_copy(net: Net, x: Tensor) -> Tensor:
    return net.layer(copy.copy(x))


class Wrapped(torch.Tensor):
    """Contains another tensor, without declaring it."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[return-value]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.inner if isinstance(one, Wrapped) else one for one in args), **(kwargs or {}))


class Flattened(Wrapped):
    """Contains another tensor, and declares it."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Flattened:
        return Flattened(inner["inner"])


_wrapped, _flattened = Wrapped(torch.ones(4, 8)), Flattened(torch.ones(4, 8))


def with_wrapped(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + _wrapped


def with_wrapped_made_there(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + Wrapped(x.detach())


def with_flattened(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + _flattened


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


def with_range_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    for _ in range(x[:, 0].abs().long().max()):  # type: ignore[arg-type]  # a tensor is an index
        x = net.layer(x)
    return x


def with_progress_bar(net: Net, x: Tensor) -> Tensor:
    for layer in tqdm(net.layers, disable=True):
        x = layer(x)
    return x


def with_layers_in_turn(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def with_anomalies_looked_for(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly():
        return net.layer(x)


def with_class(net: Net, x: Tensor) -> Tensor:
    class Scale:
        value = 2.0

    return net.layer(x) * Scale.value


def with_hash_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.seen.add(hash(x))
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


def with_cut_at_random(net: Net, x: Tensor) -> Tensor:
    begin = random.randint(0, 4)
    x = x.clone()
    x[:, begin : begin + 4] = 0
    return net.layer(x)


def with_part_at_random(net: Net, x: Tensor) -> Tensor:
    return net.layer(x[: random.randint(1, 3)])


def with_mask_drawn_by_torch(net: Net, x: Tensor) -> Tensor:
    begin = torch.randint(0, 5, ())
    places = torch.arange(8)
    return net.layer(x * ((places < begin) | (places >= begin + 4)))


def with_text_of_values(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    _log.info(f"mean {y.mean().item():.3f}, {y.std()}")
    return y


def with_check(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if torch.isnan(y).any():
        raise ValueError("not a number")
    return y


def with_check_in_the_graph(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    torch._assert_async(~torch.isnan(y).any())
    return y


def with_ctc_loss(net: Net, x: Tensor) -> Tensor:
    scores = net.layer(x).log_softmax(-1)[:, None]
    loss: Tensor = nn.functional.ctc_loss(scores, torch.ones(1, 2).long(), torch.tensor([4]), torch.tensor([1]))
    return loss


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(nn.Linear(8, 8))
    _traced = torch.jit.trace(nn.Linear(8, 8), torch.zeros(4, 8))


def with_scripted_module(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _scripted(net.layer(x))
    return y


def with_numpy_padding(net: Net, x: Tensor) -> Tensor:
    return net.layer(torch.from_numpy(np.pad(x.numpy(), ((0, 0), (1, 1))))[:, 1:-1])


def with_torch_padding(net: Net, x: Tensor) -> Tensor:
    return net.layer(nn.functional.pad(x, (1, 1))[:, 1:-1])


_encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


_stack = nn.TransformerEncoder(_encoder, 1)


def with_mask_looked_at(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _stack(net.layer(x)[None], nn.Transformer.generate_square_subsequent_mask(4))
    return y


def with_mask_declared(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _stack(net.layer(x)[None], nn.Transformer.generate_square_subsequent_mask(4), is_causal=True)
    return y


def with_text_kept(net: Net, x: Tensor) -> Tensor:
    net.last = str(x)
    return net.layer(x)


def with_progress_of_a_range(net: Net, x: Tensor) -> Tensor:
    for _ in trange(1, disable=True):
        x = net.layer(x)
    return x


def with_checkpointed_sequence(net: Net, x: Tensor) -> Tensor:
    y: Tensor = checkpoint_sequential(nn.Sequential(net.layer, net.layers[0]), 2, x, use_reentrant=False)
    return y


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


def with_activations_on_the_cpu(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net.layer(x)


def with_set_of_tensors(net: Net, x: Tensor) -> Tensor:
    net.seen.add(x)  # type: ignore[arg-type]
    return net.layer(x)


def with_resized(net: Net, x: Tensor) -> Tensor:
    space = x.new_empty(0)
    return net.layer(x) + space.resize_(4, 8).zero_()


def with_shared_memory(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    y.detach().share_memory_()
    return y


def _raises() -> None:
    raise KeyError("missing")


def with_exception(net: Net, x: Tensor) -> Tensor:
    _raises()
    return net.layer(x)


def with_exception_caught(net: Net, x: Tensor) -> Tensor:
    with contextlib.suppress(KeyError):
        _raises()
    return net.layer(x)


class Scaled(torch.autograd.Function):
    """Reads the value of a tensor while it is traced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.detach().abs().max().item()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def with_value_in_a_function(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Scaled.apply(net.layer(x))  # type: ignore[no-untyped-call]
    return y


def with_assertion(net: Net, x: Tensor) -> Tensor:
    torch._assert(x.abs().sum() < 1e9, "too large")  # type: ignore[arg-type]  # a tensor is a condition
    return net.layer(x)


_averaging, _moving = nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8, momentum=0.1)


def with_average_over_all_batches(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _averaging(net.layer(x))
    return y


def with_moving_average(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _moving(net.layer(x))
    return y


def with_mask_of_lengths(net: Net, x: Tensor) -> Tensor:
    lengths = x[:, 0].abs().long()
    return net.layer(x) * (torch.arange(int(lengths.max())) < lengths[:, None]).sum()


def with_mask_of_a_shape(net: Net, x: Tensor) -> Tensor:
    lengths = x[:, 0].abs().long()
    return net.layer(x) * (torch.arange(x.size(1)) < lengths[:, None]).sum()


def with_repeats(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).repeat_interleave(torch.arange(4), dim=0)


def with_known_repeats(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).repeat_interleave(torch.arange(4), dim=0, output_size=6)


def with_bins(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.bincount(x[0].abs().long(), minlength=8)[:8]


def with_counted_ids(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + nn.functional.one_hot(x[0].abs().long(), num_classes=8).sum(0)


def with_linearized(net: Net, x: Tensor) -> Tensor:
    y, derivative = torch.func.linearize(net.layer, x)
    return y + derivative(torch.ones_like(x))


def with_jvp(net: Net, x: Tensor) -> Tensor:
    y, derivative = torch.func.jvp(net.layer, (x,), (torch.ones_like(x),))
    return y + derivative


_quantizer = FakeQuantize()


def with_quantizer(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _quantizer(net.layer(x))
    return y


def with_quantized(net: Net, x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(net.layer(x), net.heat, torch.zeros(1, dtype=torch.int32), -128, 127)


def with_break_in_a_comprehension(net: Net, x: Tensor) -> Tensor:
    return torch.stack([doubled(layer(x)) for layer in net.layers])


def with_comprehension(net: Net, x: Tensor) -> Tensor:
    return torch.stack([2 * layer(x) for layer in net.layers])


def with_break_in_a_try(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    try:
        y = doubled(y)
    except ValueError:
        net.last = None
    return y


def with_break_after_a_try(net: Net, x: Tensor) -> Tensor:
    try:
        y = net.layer(x)
    except ValueError:
        net.last = None
    return doubled(y)


def with_break_in_an_own_context(net: Net, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        return doubled(net.layer(x))
    return x


def with_break_after_an_own_context(net: Net, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        y = net.layer(x)
    return doubled(y)


def with_break_after_a_loop(net: Net, x: Tensor) -> Tensor:
    return doubled(with_loop(net, x))


def with_divergence(net: Net, x: Tensor) -> Tensor:
    """Uses a kind of distribution that no other test uses, because torch keeps what it looks up."""
    exponential = torch.distributions.Exponential
    return torch.distributions.kl_divergence(exponential(net.layer(x).exp()), exponential(torch.ones(4, 8)))


def with_divergence_written_out(net: Net, x: Tensor) -> Tensor:
    ratio = (-net.layer(x)).exp()
    return ratio - 1 - ratio.log()


def with_sorted_rows(net: Net, x: Tensor) -> Tensor:
    return torch.stack(sorted(net.layer(x), key=lambda row: float(row[0])))


def with_rows_in_order(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return y[y[:, 0].argsort()]


def with_match_kept(net: Net, x: Tensor) -> Tensor:
    net.last = re.match("a", "abc")
    return net.layer(x)


BREAKS = [
    Case("KL divergence", with_divergence, with_divergence_written_out),
    Case("value of a tensor", with_sorted_rows, with_rows_in_order),
    Case("value that is not a tensor", with_match_kept, plain),
    Case("assertion by a function", with_assertion, with_assert_statement),
    Case("average over all batches", with_average_over_all_batches, with_moving_average),
    Case("value of a tensor", with_mask_of_lengths, with_mask_of_a_shape),
    Case("repeats that are a tensor", with_repeats, with_known_repeats),
    Case("number of bins", with_bins, with_counted_ids),
    Case("torch.func.linearize", with_linearized, with_jvp),
    Case("modules of torch.ao", with_quantizer, with_quantized),
    Case("break in a comprehension", with_break_in_a_comprehension, with_comprehension),
    Case("numpy and scipy", with_numpy_padding, with_torch_padding),
    Case("causal mask", with_mask_looked_at, with_mask_declared),
    Case("print, logging and warnings", with_text_kept, with_tensor_kept),
    Case("progress bar", with_progress_of_a_range, with_loop),
    Case("checkpoints of a sequence", with_checkpointed_sequence, with_checkpoints),
    Case("function handed to torch.autograd.functional", with_jacobian_of_a_layer, with_func_jacobian),
    Case("requires_grad_() in the forward", with_stacked_parameters, with_summed_parameters),
    Case("TorchScript module", with_traced_module, plain),
    Case("side effect in a checkpoint", with_counter_in_a_checkpoint, with_counter_beside_a_checkpoint),
    Case("side effect in a checkpoint", with_list_in_a_checkpoint, with_checkpoints),
    Case("context manager", with_activations_on_the_cpu, plain),
    Case("set of tensors", with_set_of_tensors, plain),
    Case("memory of a tensor", with_resized, plain),
    Case("memory of a tensor", with_shared_memory, plain),
    Case("value of a tensor", with_value_in_a_function, plain),
    Case("Python's or numpy's random numbers", with_cut_at_random, with_mask_drawn_by_torch),
    Case("Python's or numpy's random numbers", with_part_at_random, with_mask_drawn_by_torch),
    Case("print, logging and warnings", with_text_of_values, with_logging_unless_compiling),
    Case("data-dependent branch", with_check, with_check_in_the_graph),
    Case("CTC loss", with_ctc_loss, plain),
    Case("TorchScript module", with_scripted_module, plain),
    Case("recurrent layer", with_recurrent_layer, plain),
    Case("function handed to torch.autograd.functional", with_jacobian, with_func_jacobian),
    Case("value of a tensor", with_range_of_a_tensor, with_layers_in_turn),
    Case("progress bar", with_progress_bar, with_layers_in_turn),
    Case("setting of torch", with_anomalies_looked_for, plain),
    Case("class made in the forward", with_class, plain),
    Case("identity of an object", with_hash_of_a_tensor, plain),
    Case("retain_grad() in the forward", with_gradient_kept, plain),
    Case("hooks", with_hook_on_a_tensor, plain),
    Case("explicit break", with_explicit_break, plain),
    Case("disabled function", with_disabled, doubled_in_graph),
    Case("value of a tensor", with_item, with_tensor_kept),
    Case("data-dependent branch", with_branch, with_where),
    Case("output of unknown size", with_rows, with_mask),
    Case("Python's or numpy's random numbers", with_python_random, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_generator, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_random, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_permutation, with_torch_permutation),
    Case("Python's or numpy's random numbers", with_token, plain),
    Case("seed set in the forward", with_state_kept, plain),
    Case("seed set in the forward", with_forked_state, with_drawn_noise),
    Case("number of classes", with_counted_classes, with_known_classes),
    Case("numpy and scipy", with_interpolation, plain),
    Case("numpy and scipy", with_ufunc, plain),
    Case("print, logging and warnings", with_text_of_a_tensor, plain),
    Case("print, logging and warnings", with_root_logger, with_logging_unless_compiling),
    Case("setting of torch", with_anomalies_detected, plain),
    Case("sparse tensor", with_sparse_made_there, with_zeros),
    Case("nested tensor", with_nested, plain),
    Case("value that is not a tensor", with_copy, with_clone),
    Case("tensor subclass", with_wrapped, with_flattened),
    Case("tensor subclass", with_wrapped_made_there, with_flattened),
    Case("operator without a fake implementation", with_unknown_operator, with_known_operator),
    Case("own random generator", with_generator, with_default_generator),
    Case("own random generator", with_generator_made_there, with_drawn_noise),
    Case("seed set in the forward", with_seed, with_drawn_noise),
    Case("print, logging and warnings", with_standard_output, with_print_unless_compiling),
    Case("file, clock or system call", with_folder, plain),
    Case("requires_grad_() in the forward", with_input_that_needs_a_gradient, plain),
    Case("requires_grad_() in the forward", with_gradient_switched_on, plain),
    Case("sparse tensor", with_sparse, with_dense),
    Case("packed sequences", with_packed, plain),
    Case("print, logging and warnings", with_print, with_print_unless_compiling),
    Case("print, logging and warnings", with_logging, with_logging_unless_compiling),
    Case("print, logging and warnings", with_warning, with_logging_unless_compiling),
    Case("file, clock or system call", with_clock, plain),
    Case("file, clock or system call", with_open_file, plain),
    Case("parameter made in the forward", with_new_parameter, plain),
    Case("gradient taken in the forward", with_gradient, with_func_grad),
    Case("copy of a tensor by Python", with_deepcopy, with_clone),
    Case("hooks", with_hook_added, plain),
    Case("custom autograd.Function", with_function, with_plain_function),
    Case("context manager", with_lock, plain),
    Case("operator of another library", with_hash, plain),
    Case("break in a loop", with_break_in_loop, with_loop),
    Case("untraceable builtin", with_builtin, plain),
]


_ON_NEWER_TORCH = {with_forked_state: ["value that is not a tensor"], with_ufunc: ["operator of another library"]}
"""More general causes, whose advice also mends the model, where newer versions of torch say less about the break."""


@pytest.mark.slow
@pytest.mark.parametrize("case", BREAKS, ids=lambda case: f"{case.cause}: {case.before.__name__}")
def test_a_break_has_its_cause_and_the_advice_mends_it(case: Case) -> None:
    if case.before is with_text_of_values and TORCH >= (2, 14):
        pytest.skip("Dynamo of torch 2.14 and 2.15 raises an internal error when it formats a value read by .item()")
    found = run(case.before, steps=FEW)
    named = [cause.name for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))]
    told = [cause.name for text in found.fallbacks if (cause := breaks.cause_of_break(f"x: {text}"))]
    expected = {case.cause, *(_ON_NEWER_TORCH.get(case.before, ()) if TORCH >= (2, 14) else ())}
    assert expected & {*named, *told}, [*found.graph_break_reasons, *found.fallbacks]
    assert is_clean(run(case.after, steps=FEW))


@pytest.mark.slow
def test_an_exception_that_leaves_the_forward_is_a_cause_and_one_that_it_catches_is_not() -> None:
    with capture_diagnostics() as found, contextlib.suppress(KeyError):
        torch._dynamo.reset()
        torch.compile(lambda x: with_exception(Net(), x), backend="eager")(torch.ones(4, 8))
    named = {cause.name for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))}
    assert "exception in the forward" in named, found
    assert is_clean(run(with_exception_caught))


@pytest.mark.slow
def test_a_recurrent_layer_is_one_graph_where_dynamo_is_told_to_trace_it() -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        assert is_clean(run(with_recurrent_layer))


def test_a_fallback_at_a_break_of_unknown_cause_still_has_advice() -> None:
    fallback = "forward (model.py:3) runs eagerly: torch would not convert it (Something new), at model.py:7"
    advice = breaks.advice_on_fallback(fallback, ["model.py:7 in forward: Something new"])
    assert advice is not None
    assert advice.startswith("remove the graph break")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "block"),
    [
        (with_break_in_a_try, with_break_after_a_try, "`try`"),
        (with_break_in_an_own_context, with_break_after_an_own_context, "`with`"),
        (with_break_in_loop, with_break_after_a_loop, "loop"),
    ],
)
def test_a_break_that_leaves_a_function_eager_is_told_with_its_block_and_moved_out_it_does_not(
    before: Forward, after: Forward, block: str
) -> None:
    found = run(before)
    advice = breaks.advice_on_fallback(found.fallbacks[0], found.graph_break_reasons)
    assert f"a break inside a {block} leaves the whole function eager" in str(advice), found.fallbacks
    assert run(after).fallbacks == []


def test_the_users_line_and_the_hints_do_not_decide() -> None:
    text = (
        "model.py:7 in forward: Unsupported Tensor.item() call with capture_scalar_outputs=False\n"
        "  code: print(x.item(), hook, generator)\n  explanation: x\n  hint: builtin `print`, context manager, autograd.Function"
    )
    cause = breaks.cause_of_break(text)
    assert cause is not None
    assert cause.name == "value of a tensor"


def test_a_break_of_fsdp2s_hooks_is_answered_with_regional_compiling() -> None:
    text = (
        "train.py:39 in forward of FSDPNet: Attempted to call function marked as skipped\n  code: x = block(x)\n"
        "  explanation: Dynamo developers have intentionally marked that the function `disable` should not be traced."
    )
    fallback = "forward of FSDPNet (train.py:37) runs eagerly: torch would not convert it (Attempted to call), at train.py:39"
    assert "scope=regional" in str(breaks.advice_on_fallback(fallback, [text]))
    assert "scope=regional" not in str(breaks.advice_on_break(text.replace("FSDPNet", "Net")))
