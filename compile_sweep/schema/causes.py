"""Why something is not compiled, or is recompiled again and again, and what to do about it: one table that every view reads.

Background: torch reports a graph break as a headline, which names the kind of break, and an explanation, which says what code it
met. It reports a failed guard as the expression that no longer holds. Records keep both as text (`torch_logs.py`). Headline and
guard are structured, so they are matched first. Of the explanation, only names that torch inserts are matched, never the hints,
which are boilerplate, nor the user's own line. The first matching cause counts, so the most specific ones come first.

Output: a `Cause` for a finding, or None. For each cause, a test shows that its advice fixes a model that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compile_sweep.schema.recompiles import Recompile, RecompileSeries, fold_recompiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause, the patterns that it is recognized by, and what helps."""

    name: str
    advice: str
    headline: str = ""
    """Pattern of torch's headline of a graph break; empty matches any."""
    explanation: str = ""
    """Pattern of the explanation below torch's headline; empty matches any."""
    inside: str = ""
    """Pattern of the place in torch or another library that the user's line led to; empty matches any."""
    guard: str = ""
    """Pattern of a failed guard, matched from its beginning."""


def _break(name: str, advice: str, *, headline: str = "", explanation: str = "", inside: str = "") -> Cause:
    return Cause(name=name, advice=advice, headline=headline, explanation=explanation, inside=inside)


_DRAW_WITH_TORCH = (
    "draw with torch (rand, randint, randperm), which can be compiled: keep = torch.rand(()) > 0.2, then x + keep * block(x) "
    "instead of `if`; or draw before the forward and pass the result in as a tensor; pick one of several modules outside "
    "compiled code"
)
_VALUE_OF_A_TENSOR = (
    "keep the value a tensor, with torch.where(condition, a, b) in place of `if`, or read it with .item() after the step and not "
    "in the forward"
)
_OWN_GENERATOR = (
    "torch.compile cannot trace a torch.Generator of your own: draw outside the forward and pass the result in, or draw from "
    "torch's default generator after torch.manual_seed"
)
_PRINT = "print, log and warn outside the forward, or only if not torch.compiler.is_compiling()"

_DENSE = (
    "torch.compile does not support sparse tensors: leave their module eager, or compute with dense tensors, for example "
    "with index_add"
)

_SUBCLASS = (
    "torch.compile can only pass plain tensors to an operator, or subclasses that define __tensor_flatten__ and "
    "__tensor_unflatten__ and are created before the step"
)

_FAKE = (
    "torch.compile must know what an operator returns without running it: put @torch.library.register_fake('library::name') "
    "on a function that returns an empty tensor of the right shape and dtype"
)

_RECURRENT = (
    "torch.compile leaves RNN, GRU and LSTM eager, and the function that calls them: try dynamo.allow_rnn=on "
    "(torch._dynamo.config.allow_rnn = True), or leave the layer eager and compile the modules around it"
)

_FUNCTION = (
    "write the Function's forward and backward with torch operators only, or make it an operator with "
    "torch.library.custom_op and register_autograd"
)

_SCRIPTED = (
    "torch.compile cannot look into modules made by torch.jit.script or trace: use the plain module that they were made of"
)

_CONTEXT = (
    "enter the context outside compiled code; a break inside a `with` also leaves the whole function uncompiled, so fix that one "
    "first"
)

_SYSTEM = "read files and clocks and call the operating system outside the forward, and pass in what it needs"

_MEMORY = "give the tensor its size when it is made, x.new_empty(size), and share or resize its memory outside compiled code"

_NUMPY = "torch.compile supports only part of numpy, and none of scipy: compute this with torch, or call it outside the forward"

