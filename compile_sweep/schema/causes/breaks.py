"""Why a graph breaks or a part runs eagerly, by torch's words for it, and what helps.

Background: torch reports a graph break as a headline, which names the kind of break, and an explanation, which says what code it
met. Records keep both as text (`torch_logs.py`). The headline is structured. Of the explanation, only names that torch inserts
are matched, never the hints, which are boilerplate, nor the user's own line. The first matching cause counts, so the most
specific ones come first.
"""

import re
import sys
from collections.abc import Sequence

from compile_sweep.schema.causes.cause import (
    FAKE,
    KEPT_ASSERT,
    KL_DIVERGENCE,
    METRIC,
    NUMBER_OF_NUMPY,
    NUMPY,
    PRODUCT_OF_PYTHON,
    Cause,
)
from compile_sweep.schema.causes.kept_state import KEPT_STATE, OPTIMIZER_MADE
from compile_sweep.schema.causes.tensor_values import MODULE_PICKED, VALUES

_OWN_GENERATOR = (
    "torch.compile cannot trace a torch.Generator of your own: draw outside the forward and pass the result in, or draw from "
    "torch's default generator after torch.manual_seed"
)

_DRAW_BEFORE = "draw before the forward and pass the result in as a tensor, a size as an int"

_RECOMPUTES = (
    "torch.compile cannot trace a backward in the backward of a Function, as one that computes its forward again has: call "
    "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) in place of such a Function, or take the gradients by "
    "torch.autograd.grad there, with dynamo.trace_autograd_ops=on"
)

_BUILTIN = (
    "torch.compile cannot trace this operation of Python: do it outside the forward, once in __init__ if the result is always "
    "the same, or write it with torch operators"
)

_TEXT_OF_A_NUMBER = (
    "torch.compile cannot make a text of a number that may vary, f'step {step}' or '%.2f' % rate, nor of the value of a tensor, "
    "also where nothing is printed: make it outside the forward, or only if not torch.compiler.is_compiling(); if it is the "
    "key of what the forward keeps, return that and keep it outside"
)

