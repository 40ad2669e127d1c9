"""Why something is recompiled again and again, by the guard that failed, and what helps.

Background: torch reports a failed guard as the expression that no longer holds. The first matching cause counts, so the most
specific ones come first.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from compile_sweep.schema.causes.breaks import cause_of_break
from compile_sweep.schema.causes.cause import (
    ANY_ROWS,
    BANK_OF_TENSORS,
    DROPOUT_OF_TENSORS,
    KL_DIVERGENCE,
    LIST_OF_TENSORS,
    Cause,
)
from compile_sweep.schema.causes.changing_numbers import ARGUMENT, NUMBERS
from compile_sweep.schema.causes.changing_numbers import HIGHER_LIMIT as HIGHER_LIMIT
from compile_sweep.schema.causes.recompiles import Recompile, RecompileSeries, fold_recompiles, plain_guard

_READ = "the number that .item(), .tolist() or another call returned at this line changes from step to step"
_SCALARS = "dynamo.capture_scalar_outputs=on, which keeps such numbers in the graph"

_MADE_AT_FIRST = (
    "what the first forward creates needs a graph of its own: create it in __init__, or run one forward before compiling"
)

FIXED_LENGTH = (
    "this code fixes the length, often in a Python loop over positions or as a dictionary's key: make one table in __init__, as "
    "long as the longest, and slice it, self.table[:n, :n], in place of one for each length; pad to fewer lengths "
    "(dynamic=buckets) with a recompile_limit above their number, or compile what the loop calls apart (scope=modular and parts, "
    "or scope=regional)"
)
"""What helps where the compiled code depends on the length."""

VIEW = Cause(
    "view of another tensor",
    "one call gets a view of another tensor, often the first of equal blocks, after a reshape or a linear layer, and torch "
    "checks the other tensor's sizes: call .clone() on the view, or accept one graph more",
    guard=r"'NoneType' object has no attribute '(size|stride|storage_offset)'",  # of x._base, which others do not have
)

GROWS_UNEVENLY = Cause(
    "cache that grows",
    "a Python integer of the module grows: if it counts, such as tokens or samples, or is a length that a schedule sets, let it "
    "vary with dynamic=auto,dynamo.allow_unspec_int_on_nn_module=on; if it is the size of a cache, build it once in __init__, at "
    "its largest size, and slice it in the forward, self.table[:length]",
    remedy="dynamo.allow_unspec_int_on_nn_module=on",
)
"""The cause of an integer that grows by different amounts, which may be a cache's size or a count."""

