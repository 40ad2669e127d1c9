"""Why a graph breaks where the forward changes a class, a function or another object, or holds a lock, and what helps."""

from compile_sweep.schema.causes.cause import Cause

_MAKE_BEFORE = "create optimizers before the first step, outside compiled code, which cannot create them"
OPTIMIZER_MADE = (
    Cause(  # the first of its class, which its constructor changes
        "optimizer made in the forward",
        _MAKE_BEFORE,
        headline=r"setattr\(\) on unsupported type",
        inside=r"\btorch/optim/",
        needs_all=True,
    ),
    Cause("optimizer made in the forward", _MAKE_BEFORE, explanation=r"`Optimizer\.add_param_group`"),
)

KEPT_STATE = (
    Cause(
        "state in a class",
        "keep what the forward changes in the model, self.seen = [] in __init__ in place of a list or a number of its class or "
        "of an autograd.Function, or return it: before torch 2.13 torch.compile cannot change what belongs to a class, and may "
        "go on with an old value",
        explanation=r"operator `setattr` with argument types \['type', 'str', '(?!int')"
        r"|method `(append|extend|insert|add|update|pop|clear|__setitem__)` of class `(list|dict|set|deque|<unknown type>)`",
    ),
    *OPTIMIZER_MADE,
    Cause(
        "context entered by a stack",
        "torch.compile cannot trace how contextlib.ExitStack enters torch's contexts: write with torch.autocast(…, "
        "enabled=self.amp): or with torch.no_grad() if self.frozen else contextlib.nullcontext(): in its place",
        explanation=r"setattr\(\) is not supported on type (autocast|\w*grad\w*)\b|function `\w+\.__enter__`",
    ),
    Cause(
        "attribute of a function",
        "torch.compile cannot change an attribute of a function, scaled.calls += 1: keep it in the model, self.calls += 1, which "
        "dynamo.allow_unspec_int_on_nn_module=on lets vary, or count outside the forward",
        explanation=r"setattr\(\) is not supported on type function\b",
    ),
    Cause(
        "attribute of an object",
        "torch.compile cannot change attributes of an object such as a types.SimpleNamespace: keep what the forward changes in "
        "the model, and a number in a buffer, to which a new tensor is assigned, self.heat = self.heat * 0.99",
        explanation=r"method `__setattr__` of class",
    ),
    Cause(
        "hooks",
        "register hooks once, before compiling and not in the forward, or do their work in the forward itself; what counts in a "
        "class, as hooks do, is to count in the model, self.calls += 1",
        headline=r"\b[Hh]ooks?\b|BackwardHook|RemovableHandle|setattr\(\) on unsupported type",
        explanation=r"operator `setattr` with argument types \['type',",  # as torch before 2.13 says it
    ),
    Cause(
        "parameter made in the forward",
        "create parameters and modules in __init__; if a library creates them in the first forward, run one forward before "
        "compiling",
        headline=r"torch\.nn\.Parameter\(\)` constructor|parameter construction",
    ),
    Cause(
        "cached property",
        "functools.cached_property of Python 3.11 takes a lock at its first use, which torch.compile cannot trace: read the "
        "property once in __init__, or compute it there",
        explanation=r"enter a `RLock`",
        inside=r"\bfunctools\.py",
        needs_all=True,
    ),
    Cause(
        "lock or queue",
        "locks and queues of threads cannot be traced, and a function that holds a lock runs eagerly as a whole: lock, put and "
        "get outside compiled code, before the step or with what the forward returns",
        explanation=r"`_thread\.\w*lock|enter a `\w*([Ll]ock|Condition|Semaphore)` context manager"
        r"|class `\w*([Ll]ock|Condition|Semaphore)` ",
    ),
)
"""Causes of graph breaks, the most specific first."""