BREAKS = (
    KL_DIVERGENCE,
    METRIC,
    Cause(
        "explicit break", "the code asks for this break: remove the call", headline=r"Call to `torch\._dynamo\.graph_break\(\)`"
    ),
    Cause(
        "backward in compiled code",
        _RECOMPUTES,
        headline=r"Tensor\.backward\(\)",
        explanation=r"\(autograd\.Function\)",
        needs_all=True,
    ),
    Cause(
        "backward in compiled code",
        _RECOMPUTES,
        explanation=r"function `backward` in file `torch/autograd/__init__\.py`|\(torch\.autograd\.backward\)",
    ),
    Cause(
        "disabled function",
        "this code is excluded from compiling: remove the decorator torch.compiler.disable, or move the call out of the forward",
        headline=r"torch\.compiler\.disable|skip_frame",
    ),
    Cause(
        "seed set in the forward",
        "seed, save and restore random state before the step, outside compiled code",
        explanation=r"function `(manual_seed|seed|get_rng_state|set_rng_state|fork_rng|Random\.seed)`|`random\.seed|\(fork_rng\)",
    ),
    Cause(
        "number of numpy",
        f"torch.compile takes a number of numpy for a tensor, whose value it does not know: {NUMBER_OF_NUMPY}",
        explanation=r"\(graph input\b",
    ),
    Cause(
        "number of numpy",
        "torch.compile takes a number of numpy that picks one of several modules for a tensor: make it one of Python before the "
        f"forward, int(level); otherwise {MODULE_PICKED}",
        explanation=r"builtin operator `str` with argument types \['int'\]",
        inside=r"torch/nn/modules/container\.py",
        needs_all=True,
    ),
    Cause(
        "Python's or numpy's random numbers",
        "draw with torch, which can be compiled, keep = torch.rand(()) > 0.2 and x + keep * block(x) or torch.where(keep, a, b) "
        f"in place of `if`; or {_DRAW_BEFORE}",
        forms=(
            (
                r"\b(beta|betavariate)\b",
                "mixup",
                f"draw with torch.distributions.Beta(a, a).sample(), which can be compiled; or {_DRAW_BEFORE}",
            ),
            (
                r"\b(randint|randrange|integers)\b",
                "whole numbers",
                f"draw with torch.randint and mark a cut at it, torch.where(torch.arange(n) < k, a, b); or {_DRAW_BEFORE}",
            ),
            (
                r"\b(shuffle|sample|choices?|permutation|permuted)\b",
                "an order or a choice",
                f"draw an order of rows with torch, x[torch.randperm(len(x))]; or {_DRAW_BEFORE}, and pick one of several "
                f"modules outside compiled code",
            ),
        ),
        explanation=r"(builtin|function) `[^`]*\b(\w*Random|RandomState|random)\.\w+"
        r"|\(numpy\.random\.|RandomState|default_rng|of class `Generator`|`posix\.urandom|\bUnspecializedPythonVariable"
        r"|\((random_value|random_sample|random|randn?|randint|normal|uniform|choice|shuffle)\b",
    ),
    Cause(
        "numpy and scipy",
        NUMPY,
        forms=(
            (
                r"\bin_an_assert\b.*\(numpy\.ndarray\.",
                "`assert` on what numpy computes",
                f"compute the condition with torch: a check {KEPT_ASSERT}",
            ),
            (
                r"\bin_a_branch\b.*\(numpy\.ndarray\.",
                "`if` on what numpy computes",
                "compute the condition with torch and choose by it, torch.where((x > 2).any(), a, b); a check that only raises "
                f"an error {KEPT_ASSERT}",
            ),
        ),
        explanation=r"\(numpy\.",
    ),
    Cause("text of a number", _TEXT_OF_A_NUMBER, explanation=r"\(%\)"),
    Cause(
        "causal mask",
        "pass is_causal=True beside the mask, self.encoder(x, mask, is_causal=True); otherwise torch.nn compares the mask's "
        "values to find out",
        headline=r"Tensor\.item\(\)|[Dd]ata.dependent",
        inside=r"torch/nn/modules/transformer\.py",
        needs_all=True,
    ),
    Cause(
        "average over all batches",
        "give BatchNorm a momentum, such as 0.1: with momentum=None it reads the number of batches from a tensor",
        headline=r"Tensor\.item\(\)",
        inside=r"torch/nn/modules/batchnorm\.py",
        needs_all=True,
    ),
    *VALUES,
    Cause(
        "own random generator",
        _OWN_GENERATOR,
        headline=r"convert args/kwargs to proxy",
        explanation=r"\bGenerator\b",
        needs_all=True,
    ),
    Cause("own random generator", _OWN_GENERATOR, headline=r"torch\.Generator method|opaque object was created"),
    Cause(
        "function handed to torch.autograd.functional",
        "use its counterpart in torch.func, which can be compiled: torch.func.jacrev, hessian, vjp or jvp",
        headline=r"convert args/kwargs to proxy",
        explanation=r"UserFunctionVariable|LambdaVariable|NNModuleVariable",
        needs_all=True,
    ),
    Cause(
        "torch.func.linearize",
        "use torch.func.jvp(function, (x,), (tangent,)), which can be compiled, or where torch cannot, as with layer norms, two "
        "vjps of torch.func: y, back = vjp(function, x), then _, forth = vjp(lambda u: back(u)[0], torch.zeros_like(y)) and "
        "forth(tangent)[0], or call linearize outside the forward",
        explanation=r"function `disallow_in_graph`",
    ),
    Cause(
        "modules of torch.ao",
        "torch.compile does not trace torch.ao: quantize with torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, "
        "high), which it compiles, or train with the quantizers of torchao.quantization.qat",
        explanation=r"\(torch/ao\)|function `\w*(FakeQuantize|Observer)\w*\.forward`",
    ),
    Cause(
        "tensor subclass",
        "torch.compile can only pass plain tensors to an operator, or subclasses that define __tensor_flatten__ and "
        "__tensor_unflatten__ and are created before the step; take plain tensors out of others, x.as_subclass(torch.Tensor), "
        "before the forward, and make tensors of other things, such as images, before it, too",
        headline=r"convert args/kwargs to proxy|`as_subclass`",
        explanation=r"_make_wrapper_subclass",
    ),
    Cause(
        "print, logging and warnings",
        "print, log and warn outside the forward, or only if not torch.compiler.is_compiling()",
        headline=r"logging\.Logger|repr\(\) on tensor",
        explanation=r"builtin operator `(print`|(str|repr|format)` .*'Tensor')|`_?warnings\.|Logging\w*Variable"
        r"|method `(write|flush)`|function `tqdm\.write`",
    ),
    Cause(
        "text of a number",
        _TEXT_OF_A_NUMBER,
        headline=r"BUILD_STRING",
        explanation=r"builtin operator `(str|repr|format)` with argument types \['(int|float)'",
    ),
    Cause(
        "progress bar",
        "loop over the modules themselves, `for layer in self.layers`, and keep progress bars around whole steps",
        explanation=r"function `(tqdm\.|.*` in file `tqdm/)",
    ),
    Cause(
        "checkpoints of a sequence",
        "call torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) for each part, which can be compiled",
        explanation=r"function `checkpoint_sequential`",
    ),
    Cause(
        "file, clock or system call",
        "read files and clocks, collect garbage and call the operating system outside the forward, and pass in what it needs",
        explanation=r"builtin operator `open`|builtin `(time|posix|nt|_socket|resource|gc)\.|method `(now|utcnow|today)`"
        r"|`torch/serialization\.py`|enter a `(TextIOWrapper|Buffered\w+|GzipFile)` context manager",
        headline=r"Call to a time function",
    ),
    Cause(
        "setting of torch",
        "set torch's global settings once, before the first step",
        explanation=r"builtin `torch\.set_\w+|function `set_detect_anomaly|detect_anomaly",
    ),
    Cause(
        "gradient taken in the forward",
        "set dynamo.trace_autograd_ops=on (torch._dynamo.config.trace_autograd_ops = True), which compiles the gradient of this "
        "gradient, too, or leave the code that takes the gradient eager and compile the modules it calls, if no second "
        "derivative goes through them",
        remedy="dynamo.trace_autograd_ops=on",
        headline=r"torch\.autograd\.grad|Tensor\.backward\(\)",
    ),
    Cause(
        "requires_grad_() by transformers",
        "remove the hook on the embeddings, which only checkpointing with use_reentrant=True needs: "
        "model.disable_input_require_grads() or, if it was set twice, model.get_input_embeddings()._forward_hooks.clear()",
        headline=r"requires_grad_\(\)",
        inside=r"\btransformers/modeling_utils\.py",
        needs_all=True,
    ),
    Cause(
        "requires_grad_() in the forward",
        "call requires_grad_() on the tensor, or on those that it is computed from, before the forward, outside compiled code; "
        "torch.func.stack_module_state, which does so, belongs there, too",
        headline=r"Tensor\.requires_grad_\(\)|setattr\(\) on Tensor\.requires_grad|requires_grad_\(\) intermediate",
    ),
    Cause(
        "sparse tensor",
        "torch.compile does not support sparse tensors: leave their module eager, or compute with dense tensors, for example "
        "with index_add",
        headline=r"sparse Tensor",
        explanation=r"`[^`]*\bsparse_\w+_tensor",
    ),
    Cause(
        "nested tensor",
        "torch.compile cannot create nested tensors: pass in padded batches and a mask, or create them before the step with "
        "layout=torch.jagged",
        explanation=r"\(aten\._?nested\w+|strided NestedTensor",
    ),
    Cause(
        "dictionary with attributes",
        "torch.compile calls __getattr__ only where it is written in Python: def __getattr__(self, name): return self[name] in "
        "place of __getattr__ = dict.__getitem__, or read the configuration once, self.act = cfg.act in __init__",
        headline=r"non-function __getattr__",
    ),
    Cause(
        "class made in the forward",
        "torch.compile does not support class statements: define the class outside the forward",
        headline=r"__build_class__",
        explanation=r"__build_class__",
    ),
    Cause(
        "identity of an object",
        "id() and hash() of a tensor or a list, and x.data_ptr(), are not known while compiling: use a name or a number as the "
        "key",
        headline=r"FakeIdVariable|[Dd]ata pointer",
        explanation=r"operator `(id|hash)` with argument types",
    ),
    Cause(
        "retain_grad() in the forward",
        "gradients inside a graph are not kept: return the tensor from the forward, and call retain_grad() on it there",
        headline=r"retain_grad\(\)",
    ),
    Cause("operator without a fake implementation", FAKE, headline=r"does not support running with fake tensors"),
    Cause(
        "value that is not a tensor",
        "this call returns something other than a tensor, which a graph cannot hold: make the call outside the forward, and "
        f"pass in its result; where numpy returns a number, compute it with Python, {PRODUCT_OF_PYTHON}",
        headline=r"op returned non-Tensor",
        explanation=r"sourceless variable ConstantLikeVariable",
    ),
    Cause(
        "recurrent layer",
        "torch.compile leaves RNN, GRU and LSTM eager, and the function that calls them: in a script on a GPU use "
        "scope=eager,cudagraphs=on, else try dynamo.allow_rnn=on (torch._dynamo.config.allow_rnn = True), which unrolls it into "
        "a graph for each length (an LSTM on a CPU needs torch.backends.mkldnn.enabled = False), or compile what is around it",
        headline=r"wrap RNN, GRU, or LSTM",
        explanation=r"does not support RNN, GRU, or LSTM",
    ),
    Cause(
        "packed sequences",
        "torch.compile does not support packed sequences: give the layer padded batches and a mask, or leave it eager",
        explanation=r"`torch/nn/utils/rnn\.py`",
    ),
    Cause(
        "TorchScript module",
        "torch.compile cannot look into modules made by torch.jit.script or trace: use the plain module that they were made of",
        headline=r"torch\.jit\.|ScriptModule",
        explanation=r"_CachedForward\.",
    ),
    Cause(
        "configuration copied in the forward",
        "pass use_cache=False to the model, or in its configuration before it is made: training needs no cache of keys and "
        "values, and the one that transformers makes for an encoder and a decoder copies the configuration. In a sweep of a "
        "script, use_cache=off does it",
        headline=r"copy\.deepcopy",
        inside=r"transformers/configuration_utils\.py",
        needs_all=True,
    ),
    Cause(
        "copy of a tensor by Python",
        "use x.clone(), which can be compiled, instead of copy.deepcopy(x), and vars(batch) instead of dataclasses.asdict("
        "batch); call a module with changed weights by torch.func.functional_call(net, {name: 0.9 * weight for name, weight in "
        "net.named_parameters()}, (x,)), and copy modules before the step",
        headline=r"copy\.deepcopy",
        explanation=r"in file `copy\.py`",
    ),
    Cause(
        "backward hook of a module",
        "torch.compile breaks the graph at a module that has a backward hook: put the hook on a parameter, "
        "self.layer.weight.register_hook(…), or on the layer's output in the forward, y.register_hook(…), which are compiled",
        headline=r"Module-level backwards? hooks",
    ),
    *KEPT_STATE,
    Cause(
        "custom autograd.Function",
        "write the Function's forward and backward with torch operators only, or make it an operator with "
        "torch.library.custom_op and register_autograd",
        headline=r"autograd\.Function",
        explanation=r"of class `\w+Backward`",
    ),
    Cause(
        "context manager",
        "enter the context outside compiled code; a break inside a `with` also leaves the whole function uncompiled, so fix that "
        "one first",
        headline=r"[Cc]ontext ?manager|ContextWrapping",
        explanation=r"function `(save_on_cpu|saved_tensors_hooks)\.",
    ),
    Cause(
        "break in a loop",
        "a break inside a loop leaves the whole function uncompiled: fix the break inside the loop first",
        headline=r"graph break in loop",
    ),
    Cause(
        "iterator made outside",
        "torch.compile cannot take the next value of an iterator that was made outside the forward: take it before the step, and "
        "pass it in as a tensor or write it to a buffer",
        explanation=r"support next\(\) on (cycle|count|repeat|chain|zip|map|generator)\b|implements '__next__' in C"
        r"|method `__next__` of class",
    ),
    Cause(
        "break in a comprehension",
        "a break inside a comprehension or generator leaves the whole function uncompiled: fix the break inside it first",
        headline=r"Reconstruction failure|Missing tp_iternext|Read uninitialized cell|Generator reconstruction",
    ),
    Cause(
        "side effect in a checkpoint",
        "what torch.utils.checkpoint, a transform of torch.func or a tensor's hook calls may not change attributes or lists of "
        "the model, or the whole function runs eagerly: count and collect before or after that",
        headline=r"HOP: .*side effect",
    ),
    Cause(
        "set of tensors",
        "torch.compile cannot trace sets of tensors: use a list, or a set of names",
        headline=r"set with tensors",
    ),
    Cause(
        "memory of a tensor",
        "give the tensor its size when it is made, x.new_empty(size), also one that is passed as out=, ask x.nbytes in place of "
        "its storage, and share or resize its memory outside compiled code",
        headline=r"Tensor\.(resize_|resize_as_|set_|share_memory_)\(\)|out= tensor",  # share_memory_ since torch 2.15
        explanation=r"method `share_memory_`|of class `\w+Storage`",
    ),
    Cause(
        "break in an argument",
        "this method was looked up before a graph break in its arguments, which leaves the call itself out of the graph: fix "
        "that break first, or compute the argument in a line of its own, n = count(x), and then y.add(n)",
        explanation=r"`<unknown module>\.Tensor\.\w+",
    ),
    Cause(
        "exception in the forward",
        "the forward raises an exception here: fix that if it does so without torch.compile, too; if its caller catches it, "
        "catch it in the forward, or leave this call eager",
        headline=r"Observed exception",
    ),
    Cause(
        "numpy and scipy",
        NUMPY,
        headline=r"numpy function unsupported|ndarray attribute",
        explanation=r"`[^`]*\b(numpy|scipy)[./]|of class `ufunc`",
    ),
    Cause("untraceable builtin", _BUILTIN, explanation=rf"builtin `({'|'.join(sys.stdlib_module_names)})\.|`ContextVar`"),
    Cause(
        "operator of another library",
        "torch.compile cannot see into this call: move it out of the forward, use torch's own operator, or wrap it with "
        "torch.library.custom_op",
        headline=r"marked as skipped|Unsupported (method|function) call|C/C\+\+|pybind|no traceable __call__",
    ),
    Cause(
        "untraceable builtin",
        _BUILTIN,
        headline=r"builtin operator|arguments for itertools|python_type\(\) call|constant-like method",
    ),
)
"""Causes of graph breaks."""