BREAKS = (
    _break(
        "explicit break",
        "the code asks for this break: remove the call",
        headline=r"Call to `torch\._dynamo\.graph_break\(\)`",
    ),
    _break(
        "disabled function",
        "this code is excluded from compiling: remove the decorator torch.compiler.disable, or move the call out of the forward",
        headline=r"torch\.compiler\.disable|skip_frame",
    ),
    _break(
        "seed set in the forward",
        "seed, save and restore random state before the step, outside compiled code",
        explanation=r"function `(manual_seed|seed|get_rng_state|set_rng_state|fork_rng|Random\.seed)`|`random\.seed|\(fork_rng\)",
    ),
    _break(
        "Python's or numpy's random numbers",
        _DRAW_WITH_TORCH,
        explanation=r"(builtin|function) `[^`]*\b(\w*Random|RandomState|random)\.\w+"
        r"|\(numpy\.random\.|RandomState|default_rng|of class `Generator`|`posix\.urandom|\bUnspecializedPythonVariable"
        r"|\(random_value\)",
    ),
    _break("numpy and scipy", _NUMPY, explanation=r"\(numpy\."),
    _break(
        "causal mask",
        "pass is_causal=True beside the mask, self.encoder(x, mask, is_causal=True); otherwise torch.nn compares the mask's "
        "values to find out",
        headline=r"Tensor\.item\(\)|[Dd]ata.dependent",
        inside=r"torch/nn/modules/transformer\.py",
    ),
    _break("value of a tensor", _VALUE_OF_A_TENSOR, headline=r"Tensor\.(item|tolist)\(\)|Data dependent operator"),
    _break(
        "value of a tensor",
        _VALUE_OF_A_TENSOR,
        explanation=r"builtin operator `(range|int|float|round|complex)` with argument types \[[^]]*'Tensor'",
    ),
    _break(
        "data-dependent branch",
        "compute both sides and choose with torch.where(condition, a, b), or use torch.cond, which keeps both in the graph; a "
        "check that only raises an error belongs after the step, or in torch._assert_async(condition)",
        headline=r"[Dd]ata-dependent (branch|jump)",
    ),
    _break(
        "number of classes",
        "pass the number of classes, one_hot(labels, num_classes=10); otherwise torch looks for the largest label",
        headline=r"one_hot` with data-dependent",
    ),
    _break(
        "CTC loss",
        "torch.compile cannot trace the CTC loss: the rest is compiled all the same; scope=modular compiles the model alone, "
        "without a break",
        explanation=r"`aten\._ctc_loss",
    ),
    _break(
        "output of unknown size",
        "the number of rows depends on the data: keep all rows and weight them by a mask, out + mask[:, None] * value, or set "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
        headline=r"[Dd]ynamic shape operator|data-dependent output shape",
    ),
    _break(
        "own random generator",
        _OWN_GENERATOR,
        headline=r"convert args/kwargs to proxy",
        explanation=r"\bGenerator\b",
    ),
    _break("own random generator", _OWN_GENERATOR, headline=r"torch\.Generator method|opaque object was created"),
    _break(
        "function handed to torch.autograd.functional",
        "use its counterpart in torch.func, which can be compiled: torch.func.jacrev, hessian, vjp or jvp",
        headline=r"convert args/kwargs to proxy",
        explanation=r"UserFunctionVariable|LambdaVariable|NNModuleVariable",
    ),
    _break("tensor subclass", _SUBCLASS, headline=r"convert args/kwargs to proxy"),
    _break("tensor subclass", _SUBCLASS, explanation=r"_make_wrapper_subclass"),
    _break("print, logging and warnings", _PRINT, headline=r"logging\.Logger|repr\(\) on tensor|BUILD_STRING"),
    _break(
        "print, logging and warnings",
        _PRINT,
        explanation=r"builtin operator `(print`|(str|repr|format)` .*'Tensor')|`_?warnings\.|Logging\w*Variable"
        r"|method `(write|flush)`",
    ),
    _break(
        "progress bar",
        "loop over the modules themselves, `for layer in self.layers`, and keep progress bars around whole steps",
        explanation=r"function `(tqdm\.|.*` in file `tqdm/)",
    ),
    _break(
        "checkpoints of a sequence",
        "call torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) for each part, which can be compiled",
        explanation=r"function `checkpoint_sequential`",
    ),
    _break(
        "file, clock or system call",
        _SYSTEM,
        explanation=r"builtin operator `open`|builtin `(time|posix|nt|_socket|resource|gc)\.|method `(now|utcnow|today)`"
        r"|`torch/serialization\.py`",
    ),
    _break("file, clock or system call", _SYSTEM, headline=r"Call to a time function"),
    _break(
        "setting of torch",
        "set torch's global settings once, before the first step",
        explanation=r"builtin `torch\.set_\w+|function `set_detect_anomaly|detect_anomaly",
    ),
    _break(
        "parameter made in the forward",
        "create parameters and modules in __init__; if a library creates them in the first forward, run one forward before "
        "compiling",
        headline=r"torch\.nn\.Parameter\(\)` constructor",
    ),
    _break(
        "gradient taken in the forward",
        "set torch._dynamo.config.trace_autograd_ops = True, or leave the code that takes the gradient eager and compile the "
        "modules it calls; a second derivative through compiled code is not possible",
        headline=r"torch\.autograd\.grad|Tensor\.backward\(\)",
    ),
    _break(
        "requires_grad_() in the forward",
        "call requires_grad_() on the tensor before the forward, outside compiled code; torch.func.stack_module_state, which "
        "does so, belongs there, too",
        headline=r"Tensor\.requires_grad_\(\)|setattr\(\) on Tensor\.requires_grad|requires_grad_\(\) intermediate",
    ),
    _break("sparse tensor", _DENSE, headline=r"sparse Tensor"),
    _break("sparse tensor", _DENSE, explanation=r"`[^`]*\bsparse_\w+_tensor"),
    _break(
        "nested tensor",
        "torch.compile cannot create nested tensors: pass in padded batches and a mask, or create them before the step with "
        "layout=torch.jagged",
        explanation=r"\(aten\._?nested\w+|strided NestedTensor",
    ),
    _break(
        "class made in the forward",
        "torch.compile does not support class statements: define the class outside the forward",
        headline=r"__build_class__",
    ),
    _break(
        "identity of an object",
        "id() and hash() of a tensor or a list are not known while compiling: use a name or a number as the key",
        headline=r"FakeIdVariable",
    ),
    _break(
        "retain_grad() in the forward",
        "gradients inside a graph are not kept: return the tensor from the forward, and call retain_grad() on it there",
        headline=r"retain_grad\(\)",
    ),
    _break(
        "operator without a fake implementation",
        _FAKE,
        headline=r"does not support running with fake tensors",
    ),
    _break(
        "value that is not a tensor",
        "this call returns something other than a tensor, which a graph cannot hold: make the call outside the forward, and "
        "pass in its result",
        headline=r"op returned non-Tensor",
    ),
    _break(
        "recurrent layer",
        _RECURRENT,
        headline=r"wrap RNN, GRU, or LSTM",
    ),
    _break("recurrent layer", _RECURRENT, explanation=r"does not support RNN, GRU, or LSTM"),
    _break(
        "packed sequences",
        "torch.compile does not support packed sequences: give the layer padded batches and a mask, or leave it eager",
        explanation=r"`torch/nn/utils/rnn\.py`",
    ),
    _break(
        "TorchScript module",
        _SCRIPTED,
        headline=r"torch\.jit\.",
    ),
    _break("TorchScript module", _SCRIPTED, explanation=r"_CachedForward\."),
    _break(
        "copy of a tensor by Python",
        "use x.clone(), which can be compiled, instead of copy.deepcopy(x); copy modules before the step",
        headline=r"copy\.deepcopy",
    ),
    _break(
        "hooks",
        "register hooks once, before compiling and not in the forward, or do their work in the forward itself",
        headline=r"\b[Hh]ooks?\b|BackwardHook|RemovableHandle|setattr\(\) on unsupported type",
    ),
    _break(
        "custom autograd.Function",
        _FUNCTION,
        headline=r"autograd\.Function",
    ),
    _break("custom autograd.Function", _FUNCTION, explanation=r"of class `\w+Backward`"),
    _break(
        "context manager",
        _CONTEXT,
        headline=r"[Cc]ontext ?manager|ContextWrapping",
    ),
    _break("context manager", _CONTEXT, explanation=r"function `(save_on_cpu|saved_tensors_hooks)\."),
    _break(
        "break in a loop",
        "a break inside a loop leaves the whole function uncompiled: fix the break inside the loop first",
        headline=r"graph break in loop",
    ),
    _break(
        "side effect in a checkpoint",
        "what torch.utils.checkpoint or a transform of torch.func calls may not change attributes or lists of the model, or the "
        "whole function runs eagerly: count and collect before or after the call",
        headline=r"HOP: .*side effect",
    ),
    _break(
        "set of tensors",
        "torch.compile cannot trace sets of tensors: use a list, or a set of names",
        headline=r"set with tensors",
    ),
    _break(
        "memory of a tensor",
        _MEMORY,
        headline=r"Tensor\.resize_\(\)|Tensor\.set_\(\)",
    ),
    _break("memory of a tensor", _MEMORY, explanation=r"method `share_memory_`"),
    _break(
        "exception in the forward",
        "the forward raises an exception here: fix that if it does so without torch.compile, too; if its caller catches it, "
        "catch it in the forward, or leave this call eager",
        headline=r"Observed exception",
    ),
    _break("numpy and scipy", _NUMPY, headline=r"numpy function unsupported|ndarray attribute"),
    _break("numpy and scipy", _NUMPY, explanation=r"`[^`]*\b(numpy|scipy)[./]|of class `ufunc`"),
    _break(
        "operator of another library",
        "torch.compile cannot see into this call: move it out of the forward, use torch's own operator, or wrap it with "
        "torch.library.custom_op",
        headline=r"marked as skipped|Unsupported (method|function) call|C/C\+\+|pybind|no traceable __call__",
    ),
    _break(
        "untraceable builtin",
        "torch.compile cannot trace this builtin: call it outside the forward, or write it with torch operators",
        headline=r"builtin operator|arguments for itertools|python_type\(\) call",
    ),
)
"""Causes of graph breaks."""

