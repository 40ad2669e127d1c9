"""Why the compiler or a compiled step raises an error, or skips CUDA graphs, and what helps."""

import re

from compile_sweep.schema.causes.breaks import cause_of_break, with_operator
from compile_sweep.schema.causes.cause import FAKE, NUMBER_OF_NUMPY, NUMPY, TRUE_OR_FALSE, Cause

GRAPHS_MEMORY = "output of CUDAGraphs that has been overwritten"

GRAPHS_POOL = "in the cudagraph pool not tracked as outputs"
"""In the error of a tensor in memory that a CUDA graph has used again."""

WRONG_FAKE = "incorrect fake (aka meta) kernel"
"""In the error of Inductor's code where an operator returned a tensor of another size or layout than its fake implementation."""

SECOND_BACKWARD = "Trying to backward through the graph a second time"
"""In the error of a step that goes back through an earlier one, which eager raises, too, or twice through one compiled call."""

REAL_PAIRS = (
    "compute with pairs of real numbers, such as cos and sin instead of torch.polar, and torch.view_as_real(x) of what an FFT "
    "returns"
)

CHANGED_IN_PLACE = Cause(
    "changed in place before the backward",
    "the backward needs a tensor that is changed in place, and in compiled code it may need others than in eager: assign a new "
    "tensor in place of x.mul_() or x.copy_(), such as x.index_copy(0, rows, y) in place of x[rows] = y, or change it after the "
    "backward; where a module with spectral_norm is called twice, go back after each call, or call it once with both batches",
    error=r"needed for gradient computation has been modified by an inplace operation",
)

SUBCLASS = Cause(
    "tensor subclass",
    "compiled code is given a subclass of torch.Tensor that does not say how it is taken apart: take the plain tensor out of "
    "it before the forward, x.as_subclass(torch.Tensor)",
    error=r"Multiple dispatch failed for '[\s\S]*_AnalyzeCustomOpInputOutputMode",
)

NO_BACKWARD = Cause(
    "custom operator without a backward",
    "an operator of torch.library has no backward, and eager fails here, too: give it one, "
    "my_op.register_autograd(backward, setup_context=save), or call it on x.detach() if no gradient is meant to pass",
    error=r"no autograd formula was registered",
)

_LAID_OUT = r"view size is not compatible with input tensor's size and stride"

VIEWED = rf"{_LAID_OUT}|Cannot view a tensor with shape .* and strides"
"""Pattern of the errors of eager training and of Dynamo where a view cannot take a tensor that is laid out otherwise."""

_LAYOUT = (
    "x.view(…) cannot take a tensor that is laid out in memory like this: with memory_format=channels_last, write x.flatten(1) "
    "or x.reshape(…) in its place, or leave memory_format out"
)

_DOUBLE_BACKWARD = (
    "leave the module that is differentiated twice eager (scope=modular, and parts without it), or take its first derivative "
    "inside the compiled function, torch.func.grad(lambda x: model(x).sum())(x)"
)

FULLGRAPH = Cause("fullgraph", "remove fullgraph=on, and fix the graph break that the error names", error=r"fullgraph")