GUARDS = (
    KL_DIVERGENCE,
    Cause(
        "cache of keys and values",
        "models of Hugging Face's fill a cache for generation also while they train, which gives each layer a graph of its own: "
        "set model.config.use_cache = False, or in a sweep of a script use_cache=off",
        guard=r"\S+\.is_initialized == |(not )?\S*(past_key_value|layer_past)",
        inside=r"\bcache_utils\.py",
    ),
    Cause(
        "learning rate",
        "the learning rate is a Python number that the optimizer's graph was compiled for: make it a tensor, "
        "lr=torch.tensor(1e-3), which torch's schedulers change in place, as your own code must, group['lr'].fill_(rate), or use "
        "a fused or foreach optimizer, which is not compiled",
        guard=r"\S*param_groups.*\['lr'\]",
    ),
    Cause(
        "number of an optimizer",
        "the optimizer takes this as a Python number, and each of its values takes a graph: use a fused or foreach optimizer, "
        "which is not compiled, or keep the number as it is, cycle_momentum=False in OneCycleLR and CyclicLR",
        guard=r"\S*param_groups.*\['\w+'\]",
    ),
    Cause(
        "hooks that are added",
        "hooks are added during training: register them once, before compiling and not in the forward",
        guard=r"len\(\S*_hooks",
    ),
    Cause(
        "value read from a tensor",
        f"{_READ}: keep the value a tensor, or do not use it in the forward; or try {_SCALARS}, where dynamic=static freezes "
        f"them, which torch's own default, dynamic=auto, does not unless their values are needed",
        forms=(
            (r"\bslice_\w*of_a_module\b", "rows of a queue or bank", f"{_READ}: {BANK_OF_TENSORS}; or try {_SCALARS}"),
            (r"\blist_of_numbers\b", "list of numbers", f"{_READ}: {LIST_OF_TENSORS}; or try {_SCALARS}"),
        ),
        guard=r"(?!.*\.size\(\)\[)(___stack\d+\S* ?(==|is|<|>|!=)|\S* (==|!=|<|>|<=|>=) ___stack\d+|\S+\.item\(\) "
        r"|\(.*___stack\d+ .*\) == |not \(.*___stack\d+ ==)",
        remedy="dynamo.capture_scalar_outputs=on",
    ),
    Cause(
        "length after a graph break",
        "a tensor that comes out of a graph break is not marked as dynamic, so its first length takes a graph of its own: fix "
        "the break at this line",
        guard=r"tensor '___stack\d+\S*' size mismatch at index [1-9]|.*___stack\d+\S*\.size\(\)\[[1-9]",
    ),
    Cause(
        "output of unknown size",
        f"the number of rows at this line depends on the data: {ANY_ROWS}",
        guard=r"tensor '___stack\d+.*size mismatch|.*___stack\d+\S*\.size\(\)\[0\]",
        remedy="dynamo.capture_dynamic_output_shape_ops=on",
    ),
    Cause(
        "train and eval mode",
        "the module runs both in training and in evaluation mode, and each mode needs its own graph",
        guard=r"\S+\.training ==",
    ),
    Cause(
        "gradients switched on and off",
        "it runs both with and without gradients, and each needs its own graph: accept one more where a network or another of "
        "its class is also called under no_grad, as a policy that acts and a target network are; a part of a forward that needs "
        "no gradients is better off in a module of its own",
        guard=r"GLOBAL_STATE changed: .*grad_mode",
    ),
    Cause(
        "autocast switched on and off",
        "it runs under more than one autocast setting: use the same one in every step",
        guard=r"GLOBAL_STATE changed: .*autocast",
    ),
    Cause(
        "global setting of torch",
        "a global setting of torch changed (gradients, autocast, determinism): run every step under the same settings",
        guard=r".*GLOBAL_STATE",
    ),
    Cause(
        "frozen and trained parameters",
        "tensors with and without requires_grad need separate graphs: accept one more if layers are unfrozen once, or keep it "
        "the same in every step; if equal blocks share a graph and only the first one's input has no requires_grad, call "
        "requires_grad_() on it",
        guard=r"tensor '.+?' requires_grad mismatch",
    ),
    Cause(
        "layout in memory",
        "one call gets a tensor of the same shape that is laid out differently in memory, often the first of equal blocks, after "
        "a transpose: call .contiguous() on it, or accept one graph more",
        guard=r"tensor '.+?' stride mismatch|(?!.*\.size\(\)\[).*\.stride\(\)\[",
    ),
    VIEW,
    Cause(
        "modules that are added",
        "modules or parameters are added during training, and each number of them takes a graph: create all in __init__, before "
        "compiling, parameters as one, self.prompts = nn.Parameter(torch.zeros(n, d)) with a mask of those in use",
        guard=r"len\(\S*\._(modules|parameters)\)|\S+\._size == ",
    ),
    Cause(
        "gradient read in the forward",
        "parameters have no gradient in the first step or after zero_grad(), and each case takes a graph: read, clip and clear "
        "gradients after the backward, outside compiled code, or accept one graph more",
        guard=r"\S+\.grad is (not )?None",
    ),
    Cause("made in the first forward", _MADE_AT_FIRST, guard=r"not hasattr\("),
    Cause(
        "batches of several kinds",
        "batches, or other dictionaries that the forward is given, hold different tensors, or the same in another order, and "
        "each kind takes a graph: put the tensor into all of them, in one order, such as a mask of ones where nothing is masked, "
        "or a new tensor of zeros with a weight of 0; or set recompile_limit above the number of kinds",
        guard=r"len\(batch\) (==|!=)|(not )?___dict_contains\([^,]+, (?!kwargs)\w+\)|KeyError on (?!G\b|___)\w+\["
        r"|list\(dict\.keys\((?!kwargs)\w+\)",
    ),
    Cause(
        "one tensor under several names",
        "in some calls one tensor is given under several names, and each way of sharing takes a graph: give each name a tensor "
        "of its own, x.clone() or a new torch.zeros(n)",
        guard=rf"Duplicate tensors found|{ARGUMENT} is (?!(None|True|False)\b){ARGUMENT}$",
    ),
    Cause(
        "arguments of different calls",
        "code that several modules or calls share is given arguments by position in one and by name, or fewer, in another, and "
        "each way takes a graph: accept one for each, or call it the same way everywhere, with the same names in one order",
        guard=r"(not |len\(|list\(dict\.keys\()(args|kwargs)\b(?![.\[])|(not )?___dict_contains\([^,]+, kwargs\)",
    ),
    Cause(
        "list of another length",
        "a list or tuple of another length takes a graph, because loops over it are unrolled: stack its tensors, padded to "
        "one shape, torch.stack(crops), and call the layers once for all, as on x.flatten(0, 1); or compile what the loop calls "
        "apart (scope=regional, or scope=modular and parts), or set recompile_limit above the number of lengths",
        guard=rf"(not (?!G\[){ARGUMENT}|len\((?!G\[){ARGUMENT}\) .*)$",
    ),
    Cause(
        "list or dictionary that grows",
        "a list, a dictionary or an object's attributes changed: keep what grows out of the forward, and keys the same in every "
        "step; what the forward reads, such as the last 50 means, keep in a buffer that a new tensor replaces, "
        "self.recent = torch.cat([self.recent[1:], mean[None]])",
        guard=r"len\(|not (?!\()|KeyError|\S+ == (set\(\)|\{)|list\(dict\.keys\(",
    ),
    Cause(
        "dropout that changes",
        f"torch.compile treats dropout's probability as a constant: write dropout out with a tensor p, {DROPOUT_OF_TENSORS}, "
        "kept in a buffer that is changed after the backward",
        guard=r".*drop\w*\.p\b.* == |\S+\.p == 0?\.\d",
    ),
    Cause(
        "blocks of different sizes",
        "blocks of one class have weights or inputs of different sizes, as stages or two towers have, which takes a graph for "
        "each size: accept one for each, with a recompile_limit above their number, or, for blocks of one model, use scope=full "
        "without graph breaks between them",
        guard=r"tensor '(self|fn)\S*\.(weight|bias|running_mean|running_var)' size mismatch",
    ),
    Cause(
        "cache that grows",
        "the module's cache grows with the batches: build it once in __init__, at its largest size, and slice it in the "
        "forward, self.table[:length]; where rows are added in each step, keep a fixed number, "
        "self.bank = torch.cat([self.bank[len(rows):], rows])",
        guard=r"tensor 'self\S*' size mismatch",
    ),
    GROWS_UNEVENLY,
    *NUMBERS,
    Cause(
        "argument of changing type",
        "it is None in some calls and a tensor in others, or a parameter and a plain tensor, and each takes a graph: accept one "
        "more, or pass the same kind in every call; Hugging Face leaves out an attention mask of ones",
        guard=rf"expected type of .* to be (a tensor type|<class ')|{ARGUMENT} is (not )?None$",
    ),
    Cause("made in the first forward", _MADE_AT_FIRST, guard=r"\S+ is None"),
    Cause(
        "Python value that changes",
        "each of its values needs a graph of its own: a few are fine, with a recompile_limit above their number; if only the "
        "first forward changes it, run one forward before compiling, and if there are many, decide outside compiled code, or "
        "make it a tensor",
        forms=(
            (
                r"== ['\"]",
                "text",
                "each value of a text takes a graph: leave texts that nothing is computed from, such as names of files, out of "
                "the forward; a few that select something are fine, with a recompile_limit above their number",
            ),
        ),
        guard=r"\S+ == (True|False|['\"(])|.*type=<enum|\S+ is not None",
    ),
    Cause(
        "identity of an object",
        "its graph was compiled for an object or an address that is another one in the next step: do not use id() or data_ptr() "
        "in the forward, also not as a key, and keep the objects it reads alive",
        guard=r"Cache line invalidated because",
    ),
    Cause(
        "blocks of different kinds",
        "modules that are compiled apart share their graphs, and each kind of them, by its class, a module in it or an attribute "
        "that others lack, takes a graph of its own: accept one for each, with a recompile_limit above their number; what only "
        "the first forward creates, create in __init__",
        guard=r"___check_\w+\(fn\.",
    ),
    Cause(
        "another object",
        "the object it was compiled for was replaced by another: keep modules and functions the same in every step; where it is "
        "one of a few, such as the modes of an Enum, each takes a graph",
        guard=r"___check_|\S+ is \S+",
    ),
)
"""Causes of recompiles, except varying sizes of inputs."""