_OPTIMIZERS = "torch itself breaks the graph before every optimizer step; nothing to do"
_DDPS = "DistributedDataParallel does this outside the model; nothing to do"


def _guard(name: str, guard: str, advice: str) -> Cause:
    return Cause(name=name, advice=advice, guard=guard)


_NEVER_IN_PLACE = (
    "never change it in place in the forward that reads it, which in torch 2.13 can give wrong gradients without an error"
)
_IN_A_BUFFER = (
    "keep it in a buffer, self.register_buffer('steps', torch.zeros(())), and change that after the backward or assign a new "
    f"tensor, self.steps = self.steps + 1; {_NEVER_IN_PLACE}"
)

_MADE_AT_FIRST = (
    "what the first forward creates needs a graph of its own: create it in __init__, or run one forward before compiling"
)

GUARDS = (
    _guard(
        "learning rate",
        r"\S*param_groups.*\['lr'\]",
        "the learning rate is a Python number that the optimizer's graph was compiled for: make it a tensor, "
        "lr=torch.tensor(1e-3), or use a fused or foreach optimizer, which is not compiled",
    ),
    _guard(
        "hooks that are added",
        r"len\(\S*_hooks",
        "hooks are added during training: register them once, before compiling and not in the forward",
    ),
    _guard(
        "value read from a tensor",
        r"___stack\d+\S* ?(==|is|<|>|!=)|\S* (==|!=|<|>|<=|>=) ___stack\d+|\S+\.item\(\) ",
        "the number that .item() or another call returned at this line changes from step to step: keep the value a tensor, or do "
        "not use it in the forward; dynamic=static also freezes such numbers, which torch's own default, dynamic=auto, does not",
    ),
    _guard(
        "length after a graph break",
        r"tensor '___stack\d+\S*' size mismatch at index [1-9]",
        "a tensor that comes out of a graph break is not marked as dynamic, so its first length takes a graph of its own: fix "
        "the break at this line",
    ),
    _guard(
        "output of unknown size",
        r"tensor '___stack\d+.*size mismatch",
        "the number of rows at this line depends on the data: keep all rows and weight them by a mask",
    ),
    _guard(
        "train and eval mode",
        r"\S+\.training ==",
        "the module runs both in training and in evaluation mode, and each mode needs its own graph",
    ),
    _guard(
        "gradients switched on and off",
        r"GLOBAL_STATE changed: .*grad_mode",
        "it runs both with and without gradients, and each needs its own graph: put what needs no gradients in a module of "
        "its own",
    ),
    _guard(
        "autocast switched on and off",
        r"GLOBAL_STATE changed: .*autocast",
        "it runs under more than one autocast setting: use the same one in every step",
    ),
    _guard(
        "global setting of torch",
        r".*GLOBAL_STATE",
        "a global setting of torch changed (gradients, autocast, determinism): run every step under the same settings",
    ),
    _guard(
        "frozen and trained parameters",
        r"tensor '.+?' requires_grad mismatch",
        "tensors with and without requires_grad need separate graphs: accept one more if layers are unfrozen once, or keep it "
        "the same in every step; if equal blocks share a graph and only the first one's input has no requires_grad, call "
        "requires_grad_() on it",
    ),
    _guard(
        "modules that are added",
        r"len\(\S*\._modules\)",
        "modules are added during training: create them in __init__, before compiling",
    ),
    _guard(
        "gradient read in the forward",
        r"\S+\.grad is (not )?None",
        "parameters have no gradient in the first step or after zero_grad(), and each case takes a graph: read, clip and clear "
        "gradients after the backward, outside compiled code, or accept one graph more",
    ),
    _guard(
        "made in the first forward",
        r"not hasattr\(",
        _MADE_AT_FIRST,
    ),
    _guard(
        "list or dictionary that grows",
        r"len\(|not |KeyError|\S+ == (set\(\)|\{)|list\(dict\.keys\(",
        "a list, a dictionary or an object's attributes changed: keep what grows out of the forward, and keys the same in every "
        "step, or write it to a buffer of fixed size that the forward does not read",
    ),
    _guard(
        "dropout that changes",
        r".*drop\w*\.p\b.* == |\S+\.p == 0?\.\d",
        "torch.compile treats dropout's probability as a constant: write dropout out with a tensor, x * (torch.rand_like(x) "
        ">= self.p) / (1 - self.p), where self.p is a buffer that is changed after the backward",
    ),
    _guard(
        "blocks of different sizes",
        r"tensor '(self|fn)\S*\.(weight|bias|running_mean|running_var)' size mismatch",
        "blocks of one class have weights of different sizes, which takes a graph for each size: accept one for each, or use "
        "scope=full",
    ),
    _guard(
        "cache that grows",
        r"tensor 'self\S*' size mismatch",
        "the module's cache grows with the batches: build it once in __init__, at its largest size, and slice it in the "
        "forward, self.table[:length]",
    ),
    _guard(
        "global number",
        r"G\[\S+ == -?\d",
        "a global Python number changes from step to step, and each of its values needs its own graph: change it outside "
        f"compiled code and pass it in as a tensor, or {_IN_A_BUFFER}",
    ),
    _guard(
        "number that the forward is given",
        r"[A-Za-z]\w*(\[('\w+'|\d+)\])* == -?\d",
        "each value of this Python number takes a graph: hand it in as a tensor, torch.tensor(step); to pick one of several "
        "tensors, stack them and index with a tensor of one element, torch.stack(tables)[torch.tensor([step])]; pick one of "
        "several modules outside compiled code; dynamic=auto lets a number vary that selects nothing",
    ),
    _guard(
        "setting of a torch.nn module",
        r"\S+\.(momentum|eps|label_smoothing|negative_slope) == ",
        "modules of torch.nn take this as a number, and each of its values takes a graph: change it rarely, such as once an "
        "epoch, with a recompile_limit above the number of its values",
    ),
    _guard(
        "metric in the forward",
        r"\S*_update_count == ",
        "torchmetrics counts its updates in a Python integer: update metrics after the step, outside compiled code",
    ),
    _guard(
        "module's counter",
        r"\S+ == -?\d+(?![\d.])",
        f"a Python integer changes: {_IN_A_BUFFER}; or let it vary, also where it begins a slice, with "
        "dynamic=auto,dynamo.allow_unspec_int_on_nn_module=on; "
        "if it selects a branch or a module, select it outside compiled code",
    ),
    _guard(
        "Python number that changes",
        r".* == -?\d|___normalize_count_iter",
        f"a Python number changes from step to step: hand it in as a tensor, or {_IN_A_BUFFER}",
    ),
    _guard(
        "number that crosses a limit",
        r"(?!.*\.size\(\)\[)(\S+|\(.+\)) (<=|<|>=|>|!=) -?\d",
        "the code compares this number with a limit, and each side of the limit needs its own graph: the work changes between "
        "steps, so time both sides separately, or compare outside compiled code",
    ),
    _guard(
        "made in the first forward",
        r"\S+ is None",
        _MADE_AT_FIRST,
    ),
    _guard(
        "Python value that changes",
        r"\S+ == (True|False|['\"(])|.*type=<enum|\S+ is not None",
        "each of its values needs a graph of its own: a few are fine; if there are many, decide outside compiled code, or "
        "make it a tensor; leave texts that nothing is computed from, such as names of files, out of the forward",
    ),
    _guard(
        "identity of an object",
        r"Cache line invalidated because",
        "its graph was compiled for an object that no longer exists: do not use id() in the forward, and keep the objects it "
        "reads alive",
    ),
    _guard(
        "blocks of different kinds",
        r"___check_\w+\(fn\.",
        "modules of torch.nn that are compiled apart share their graphs, and each kind takes a graph of its own: accept one for "
        "each, with a recompile_limit above their number",
    ),
    _guard(
        "another object",
        r"___check_|\S+ is \S+",
        "the object it was compiled for was replaced by another: keep modules and functions the same in every step",
    ),
)
"""Causes of recompiles, except varying sizes of inputs."""