ERRORS = (
    Cause(
        "double backward",
        f"a gradient of a gradient cannot go through compiled code that has returned: {_DOUBLE_BACKWARD}; where the loss calls "
        "torch.autograd.grad, add dynamo.trace_autograd_ops=on to scope=full, with requires_grad_() called on the batch before",
        error=r"does not currently support double backward",
        remedy="dynamo.trace_autograd_ops=on",
    ),
    Cause(
        "donated buffers",
        "compiled code gives back memory that a second backward needs: if no second derivative is meant, use "
        "backward(retain_graph=True) without create_graph, with functorch.donated_buffer=off; if one is, "
        f"{_DOUBLE_BACKWARD}",
        error=r"donated buffers",
        remedy="functorch.donated_buffer=off",
    ),
    Cause(
        "marked length that the code fixes",
        "dynamic=mark insists that a length varies, but it is fixed, by a Python loop over positions, a tensor from before a "
        "graph break, or Inductor itself, as in the backward pass of a convolution over that length on a CPU: use dynamic=auto, "
        "fix the break, or compile what the loop calls apart (scope=regional, or scope=modular and parts)",
        error=r"You marked .* as dynamic but your code specialized it|Constraints violated",
    ),
    Cause(
        "bounds of a size",
        "torch fails to bound a size that a strided layer computes, as where attention with dropout follows one on a CPU: use "
        "scope=regional, whose blocks are given that size, dynamic=static, or attention without dropout",
        error=r"ValueRangeError: Invalid ranges",
    ),
    Cause("complex numbers", f"{REAL_PAIRS}, or leave that module eager", error=r"[Cc]omplex|ComplexFloat|ComplexHalf"),
    Cause(
        "memory of a CUDA graph",
        "a CUDA graph overwrites what it returned when it runs again: clone what a later step reads, such as "
        "losses.append(loss.detach().clone()), or leave CUDA graphs off; compiled blocks that run again in the backward "
        "pass, as with checkpointing, need scope=full, no CUDA graphs or, in a script, activation_checkpointing=off",
        error=GRAPHS_MEMORY,
    ),
    Cause(
        "weights replaced under CUDA graphs",  # https://github.com/pytorch/pytorch/issues/183313
        "a CUDA graph cannot hold weights that the forward replaces, as by copy.data = copy.data * m + weight.data * (1 - m): "
        "change them in place, copy.mul_(m).add_(weight, alpha=1 - m) under torch.no_grad(), or after the optimizer's step, or "
        "leave CUDA graphs off",
        error=GRAPHS_POOL,
    ),
    Cause(
        "inference mode in a forward that trains",
        "compiled code cannot take a view of a tensor from outside under torch.inference_mode(), such as a slice of a "
        "buffer: write torch.no_grad() in its place, as around a frozen teacher",
        error=r"version_counter for inference tensor",
    ),
    Cause(
        "forward-mode derivative",
        "Inductor fails at torch.func.jvp of many layers, and at jacfwd: go backwards, y, pull = torch.func.vjp(f, x) and "
        "pull(v)[0] for v times the Jacobian, which (v * jvp).sum() needs as well, and jacrev for the Jacobian; or leave the "
        "code that takes the derivative eager",
        error=r"ZeroTensors are immutable",
    ),
    Cause(
        "LSTM on a CPU",
        "torch cannot unroll oneDNN's LSTM: set torch.backends.mkldnn.enabled = False before compiling, or leave "
        "dynamo.allow_rnn out",
        error=r"tensors_saved_with_vc_check to be Tensors|mkldnn_rnn_layer",
    ),
    Cause(
        "permutation as an index",
        "Inductor rewrites x[torch.randperm(n)] and fails: draw the permutation before the forward, write "
        "torch.rand(n, device=x.device).argsort() for it, or set inductor.pattern_matcher=off",
        error=r"Not all inputs to pattern found[\s\S]*slice_shape",
        remedy="inductor.pattern_matcher=off",
    ),
    Cause(
        "sparse gradients",
        "Inductor cannot compute with the sparse gradients of an embedding, as where it is called twice and they are added up, "
        "nor torch.compile with those of an EmbeddingBag that is given per_sample_weights: pass sparse=False to "
        "torch.nn.Embedding or EmbeddingBag, with an optimizer other than SparseAdam",
        error=r"SparseTensorImpl|torch\.Size\(\[\d+, 1\]\); but expected shape should be broadcastable to \[0, \d+\]"
        r"|expected size (\d+)==\1, stride 0==[1-9]\d* at dim=0[\s\S]*Error in op: torch\.ops\.aten\.",
    ),
    Cause(
        "operator of torch with another layout",
        "the operator of torch that the error names returns a tensor of another size or layout than Inductor expects: call "
        ".contiguous() on what it is given, or leave the module that calls it eager",
        error=rf"Error in op: torch\.ops\.(aten|prims)\.[\s\S]*{re.escape(WRONG_FAKE)}",
    ),
    Cause("custom operator without a fake implementation", FAKE, error=r"no fake impl"),
    Cause(
        "custom operator with a wrong fake implementation",
        "the operator that the error names returns a tensor of another size or layout than its register_fake says: make both "
        "the same, return x.new_empty(x.size(1), x.size(0)) for a transpose; torch.library.opcheck(my_op, arguments) tells",
        error=rf"{re.escape(WRONG_FAKE)}|GeneratedBackwardFor_\w+ returned an invalid gradient",
    ),
    CHANGED_IN_PLACE,
    NO_BACKWARD,
    Cause(
        "view of another layout",
        f"{_LAYOUT}; without it, eager fails here, too",
        error=VIEWED,
    ),
    Cause(
        "tensor of another dtype made from an array",
        "torch.LongTensor(…) and FloatTensor(…) convert an array of numpy in eager, and in compiled code refuse one of "
        "another dtype: write torch.as_tensor(ids, dtype=torch.long) in place of torch.LongTensor(ids), float32 for "
        "FloatTensor or Tensor",
        error=r"expected TensorOptions\(dtype=",
    ),
    Cause(
        "operator that fails",
        "an operator refuses these tensors: if the forward catches its exception, decide by shapes or dtypes instead, "
        "because compiled code cannot; otherwise fix the call if eager fails here, too, or leave the module that makes it eager",
        error=r"when making fake tensor call|Dynamo failed to run FX node with fake tensors",
    ),
    SUBCLASS,
    Cause(
        "number that must be a constant",
        "a Python number that may vary is used where torch needs a constant, which `not` makes of it: "
        f"{TRUE_OR_FALSE} in place of set_grad_enabled(step % 4 == 0), with a graph for each answer",
        error=r"SymNodeVariable\(\) is not a constant",
    ),
    Cause(
        "number in a text",
        "Dynamo fails at a text of a number that may vary, such as f'{seconds:.3f}' of a time taken in the forward: make "
        "such texts outside the forward, or only if not torch.compiler.is_compiling()",
        error=r"Unknown format code '\w' for object of type 'str'",
    ),
    FULLGRAPH,
)
"""Causes of compiler errors."""

