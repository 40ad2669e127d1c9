"""Models with a graph break caused by Python or a library other than torch, and the same models mended."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import math
import os
import queue
import random
import re
import string
import sys
import threading
import time
import types
import uuid
import warnings
from typing import Any

import numpy as np
import pyarrow
import torch
from faulty_models import Case, Net, plain, with_assert_statement, with_break_in_loop, with_layers_in_turn, with_tensor_kept
from torch import Tensor, nn
from tqdm import tqdm, trange

from compile_sweep.contract.installed_torch import torch_version

_log = logging.getLogger("a model of the tests")


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


def with_print(net: Net, x: Tensor) -> Tensor:
    print("step")
    return net.layer(x)


def with_print_unless_compiling(net: Net, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        print("step")
    return net.layer(x)


def with_line_above_a_progress_bar(net: Net, x: Tensor) -> Tensor:
    tqdm.write("step")
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


_lock = threading.Lock()


def with_lock(net: Net, x: Tensor) -> Tensor:
    with _lock:
        return net.layer(x)


_queue: queue.Queue[float] = queue.Queue()


def with_queue(net: Net, x: Tensor) -> Tensor:
    _queue.put(0.0)
    return net.layer(x)


def with_hash(net: Net, x: Tensor) -> Tensor:
    net.last = hashlib.md5(b"a").digest_size
    return net.layer(x)


def with_another_library(net: Net, x: Tensor) -> Tensor:
    net.last = pyarrow.total_allocated_bytes()
    return net.layer(x)


def with_bisection(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * bisect.bisect([1, 5, 9], x.size(0))


_rates = np.linspace(0.1, 0.4, 4)
_rates_of_python = _rates.tolist()


def _dropped(net: Net, x: Tensor, rate: float) -> Tensor:
    """As DropPath of timm and of many models, whose rates come from np.linspace in some."""
    if rate == 0.0 or not net.training:
        return net.layer(x)
    kept = x.new_empty((len(x), 1)).bernoulli_(1 - rate)
    return net.layer(x) * kept / (1 - rate)


def with_rate_of_numpy(net: Net, x: Tensor) -> Tensor:
    return _dropped(net, x, _rates[2])


def with_rate_of_python(net: Net, x: Tensor) -> Tensor:
    return _dropped(net, x, _rates_of_python[2])


class _Config(dict[str, Any]):
    __getattr__ = dict.__getitem__


class _ConfigInPython(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


_config, _config_in_python = _Config(act=torch.tanh), _ConfigInPython(act=torch.tanh)


def with_config(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _config.act(net.layer(x))
    return y


def with_config_in_python(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _config_in_python.act(net.layer(x))
    return y


def with_branch_on_numpys_draw(net: Net, x: Tensor) -> Tensor:
    for keep in np.random.uniform(size=2) > 0.2:
        if keep:
            x = x + net.layer(x)
    return x


def with_loop(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        x = net.layer(x)
    return x


def with_open_file(net: Net, x: Tensor) -> Tensor:
    open("/dev/null").close()
    return net.layer(x)


def with_file_written_to(net: Net, x: Tensor) -> Tensor:
    with open("/dev/null", "a", encoding="utf-8") as log:
        log.write("step")
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


def with_mixture_of_numpy(net: Net, x: Tensor) -> Tensor:
    share = np.random.beta(0.2, 0.2)
    return net.layer(share * x + (1 - share) * x.flip(0))


def with_mixture_of_torch(net: Net, x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.2, 0.2).sample()  # type: ignore[no-untyped-call]
    return net.layer(share * x + (1 - share) * x.flip(0))


def with_token(net: Net, x: Tensor) -> Tensor:
    net.last = uuid.uuid4()
    return net.layer(x)


def with_state_kept(net: Net, x: Tensor) -> Tensor:
    net.last = torch.get_rng_state()
    return net.layer(x)


def with_forked_state(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return net.layer(x + torch.rand(8))


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


def with_progress_bar(net: Net, x: Tensor) -> Tensor:
    for layer in tqdm(net.layers, disable=True):
        x = layer(x)
    return x


def with_class(net: Net, x: Tensor) -> Tensor:
    class Scale:
        value = 2.0

    return net.layer(x) * Scale.value


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


def with_numpy_padding(net: Net, x: Tensor) -> Tensor:
    return net.layer(torch.from_numpy(np.pad(x.numpy(), ((0, 0), (1, 1))))[:, 1:-1])


def with_torch_padding(net: Net, x: Tensor) -> Tensor:
    return net.layer(nn.functional.pad(x, (1, 1))[:, 1:-1])


def with_text_kept(net: Net, x: Tensor) -> Tensor:
    net.last = str(x)
    return net.layer(x)


def with_progress_of_a_range(net: Net, x: Tensor) -> Tensor:
    for _ in trange(1, disable=True):
        x = net.layer(x)
    return x


def with_activations_on_the_cpu(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net.layer(x)


IN_TURN = itertools.cycle((0.5, 1.0))


def with_values_in_turn(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * next(IN_TURN)


def with_value_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * net.heat


def with_break_in_a_comprehension(net: Net, x: Tensor) -> Tensor:
    return torch.stack([doubled(layer(x)) for layer in net.layers])


def with_comprehension(net: Net, x: Tensor) -> Tensor:
    return torch.stack([2 * layer(x) for layer in net.layers])


def with_match_kept(net: Net, x: Tensor) -> Tensor:
    net.last = re.match("a", "abc")
    return net.layer(x)


class Shape:
    """An object that computes what it is asked for once."""

    @functools.cached_property
    def scale(self) -> float:
        return 2.0


_read_before = Shape()
assert _read_before.scale == 2.0


def with_cached_property(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * Shape().scale


def with_cached_property_read_before(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * _read_before.scale


def with_product_of_numpy(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).view(int(np.prod(x.shape)))


def with_product_passed_on(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).view(np.prod(x.shape))  # type: ignore[arg-type]


def with_product_of_one_size(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).view(len(x), int(np.prod(x.shape[1:])))


def with_product_of_python(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).view(math.prod(x.shape))


_level = np.int64(0)


def with_module_picked_by_numpy(net: Net, x: Tensor) -> Tensor:
    return net.layers[_level](x)  # type: ignore[no-any-return]


def with_module_picked_by_python(net: Net, x: Tensor) -> Tensor:
    return net.layers[int(_level)](x)  # type: ignore[no-any-return]


def _halved(x: Tensor) -> Tensor:
    _halved.calls += 1  # type: ignore[attr-defined]
    return x / 2


_halved.calls = 0  # type: ignore[attr-defined]


def with_calls_of_a_function(net: Net, x: Tensor) -> Tensor:
    return net.layer(_halved(x))


_options = types.SimpleNamespace(heat=2.0)


def with_namespace_changed(net: Net, x: Tensor) -> Tensor:
    _options.heat *= 0.99
    return net.layer(x) * _options.heat


def with_heat_replaced(net: Net, x: Tensor) -> Tensor:
    net.heat = net.heat * 0.99
    return net.layer(x) * net.heat


def with_autocast_entered_by_a_stack(net: Net, x: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        if net.flag:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return net.layer(x)


def with_autocast_enabled_by_a_flag(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=net.flag):
        return net.layer(x)


def with_gradients_stopped_by_a_stack(net: Net, x: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        if net.flag:
            stack.enter_context(torch.no_grad())
        return net.layer(x)


def with_gradients_stopped_by_a_flag(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad() if net.flag else contextlib.nullcontext():
        return net.layer(x)


def with_largest_by_norm(net: Net, x: Tensor) -> Tensor:
    return net.layer(max([x, x.flip(1)], key=lambda view: view[:, 0].norm()))


def with_largest_of_a_stack(net: Net, x: Tensor) -> Tensor:
    views = [x, x.flip(1)]
    return net.layer(torch.stack(views)[torch.stack([view[:, 0].norm() for view in views]).argmax(0, keepdim=True)][0])


def with_sorted_items(net: Net, x: Tensor) -> Tensor:
    inputs = {"b": x, "a": 2 * x}
    return net.layer(torch.cat([value for _, value in sorted(inputs.items())]))


def with_sorted_names(net: Net, x: Tensor) -> Tensor:
    inputs = {"b": x, "a": 2 * x}
    return net.layer(torch.cat([inputs[name] for name in sorted(inputs)]))


@dataclasses.dataclass
class _Batch:
    x: Tensor


def with_fields_copied(net: Net, x: Tensor) -> Tensor:
    return net.layer(dataclasses.asdict(_Batch(x))["x"])


def with_fields_read(net: Net, x: Tensor) -> Tensor:
    return net.layer(vars(_Batch(x))["x"])


def with_assert_whose_text_is_computed(net: Net, x: Tensor) -> Tensor:
    assert x.abs().sum() < 1e9, f"too large: {x.max().item()}"
    return net.layer(x)


def with_template(net: Net, x: Tensor) -> Tensor:
    net.last = string.Template("at $place").substitute(place="the end")
    return net.layer(x)


BREAKS_OF_PYTHON = [
    Case("number of numpy", with_module_picked_by_numpy, with_module_picked_by_python),
    Case("attribute of a function", with_calls_of_a_function, with_tensor_kept),
    Case("attribute of an object", with_namespace_changed, with_heat_replaced),
    Case("context entered by a stack", with_autocast_entered_by_a_stack, with_autocast_enabled_by_a_flag),
    Case("context entered by a stack", with_gradients_stopped_by_a_stack, with_gradients_stopped_by_a_flag),
    Case("tensors compared by Python", with_largest_by_norm, with_largest_of_a_stack),
    Case("tensors compared by Python", with_sorted_items, with_sorted_names),
    Case("copy of a tensor by Python", with_fields_copied, with_fields_read),
    Case("data-dependent branch", with_assert_whose_text_is_computed, with_assert_statement),
    Case("untraceable builtin", with_template, plain),
    Case("numpy and scipy", with_product_of_numpy, with_product_of_python),
    Case("tensor in place of a number", with_product_passed_on, with_product_of_python),
    Case("value that is not a tensor", with_product_of_one_size, with_product_of_python),
    Case("cached property", with_cached_property, with_cached_property_read_before),
    Case("value that is not a tensor", with_match_kept, plain),
    Case("iterator made outside", with_values_in_turn, with_value_of_a_buffer),
    Case("break in a comprehension", with_break_in_a_comprehension, with_comprehension),
    Case("numpy and scipy", with_numpy_padding, with_torch_padding),
    Case("print, logging and warnings", with_text_kept, with_tensor_kept),
    Case("progress bar", with_progress_of_a_range, with_loop),
    Case("context manager", with_activations_on_the_cpu, plain),
    Case("Python's or numpy's random numbers", with_cut_at_random, with_mask_drawn_by_torch),
    Case("Python's or numpy's random numbers", with_part_at_random, with_mask_drawn_by_torch),
    Case("print, logging and warnings", with_text_of_values, with_logging_unless_compiling),
    Case("progress bar", with_progress_bar, with_layers_in_turn),
    Case("class made in the forward", with_class, plain),
    Case("explicit break", with_explicit_break, plain),
    Case("disabled function", with_disabled, doubled_in_graph),
    Case("Python's or numpy's random numbers", with_python_random, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_generator, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_random, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_permutation, with_torch_permutation),
    Case("Python's or numpy's random numbers", with_mixture_of_numpy, with_mixture_of_torch),
    Case("Python's or numpy's random numbers", with_token, plain),
    Case("seed set in the forward", with_state_kept, plain),
    Case("seed set in the forward", with_forked_state, with_drawn_noise),
    Case("numpy and scipy", with_interpolation, plain),
    Case("numpy and scipy", with_ufunc, plain),
    Case("print, logging and warnings", with_text_of_a_tensor, plain),
    Case("print, logging and warnings", with_root_logger, with_logging_unless_compiling),
    Case("own random generator", with_generator, with_default_generator),
    Case("own random generator", with_generator_made_there, with_drawn_noise),
    Case("seed set in the forward", with_seed, with_drawn_noise),
    Case("print, logging and warnings", with_standard_output, with_print_unless_compiling),
    Case("file, clock or system call", with_folder, plain),
    Case("print, logging and warnings", with_print, with_print_unless_compiling),
    Case("print, logging and warnings", with_line_above_a_progress_bar, with_print_unless_compiling),
    Case("print, logging and warnings", with_logging, with_logging_unless_compiling),
    Case("print, logging and warnings", with_warning, with_logging_unless_compiling),
    Case("file, clock or system call", with_clock, plain),
    Case("file, clock or system call", with_open_file, plain),
    Case("file, clock or system call", with_file_written_to, plain),
    Case("lock or queue", with_lock, plain),
    Case("lock or queue", with_queue, plain),
    Case("untraceable builtin", with_hash, plain),
    Case("untraceable builtin", with_bisection, plain),
    Case("operator of another library", with_another_library, plain),
    Case("Python's or numpy's random numbers", with_branch_on_numpys_draw, with_torch_random),
    Case("dictionary with attributes", with_config, with_config_in_python),
    # Torch 2.11 tells it as random numbers of numpy.
    *([Case("number of numpy", with_rate_of_numpy, with_rate_of_python)] if torch_version() >= (2, 13) else []),
    Case("break in a loop", with_break_in_loop, with_loop),
    Case("untraceable builtin", with_builtin, plain),
]