_NAMED = {cause.name: cause for cause in GUARDS}

GRAPHS_MEMORY = "output of CUDAGraphs that has been overwritten"
"""In the error of a tensor in memory that a CUDA graph has used again."""

REAL_PAIRS = "compute with pairs of real numbers, such as cos and sin instead of torch.polar"

ERRORS = (
    Cause(
        name="double backward",
        headline=r"does not currently support double backward|donated buffers",
        advice="a gradient of a gradient cannot go through compiled code: leave the module that is differentiated twice eager, "
        "or take its first derivative inside the compiled function, with torch.func.grad; if no second derivative is meant, use "
        "backward(retain_graph=True) without create_graph, with functorch.donated_buffer=off",
    ),
    Cause(
        name="marked length that the code fixes",
        headline=r"You marked .* as dynamic but your code specialized it|Constraints violated",
        advice="dynamic=mark insists that a length varies, but this code fixes it, often where it meets a tensor from before a "
        "graph break: use dynamic=auto, or fix the break",
    ),
    Cause(
        name="complex numbers",
        headline=r"[Cc]omplex|ComplexFloat|ComplexHalf",
        advice=f"{REAL_PAIRS}, or leave that module eager",
    ),
    Cause(
        name="memory of a CUDA graph",
        headline=GRAPHS_MEMORY,
        advice="a CUDA graph overwrites what it returned when it runs again: clone what a later step reads, such as "
        "losses.append(loss.detach().clone()), or leave CUDA graphs off; compiled blocks that run again in the backward "
        "pass, as with checkpointing, need scope=full or no CUDA graphs",
    ),
    Cause(name="custom operator without a fake implementation", headline=r"no fake impl", advice=_FAKE),
    Cause(
        name="changed in place before the backward",
        headline=r"needed for gradient computation has been modified by an inplace operation",
        advice="compiled code keeps other tensors for its backward than eager: assign a new tensor in place of x.mul_() or "
        "x.copy_(), or change it after the backward",
    ),
    Cause(
        name="operator that fails",
        headline=r"when making fake tensor call|Dynamo failed to run FX node with fake tensors",
        advice="an operator refuses these tensors: if the forward catches its exception, decide by shapes or dtypes instead, "
        "because compiled code cannot; otherwise fix the call, which fails without torch.compile, too",
    ),
    Cause(
        name="fullgraph",
        headline=r"fullgraph",
        advice="remove fullgraph=on, and fix the graph break that the error names",
    ),
)
"""Causes of compiler errors, matched against their text."""