_NAMED = {cause.name: cause for cause in GUARDS}

MAY_VARY = ("number that the forward is given", "Python number that changes")
"""Causes of recompiles for a number that dynamic=auto lets vary from its second value on, unless the code fixes it."""

_OF_BLOCKS = {
    "module's counter": "number of each block",
    "Python number that changes": "number of each block",
    "dropout that changes": "number of each block",
    "setting of a torch.nn module": "number of each block",
    "another object": "blocks of different kinds",
    "made in the first forward": "blocks of different kinds",
    "Python value that changes": "blocks of different kinds",
}
"""What causes are called in blocks that share their graphs, where one block differs from another."""


def cause_of_guard(guard: str, line: str = "") -> Cause | None:
    """Returns the cause of a recompile; None for sizes of inputs and properties of tensors."""
    expression = plain_guard(guard).partition(" # ")[0]
    for cause in GUARDS:
        if (cause.guard and re.match(cause.guard, expression)) or (cause.inside and re.search(cause.inside, line)):
            return cause
    return None


def cause_of_series(series: RecompileSeries, breaks: Sequence[str] = (), recompiles: Sequence[str] = ()) -> Cause | None:
    """Returns the cause of one source's recompiles, from the guard and the sequence of its values.

    Args:
        breaks: Graph breaks of the same run. What a break returned is guarded in the code after it, so the break says more.
        recompiles: Recompiles of the same run. Blocks of different sizes have arguments of different sizes, too.
    """
    one = _cause_of_series(series, breaks, recompiles)
    cause = _of_blocks(one, series, recompiles)
    begins = one is not None and one.name == "module's counter" and series.values[0] in ("0", "-1")
    varies = cause is not None and cause.name in MAY_VARY
    is_number = re.fullmatch(r"-?\d[\d.e+-]*", series.values[0]) and re.fullmatch(r"[\w.\[\]']+", series.first.source)
    if series.count == 1 and (begins or (varies and is_number)):
        return _NAMED["first value of a number"]
    return cause