_OPTIMIZERS = "torch itself breaks the graph before every optimizer step; nothing to do"
_DDPS = "DistributedDataParallel does this outside the model; nothing to do"
NOTHING_TO_DO = (_OPTIMIZERS, _DDPS)  # advice on breaks that torch itself makes around the model

_FSDP2S = (
    "torch never compiles FSDP2's hooks, so that a model with sharded parts is never one graph: use scope=regional, which "
    "compiles its blocks inside their hooks"
)


_MATCHED = ("headline", "explanation", "inside", "code")  # fields of `Cause` with patterns of a break


def cause_of_break(text: str) -> Cause | None:
    """Returns the cause of a graph break as records hold it: `place: headline`, then lines that start with their kind."""
    head, *rest = text.splitlines()
    said = {
        kind: line.strip()
        for line in reversed(rest)
        for kind in ("explanation", "inside", "code", "library", "its code")
        if line.strip().startswith(f"{kind}: ")
    }
    place, _, headline = head.partition(": ")
    said["headline"] = headline or head
    said.setdefault("inside", place)
    said["code"] = said.get("its code") or (said.get("code", "") if "library" in said and "inside: " not in text else "")
    for cause in BREAKS:
        patterns = [(kind, pattern) for kind in _MATCHED if (pattern := getattr(cause, kind))]
        if (all if cause.needs_all else any)(re.search(pattern, said.get(kind, "")) for kind, pattern in patterns):
            return cause
    return None