EXCEPTIONS = (
    Cause(
        name="schedule that ends",
        headline=r"Tried to step \d+ times\. The specified number of total steps",
        advice="the learning rate's schedule has fewer steps than a trial makes, which warms up, times and compares: give it the "
        "number of steps of a whole training run",
    ),
    Cause(
        name="numpy computed by torch",
        headline=r"only 0-dimensional arrays can be converted",
        advice=f"torch.compile replaces numpy's functions by its own, some of which return arrays of another shape: {_NUMPY}",
    ),
)
"""Causes of other exceptions that a trial may raise, matched against their text."""

MEMORY_ADVICE = (
    "use a smaller batch, scope=regional or mode=default, or turn off CUDA graphs, which keep a memory pool of their own"
)


def cause_of_break(text: str) -> Cause | None:
    """Returns the cause of a graph break as records hold it: `place: headline`, then lines that start with their kind."""
    head, *rest = text.splitlines()
    headline = head.partition(": ")[2] or head
    explanation, inside = (
        next((line.strip() for line in rest if line.strip().startswith(f"{kind}: ")), "") for kind in ("explanation", "inside")
    )
    return next(
        (
            cause
            for cause in BREAKS
            if re.search(cause.headline, headline)
            and re.search(cause.explanation, explanation)
            and re.search(cause.inside, inside)
        ),
        None,
    )