EXCEPTIONS = (
    CHANGED_IN_PLACE,
    NO_BACKWARD,
    SUBCLASS,
    Cause(
        "result laid out otherwise",
        f"{_LAYOUT}; without it, where eager works, call .contiguous() on what an operator such as BatchNorm1d is given, "
        "x.transpose(1, 2).contiguous(), or leave out backend=aot_eager",
        error=_LAID_OUT,
    ),
    Cause(
        "graph of the step before",
        "if eager raises this, too, detach what the model keeps from step to step, such as a running mean or a hidden state, "
        "self.state = state.detach(); if only compiled code does, add up the losses of a call, (actor_loss + critic_loss)"
        ".backward(), or call the parts that they are computed from apart, model.actor(x) and model.critic(x)",
        error=SECOND_BACKWARD,
    ),
    Cause(
        "factorization that fails",
        "compiled code cannot catch this exception: ask first, in a function that raises nothing, failed = torch.linalg."
        "cholesky_ex(a.detach())[1] > 0, or inv_ex or solve_ex, and change the matrix where it failed, a + 0.1 * failed[..., "
        "None, None] * torch.eye(a.shape[-1]); if the forward catches nothing, eager fails here, too, so keep the matrix regular",
        error=r"\blinalg[._]\w+: .*(not positive-definite|singular|failed to converge)",
    ),
    Cause(
        "schedule that ends",
        "the learning rate's schedule has fewer steps than a trial makes, which warms up, times and compares: give it the "
        "number of steps of a whole training run",
        error=r"Tried to step \d+ times\. The specified number of total steps",
    ),
    Cause(
        "number of numpy as an array",
        f"an operator is given a number of numpy, which torch.compile makes an array of: {NUMBER_OF_NUMPY}",
        error=r"must be \w+, not numpy\.ndarray",
    ),
    Cause(
        "numpy computed by torch",
        f"torch.compile replaces numpy's functions by its own, some of which return arrays of another shape: {NUMPY}",
        error=r"only 0-dimensional arrays can be converted|'numpy\.\w+' object (does not support|is not|has no)",
    ),
)
"""Causes of other exceptions that a trial may raise."""

REENTRANT_CHECKPOINT = (
    "eager loses these gradients, usually in torch.utils.checkpoint.checkpoint(…, use_reentrant=True), which gives none where no "
    "input needs one: pass use_reentrant=False"
)
"""What helps where only compiled code computes gradients of a module."""

MEMORY_ADVICE = (
    "use a smaller batch, scope=regional or mode=default, or turn off CUDA graphs, which keep a memory pool of their own"
)

CACHE = re.compile(r"an object of class \w*Cache")
"""What a call cannot be captured for if its model makes a cache of keys and values."""

_SKIPS = (
    (CACHE, "add use_cache=off, or leave cudagraphs out"),
    (r"runs eagerly: ", "leave cudagraphs out, or compile it: scope=full,mode=reduce-overhead"),
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


def cause_of_error(text: str) -> Cause | None:
    """Returns the cause of a compiler error."""
    return next((cause for cause in ERRORS if re.search(cause.error, text)), None)


def advice_on_error(text: str, spares: str | None = None) -> str | None:
    """Returns what helps against a compiler error, which is that against a graph break where fullgraph=on made one an error.

    Args:
        text: The error's text.
        spares: The setting that leaves the module eager that raised it, where others of a script's modules can be compiled.
    """
    spared = spares and f"leave the module that raised it eager: {spares}"
    return "; or ".join(filter(None, (_advice_on_error(text), spared))) or None


def _advice_on_error(text: str) -> str | None:
    said = text.partition("\nfrom user code:")[0]
    if known := cause_of_error(said):
        return with_operator(known.advice, said)
    if asked := re.search(r"Could not (guard on|extract) .*", said):
        unknown = cause_of_break(f"x: {asked[0]}")
        return unknown.advice if unknown else None
    if (explained := re.match(r"(\S.*)\n\s+Explanation: (.*)", said)) is None:
        return None
    cause = cause_of_break(f"x: {explained[1]}\n  explanation: {explained[2]}")
    return f"remove fullgraph=on, or the graph break: {cause.advice}" if cause else FULLGRAPH.advice


def advice_on_exception(text: str) -> str | None:
    """Returns what helps against an exception that the compiler did not raise."""
    return next((cause.advice for cause in EXCEPTIONS if re.search(cause.error, text)), None)