def with_operator(advice: str, text: str) -> str:
    """Returns the advice with the operator that torch's text names, `(library::name)` or `(library.name.overload)`."""
    named = re.search(r"\((\w+)(?:::|\.)(\w+)(?:\.\w+)?\)", text)
    return advice.replace("library::name", "::".join(named.groups())) if named else advice


def _by_form(cause: Cause, text: str, fallback: str) -> str:
    """Returns the advice on a cause that fits the form of it that a break has, and what runs eagerly for it."""
    code = re.search(r"^  code: (.*)$", text, re.MULTILINE)
    said = re.sub(r"^  (code|its code|hint): .*\n?", "", text, flags=re.MULTILINE)
    return cause.advice_on(code[1] if code else "", " ".join([*said.split(), fallback]))


def advice_on_break(text: str, fallback: str = "") -> str | None:
    """Returns what helps against a graph break, and against a function that runs eagerly for it, if there is one."""
    head = text.partition("\n")[0]
    in_optimizer = head.startswith("torch/optim/optimizer.py") or "inside: torch/optim/optimizer.py" in text
    if in_optimizer and cause_of_break(text) not in OPTIMIZER_MADE:
        return _OPTIMIZERS
    if head.startswith("torch/nn/parallel/") or "inside: torch/nn/parallel/" in text:
        return _DDPS
    if " of FSDP" in head and "`disable`" in text:  # the class of a module that fully_shard() has sharded begins like that
        return _FSDP2S
    cause = cause_of_break(text)
    advice = with_operator(_by_form(cause, text, fallback), text) if cause else None
    if (library := re.search(r"^  library: (\S+)$", text, re.MULTILINE)) is None:
        return advice
    around = "accept the break, or compile around it (scope=regional, or parts.NAME.compile=off)"
    theirs = f"the line is in {library[1]}, not in your code: {around}"
    return f"{theirs}; what would help: {advice}" if advice else theirs