_FSDP2S = (
    "torch never compiles FSDP2's hooks, so that a model with sharded parts is never one graph: use scope=regional, which "
    "compiles its blocks inside their hooks"
)


def advice_on_break(text: str) -> str | None:
    """Returns what helps against a graph break."""
    head = text.partition("\n")[0]
    if head.startswith("torch/optim/optimizer.py"):
        return _OPTIMIZERS
    if head.startswith("torch/nn/parallel/") or "inside: torch/nn/parallel/" in text:
        return _DDPS
    if " of FSDP" in head and "`disable`" in text:  # the class of a module that fully_shard() has sharded begins like that
        return _FSDP2S
    cause = cause_of_break(text)
    if (library := re.search(r"^  library: (\S+)$", text, re.MULTILINE)) is None:
        return cause.advice if cause else None
    theirs = f"the line is in {library[1]}, not in your code: accept the break, or compile around it with scope=regional"
    return f"{theirs}; what would help: {cause.advice}" if cause else theirs


def cause_of_guard(guard: str) -> Cause | None:
    """Returns the cause of a recompile, given the failed guard; None for sizes of inputs and properties of tensors."""
    expression = guard.partition(" # ")[0]
    return next((cause for cause in GUARDS if re.match(cause.guard, expression)), None)


def cause_of_series(series: RecompileSeries, breaks: Sequence[str] = ()) -> Cause | None:
    """Returns the cause of one source's recompiles, from the guard and the sequence of its values.

    Args:
        series: The recompiles.
        breaks: Graph breaks of the same run. What a break returned is guarded in the code after it, so the break says more.
    """
    if (behind := _cause_of_break_before(series.first, breaks)) is not None:
        return behind
    cause = cause_of_guard(series.first.guard)
    if cause is not None and cause.name == "list or dictionary that grows" and (series.count, series.values) == (1, ["0"]):
        return _NAMED["made in the first forward"]
    if cause is not None and cause.name == "made in the first forward" and len(series.values) > 1:
        return _cause_of_values(series.values[1:])
    if cause is None or cause.name != "module's counter":
        return cause
    numbers = [int(value) for value in series.values]
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) > 1 and min(steps) > 0:
        return _NAMED["cache that grows"]
    if series.count == 1 and numbers[0] in (0, -1):
        return _NAMED["made in the first forward"]
    return cause


def _cause_of_break_before(first: Recompile, breaks: Sequence[str]) -> Cause | None:
    """Returns the cause of the break that returned a guarded value; None if that was a value read from a tensor, or no break."""
    after = re.search(r" from line (\d+) on \((.+):\d+\)$", first.function)
    guarded = re.match(r"(?:___check\w+\()?(___stack\d+|[A-Za-z]\w*)(?![\w.(])", first.guard)
    if after is None or guarded is None:
        return None
    at = next((text for text in breaks if text.startswith(f"{after[2]}:{after[1]} ")), "")
    assigns = re.search(rf"^  code: (.*[ ;])?{guarded[1]} = ", at, re.MULTILINE)
    cause = cause_of_break(at) if at and (guarded[1].startswith("___") or assigns) else None
    return None if cause is None or cause.name in ("value of a tensor", "output of unknown size") else cause


def _cause_of_values(values: Sequence[str]) -> Cause | None:
    """Returns the cause of recompiles for something that was None at first, from its later values."""
    if len(values) > 1 and all(value.startswith(("(", "[", "{")) for value in values):
        return _NAMED["list or dictionary that grows"]
    return cause_of_guard(f"value == {values[0]}")