def lasting_cause(series: RecompileSeries, breaks: Sequence[str], recompiles: Sequence[str]) -> Cause | None:
    """Returns the cause of one source's recompiles if more of them follow, as where they hit a limit."""
    return _of_blocks(_cause_of_series(series, breaks, recompiles), series, recompiles)


def _of_blocks(cause: Cause | None, series: RecompileSeries, recompiles: Sequence[str]) -> Cause | None:
    """Returns what a cause is called where it is how blocks that share their graphs differ."""
    is_of_block = are_of_blocks(series, recompiles) and re.search(r"\b(self|fn)\.", series.first.guard)
    if cause is not None and cause.name in _OF_BLOCKS and is_of_block:
        return _NAMED[_OF_BLOCKS[cause.name]]
    return cause


def are_of_blocks(series: RecompileSeries, recompiles: Sequence[str]) -> bool:
    """Tells whether recompiles may be those of blocks that share graphs; code after a break in one does not name its class."""
    return series.first.is_shared or any(Recompile.parse(text).is_shared for text in recompiles)


_ADDRESS = re.compile(r"(?<![\d.])\d{14,15}(?![\d.])")
"""Where an object or its data is in memory, on Linux."""


def _cause_of_series(series: RecompileSeries, breaks: Sequence[str], recompiles: Sequence[str]) -> Cause | None:
    if (behind := _cause_of_break_before(series.first, breaks)) is not None:
        return behind
    if any(map(_ADDRESS.search, (series.first.guard, *series.values))):
        return _NAMED["identity of an object"]
    cause = cause_of_guard(series.first.guard, series.first.line)
    of_breaks = {one and one.name for one in map(cause_of_break, breaks)}
    if cause is not None and cause.name == "output of unknown size" and of_breaks == {"recurrent layer"}:
        return _NAMED["length after a graph break"]  # its rows are time or samples
    is_local = " from line " in series.first.function and series.first.source.isidentifier()
    if cause is None and series.first.kind == "size 0" and is_local and of_breaks & {"output of unknown size", "unique values"}:
        return _NAMED["output of unknown size"]  # rows that were picked before an earlier break
    if cause is None and series.first.kind.startswith("size "):
        blocks = _NAMED["blocks of different sizes"]
        there = (one for one in fold_recompiles(recompiles) if one.first.function == series.first.function)
        sizes = {size for one in there if cause_of_guard(one.first.guard) is blocks for size in one.values}
        return blocks if sizes & set(series.values) else None
    once = r"KeyError on \w+(\.\w+)+|not ___dict_contains\(.*(?<!__dict__)\)"
    is_once = series.count == 1 and (series.values == ["0"] or re.fullmatch(once, series.first.guard))
    if cause is not None and cause.name == "list or dictionary that grows" and is_once:
        return _NAMED["made in the first forward"]
    if cause is not None and cause.name == "made in the first forward" and len(series.values) > 1:
        return _cause_of_values(series.values[1:])
    if cause is not None and cause.name in _OF_OPTIMIZERS and re.match(r"(\w+\.)*forward\b", series.first.function):
        return _NAMED["Python number that changes"]  # which the forward reads, and not the optimizer's own graph
    if cause is not None and cause.name in _OF_SLICES and _is_end_of_slice(series.first, recompiles):
        return _NAMED["end of a slice"]
    if cause is not None and cause.name == "list of another length" and _is_dictionary(series.first, recompiles):
        return _NAMED["batches of several kinds"]
    if cause is None or cause.name != "module's counter":
        return cause
    if _is_of_rounds(series.first):
        return _NAMED["number of rounds or modules"]
    if not all(re.fullmatch(r"-?\d+", value) for value in series.values):  # 0 at first, and then a float
        return _NAMED["Python number that changes"]
    numbers = [int(value) for value in series.values]
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) > 1 and min(steps) > 0:
        return GROWS_UNEVENLY
    return cause