def advice_on_fallback(text: str, breaks: Sequence[str]) -> str | None:
    """Returns what helps against something that runs eagerly; a graph break at the same line says more than the fallback."""
    place = text.rpartition(", at ")[2] if ", at " in text else None
    if resumed := re.match(r".* from line (\d+) on \((.+):\d+\) runs eagerly", text):
        place = place or f"{resumed[2]}:{resumed[1]}"
    if place is None and (whole := re.match(r".*?\((\S+:\d+)\) runs eagerly", text)):
        place = whole[1]  # where a back-end fails, torch names the function alone
    there = [one for one in breaks if place and (one.startswith((f"{place} ", f"{place}:")) or f"inside: {place}\n" in one)]
    for one in there:
        if advice := advice_on_break(one, text):
            block = next((words for pattern, words in _BLOCKS if re.search(pattern, text)), None)
            if block is None or "\n  library: " in one:  # a library's line cannot be moved
                return advice
            return f"{advice}; a break inside a {block} leaves the whole function eager, so at least move it out"
    return next((advice for pattern, advice in _FALLBACKS if re.search(pattern, text)), None)


_BLOCKS = (
    (r"graph break in loop", "loop"),
    (r"inside a `try`", "`try`"),
    (r"break under \w*Context", "`with`"),
)
"""Blocks at whose break torch gives up the whole function, by the reasons it gives."""

_FALLBACKS = (
    (r"nothing was compiled", "look for torch.compiler.disable, TORCH_COMPILE_DISABLE or a forward that is never called"),
    (r"\bstep\b.* meant to be compiled", "torch.compile cannot trace this optimizer: leave optimizer=compiled out"),
    (r"meant to be compiled", "its forward is never called, or not through the module: call the module itself, not its parts"),
    (r"error was suppressed", "set torch._dynamo.config.suppress_errors = False to see the error, then fix it"),
    (r"would not convert", "remove the graph break it names; the rest of the function is then compiled"),
)