def advice_on_limit(hit: str, recompiles: Sequence[str] = (), breaks: Sequence[str] = ()) -> str:
    """Returns what helps against a recompile limit that was hit.

    Args:
        hit: The finding as records hold it, `function hit recompile_limit 8: guard`.
        recompiles: Recompiles of the same run.
        breaks: Graph breaks of the same run.
    """
    where, _, rest = hit.partition(" hit ")
    last = Recompile.parse(f"{where}: {rest.partition(': ')[2]}" if rest else hit)
    told = next((one for one in fold_recompiles(recompiles) if one.is_of(last)), RecompileSeries.of(last))
    if cause := cause_of_series(told, breaks):
        return named_advice(cause, told.first.source)
    if "size" in last.guard or not last.guard:
        of_data = (
            "if sizes depend on the data, such as rows that a router picks, use dynamic=auto, or keep all rows and "
            "weight them by a mask"
        )
        return f"use fewer lengths, dynamic=mark, or a higher recompile_limit; {of_data}"
    return "keep what the guard names the same in every step"


def named_advice(cause: Cause, source: str) -> str:
    """Returns the advice on a guard, with the attribute's own name in the code that it shows."""
    attribute = source.rpartition(".")[2]
    return re.sub(r"(?<=')steps(?=')|(?<=self\.)steps", attribute, cause.advice) if attribute.isidentifier() else cause.advice


def advice_on_fallback(text: str, breaks: Sequence[str]) -> str | None:
    """Returns what helps against something that runs eagerly.

    Args:
        text: The finding.
        breaks: Graph breaks of the same run: a break at the same line says more than the fallback itself.
    """
    place = text.rpartition(", at ")[2] if ", at " in text else None
    there = [one for one in breaks if place is not None and one.startswith((f"{place} ", f"{place}:"))]
    if advice := next(filter(None, map(advice_on_break, there)), None):
        return advice
    return next((advice for pattern, advice in _FALLBACKS if re.search(pattern, text)), None)


_FALLBACKS = (
    (r"nothing was compiled", "look for torch.compiler.disable, TORCH_COMPILE_DISABLE or a forward that is never called"),
    (r"meant to be compiled", "its forward is never called, or not through the module: call the module itself, not its parts"),
    (r"error was suppressed", "set torch._dynamo.config.suppress_errors = False to see the error, then fix it"),
    (r"would not convert", "remove the graph break it names; the rest of the function is then compiled"),
)

_SKIPS = (
    (
        r"mutated inputs|input mutation",
        "do not change an input in place: work on a clone, or make it a buffer of the model that the forward only writes to",
    ),
    (r"cpu (device|ops)", "move that tensor to the GPU before the forward, or leave CUDA graphs off"),
    (r"multiple devices", "keep the whole step on one GPU, or leave CUDA graphs off"),
    (r"re-?recording", "memory moves between steps: keep gradients in place (static_gradients=on), or leave CUDA graphs off"),
    (r"dynamic shape|symint", "use dynamic=static or buckets, which have fixed sizes, or leave CUDA graphs off"),
    (r"", "leave CUDA graphs off (mode=default), or compile less at once (scope=regional) to see which part they fail in"),
)


def advice_on_cudagraph_skip(text: str) -> str:
    """Returns what helps against skipped CUDA graphs."""
    return next(advice for pattern, advice in _SKIPS if re.search(pattern, text))


def advice_on_error(text: str) -> str | None:
    """Returns what helps against a compiler error."""
    return next((cause.advice for cause in ERRORS if re.search(cause.headline, text)), None)


def advice_on_exception(text: str) -> str | None:
    """Returns what helps against an exception that the compiler did not raise."""
    return next((cause.advice for cause in EXCEPTIONS if re.search(cause.headline, text)), None)


FASTER_FROM = 1.05
"""Speedup over eager from which a setting counts as faster."""

_SHORT_STEP_MS = 2.0
"""Step time below which fixed costs matter: a call of compiled code checks guards and passes through AOTAutograd's Python. Two
layers of 8 × 8, forward and backward, took 0.3 ms longer compiled than in eager on one core of a busy host.
"""

_WAITS_FROM = 0.1
"""Fraction of a step spent waiting for data from which the wait matters."""

_LAUNCH_BOUND_BELOW = 0.7
"""Fraction of a step with kernels running, below which the step is bound by launching them."""

_UNALIGNED_FROM = 0.1
"""Fraction of the matrix products' arithmetic with unaligned shapes from which the shapes matter."""

_BACKENDS_WITHOUT_CODE = ("eager", "aot_eager", "aot_eager_decomp_partition")


@dataclass(frozen=True, slots=True)
class Slowness:
    """Why a setting is not faster than eager, and what would help."""

    name: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}: {self.advice}"