def _is_dictionary(first: Recompile, recompiles: Sequence[str]) -> bool:
    """Tells whether what has another length is a dictionary, of whose keys other recompiles or its line of code speak."""
    name = re.escape(first.source)
    of_keys = rf"list\(dict\.keys\({name}\)|___dict_contains\([^,]+, {name}\)|KeyError on {name}\["
    of_keys += rf"|# .*\b{name}\.(items|keys|values)\("
    there = (text for text in recompiles if Recompile.parse(text).function == first.function)
    return re.search(of_keys, f"# {first.line}") is not None or any(re.search(of_keys, text) for text in there)


_OF_OPTIMIZERS = ("learning rate", "number of an optimizer")
_OF_SLICES = ("number that the forward is given", "number that crosses a limit", "Python number that changes")


def _is_end_of_slice(first: Recompile, recompiles: Sequence[str]) -> bool:
    """Tells whether a number that varies ends slices, which torch compiles apart where they are empty or of one element."""
    there = [one for one in map(Recompile.parse, recompiles) if one.function == first.function]
    codes = [one.line.partition(" # ")[0] for one in there]
    bounds = {
        name for code in codes for found in re.findall(r"\[([^\]#]*:[^\]#]*)\]", code) for name in re.findall(r"\w+", found)
    }
    is_split = any(re.fullmatch(r"(?!.*\.size\(\)).+ != [01]", one.guard) for one in there)
    return is_split and not bounds.isdisjoint(re.findall(r"[A-Za-z_]\w*", first.source))


def _is_of_rounds(one: Recompile) -> bool:
    """Tells whether a module's number is guarded where it says how often a loop runs, or picks from a list of modules."""
    attribute = re.escape(one.source.rpartition(".")[2])
    return re.search(rf"# container\.py:\d+ in |\brange\([^#]*\b{attribute}\b", one.line) is not None


def _cause_of_break_before(first: Recompile, breaks: Sequence[str]) -> Cause | None:
    """Returns the cause of the break that returned a guarded value; None if that was a value read from a tensor, or no break."""
    after = re.search(r" from line (\d+) on \((.+):\d+\)$", first.function)
    of_rows = re.match(r"tensor '(___stack\d+)\S* requires_grad mismatch", first.guard)
    of_object = re.match(r"Cache line invalidated because L\['(___stack\d+)'\]", first.guard)  # a method looked up before it
    guarded = of_rows or of_object or re.match(r"(?:___check\w+\()?(___stack\d+|[A-Za-z]\w*)(?![\w.(])", first.guard)
    if after is None or guarded is None:
        return None
    is_result = guarded[1].startswith("___")
    place = f"{after[2]}:{after[1]} " if is_result else f"{after[2]}:"
    assigns = "" if is_result else rf"^  code: (.*[ ;])?{guarded[1]} ?= ?(?!=)"
    there = (text for text in breaks if text.startswith(place) and re.search(assigns, text, re.MULTILINE))
    cause = cause_of_break(at) if (at := next(there, "")) else None
    if cause is not None and cause.name == "value of a tensor" and (of_object or not is_result):
        return _NAMED["value read from a tensor"]
    return None if cause is None or cause.name in ("value of a tensor", "output of unknown size") else cause


def _cause_of_values(values: Sequence[str]) -> Cause | None:
    """Returns the cause of recompiles for something that was None at first, from its later values."""
    if len(values) > 1 and all(value.startswith(("(", "[", "{")) for value in values):
        return _NAMED["list or dictionary that grows"]
    return cause_of_guard(f"value == {values[0]}")