def why_not_faster(found: Mapping[str, Any], speedup: float | None, backend: str | None = None) -> list[Slowness]:
    """Explains why a compiled setting is not faster than eager, the surest reason first; empty if it is faster.

    Only recorded facts count: without a profile, which only GPUs have, it is unknown whether memory or arithmetic limits a step,
    and this does not guess.

    Args:
        found: A measurement or a record, as a mapping.
        speedup: Speedup over eager; None if it is not known.
        backend: Backend of the setting; None for Inductor.
    """
    if speedup is None or speedup >= FASTER_FROM:
        return []
    return [*_runs_eagerly(found, backend), *_around_the_graphs(found)] or [
        Slowness(
            "not known",
            "nothing that was recorded explains it",
            "most of the step may be in kernels that eager calls too, such as matrix products and attention, which leaves little "
            "to fuse; torch.profiler over one step says which",
        )
    ]


def _runs_eagerly(found: Mapping[str, Any], backend: str | None) -> Iterator[Slowness]:
    """Yields the parts of the model that are not compiled."""
    if not found["graphs"]:
        yield Slowness("nothing compiled", "no graph was compiled", "see which parts run eagerly")
    if backend in _BACKENDS_WITHOUT_CODE:
        yield Slowness("backend", f"backend={backend} generates no code", "leave it out, so that Inductor does")
    for hit in found["recompile_limit_hits"]:
        where = hit.partition(" hit ")[0]
        advice = advice_on_limit(hit, found["recompile_reasons"], found["graph_break_reasons"])
        yield Slowness("recompile limit", f"{where} runs eagerly since it hit its recompile limit", advice)
    if number := len(found["fallbacks"]):
        yield Slowness("runs eagerly", f"{_counted(number, 'part')} of it runs eagerly", "fix these parts first")


def _around_the_graphs(found: Mapping[str, Any]) -> Iterator[Slowness]:
    """Yields costs of code that is compiled."""
    if (share := found.get("data_wait_share")) is not None and share >= _WAITS_FROM:
        yield Slowness(
            "data wait",
            f"it waits for data {share:.0%} of the time",
            "use more DataLoader workers, pinned memory or less work per sample; compiling cannot make that faster",
        )
    own = [text for text in found["graph_break_reasons"] if advice_on_break(text) not in (_OPTIMIZERS, _DDPS)]
    if own:
        yield Slowness(
            "graph breaks",
            f"{_counted(len(own), 'graph break')}, the first at {own[0].partition(' in ')[0].splitlines()[0]}",
            "nothing is fused across a break, and Python runs between the graphs; fix the breaks, or compile around them",
        )
    if any("complex operators" in text for text in found["perf_hints"]):
        yield Slowness("complex numbers", "it computes with complex numbers, which Inductor does not fuse", REAL_PAIRS)
    if skips := found["cudagraph_skip_reasons"]:
        yield Slowness("CUDA graphs skipped", "CUDA graphs were skipped", advice_on_cudagraph_skip(skips[0]))
    yield from _on_the_device(found.get("device_use") or {})
    if found["step_ms_median"] < _SHORT_STEP_MS:
        yield Slowness(
            "short steps",
            f"a step takes {found['step_ms_median']:.2g} ms, and any call of compiled code costs some tenths of a millisecond",
            "use a larger batch, fewer graphs that each hold more of the step (scope=full, optimizer=compiled), or, on a GPU, "
            "mode=reduce-overhead",
        )


def _on_the_device(use: Mapping[str, float]) -> Iterator[Slowness]:
    """Yields what a profile of the GPU shows; nothing without one."""
    if (busy := use.get("busy")) is None:
        return
    kernels = f"{use['kernels_per_step']:,.0f} kernels a step"
    if busy < _LAUNCH_BOUND_BELOW:
        yield Slowness(
            "launch-bound",
            f"the GPU runs kernels {busy:.0%} of the time, {kernels}, and waits for the next launch in between",
            "use mode=reduce-overhead, whose CUDA graphs launch many kernels at once, a larger batch, or larger graphs "
            "(scope=full, optimizer=compiled)",
        )
        return
    products = sum(use.get(f"{kind}_share", 0.0) for kind in ("matmul", "attention", "convolution"))
    moving = sum(use.get(f"{kind}_share", 0.0) for kind in ("pointwise", "reductions", "copies"))
    reached = f", at {use['mfu']:.0%} of the card's measured rate" if "mfu" in use else ""
    if products >= moving:
        yield Slowness(
            "matmul-bound",
            f"{products:.0%} of its kernels' time is matrix products, attention and convolutions{reached}, which eager calls too",
            "try a lower precision (autocast, matmul_precision=high), another attention kernel, mode=max-autotune, or "
            "memory_format=channels_last for convolutions",
        )
    else:
        yield Slowness(
            "memory-bound",
            f"{moving:.0%} of its kernels' time is element-wise work, reductions and copies, which memory limits",
            "try larger graphs, so that more is fused (scope=full, optimizer=compiled), or a lower precision",
        )
    if use.get("unaligned_products", 0.0) >= _UNALIGNED_FROM:
        yield Slowness(
            "shapes",
            f"{use['unaligned_products']:.0%} of its matrix products have a side that is not a multiple of 8",
            "pad vocabulary, widths and batches to multiples of 8 (64 for half precision), which tensor cores need",
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