def cause_of_limit(hit: str, recompiles: Sequence[str] = (), breaks: Sequence[str] = ()) -> tuple[Cause | None, RecompileSeries]:
    """Returns why a recompile limit was hit, `function hit recompile_limit 8: guard`, and the recompiles that filled it."""
    where, _, rest = hit.partition(" hit ")
    last = Recompile.parse(f"{where}: {rest.partition(': ')[2]}" if rest else hit)
    if re.match(VIEW.guard, last.guard):  # it adds one graph, so others filled the limit
        others = (one for one in map(Recompile.parse, recompiles) if one.function == last.function)
        last = next((one for one in others if not re.match(VIEW.guard, one.guard)), last)
    told = next((one for one in fold_recompiles(recompiles) if one.is_of(last)), RecompileSeries.of(last))
    cause = lasting_cause(told, breaks, recompiles)
    return (
        _NAMED["number of rounds or modules"] if cause and cause.name == "module's counter" and _is_of_rounds(last) else cause
    ), told


def advice_on_limit(hit: str, recompiles: Sequence[str] = (), breaks: Sequence[str] = ()) -> str:
    """Returns what helps against a recompile limit that was hit."""
    cause, told = cause_of_limit(hit, recompiles, breaks)
    if cause:
        return named_advice(cause, told)
    if recompiles and all(one.count == 1 and one.first.kind.startswith("size ") for one in fold_recompiles(recompiles)):
        return (
            "dynamic=auto compiles anew for each dimension that changes for the first time; dynamic=mark makes one graph at once"
        )
    if "size" in told.first.guard or not told.first.guard:
        of_data = (
            "if sizes depend on the data, such as rows that a router picks, use dynamic=auto, or keep all rows and "
            "weight them by a mask"
        )
        lengths = f"dynamic=mark and auto make one graph for all lengths; where each takes one all the same, {FIXED_LENGTH}"
        return f"{lengths}; {of_data}"
    return "keep what the guard names the same in every step"


def advice_on_stale_number(recompiles: Sequence[str]) -> str | None:
    """Returns what helps if a compiled run diverges that recompiled for a Python float; None for one that did not.

    From the second value on, torch 2.13 compiles such a number as one that varies, and Inductor's code then no longer stores what
    the forward assigns to it: it stays as it is, without an error and without another recompile.
    """
    for series in fold_recompiles(recompiles):
        cause, first = lasting_cause(series, (), ()), series.first
        is_named_float = _FLOAT.fullmatch(first.value) and " " not in first.source
        if is_named_float and cause is not None and cause.name in _FLOATS:
            stale = f"compiled code can go on with an old value of {first.source.removeprefix('self.')}"
            return f"{stale}, which the forward changes: {named_advice(cause, series)}"
    return None


_FLOAT = re.compile(r"-?\d+(\.\d+|(\.\d+)?e[+-]?\d+)")
_FLOATS = ("Python number that changes", "number of each block", "global number")


def named_advice(cause: Cause, series: RecompileSeries) -> str:
    """Returns the advice on a guard, with the attribute's own name, and a number's first value, in the code that it shows."""
    source, line = series.first.source, series.first.line
    said = f"{series.first.guard} # {line.partition(' # ')[2]}"
    advised = cause.advice_on(line.partition(" # ")[0], said)
    is_expression = " " in source
    paths = re.findall(r"\b[A-Za-z_]\w*(?:\.\w+|\[[\w']+\])+(?![\w(])", source) if is_expression else [source]
    attributes = {path.removesuffix("']").rpartition("['" if path.endswith("']") else ".")[2] for path in paths}
    attributes -= {"cell_contents"}  # of a closure, whose variable torch does not name
    if len(attributes) != 1 or not (attribute := attributes.pop()).isidentifier():
        return advised
    advice = re.sub(r"(?<=')steps(?=')|(?<=self\.)steps", attribute, advised)
    if is_expression:
        return advice.replace("torch.zeros(())", "torch.tensor(…)")  # begins with a value that the expression does not tell
    if series.values and _FLOAT.fullmatch(series.values[0]):
        first, changed = series.values[0], "* 0.99" if float(series.values[0]) else "+ 0.01"
        advice = advice.replace("torch.zeros(())", f"torch.tensor({first})").replace(f"{attribute} + 1", f"{attribute} {changed}")
    return advice
