"""Why each value of a Python number takes a graph of its own, by the guard that failed, and what helps."""

from compile_sweep.schema.causes.cause import DROPOUT_OF_TENSORS, METRIC, TRUE_OR_FALSE, Cause

ARGUMENT = r"[A-Za-z]\w*(\[('\w+'|\d+)\])*"  # of the forward, or what is in it

HIGHER_LIMIT = "recompile_limit=64"
"""The remedy for more kinds of blocks than torch makes graphs of one function."""

_COUNTED_AS_ONE = "dynamic=auto,dynamo.allow_unspec_int_on_nn_module=on"

_BUFFER = "self.register_buffer('steps', torch.zeros(()))"

_CHANGED = (
    "assign a new tensor, self.steps = self.steps + 1, or change that after the backward; never change it in place in the "
    "forward that reads it, which can give wrong gradients without an error"
)

_IN_A_BUFFER = f"keep it in a buffer, {_BUFFER}, and {_CHANGED}"

_BY_A_TENSOR = (
    (r"\bcalls_dropout\b|\bdropout\b.*\bfunctional\.py", "rate of dropout", f"{DROPOUT_OF_TENSORS} in place of dropout"),
    (r"\bcalls_(exp|log|sqrt)\b", "function of math", "torch.exp(self.steps) in place of math.exp(self.steps)"),
    (r"\bin_a_branch\b", "condition", "torch.where(self.steps > 5, a, b) in place of `if`"),
)

_IN_PLACE_OF_IT = tuple(
    (pattern, name, f"keep it in a buffer, {_BUFFER}, with {code}, and {_CHANGED}") for pattern, name, code in _BY_A_TENSOR
)


def _after(beginning: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((pattern, name, f"{beginning}{advice}") for pattern, name, advice in _IN_PLACE_OF_IT)


_EACH_VALUE = "each value of this Python number takes a graph"

_OF_BLOCKS = (
    "each of its values takes a graph: if blocks have different ones, such as numbers or rates of stochastic depth, set "
    "recompile_limit above the number of blocks, or use scope=full without graph breaks"
)

NUMBERS = (
    Cause(
        "global number",
        "a global Python number changes from step to step: pass it to the forward as an argument, which dynamic=auto lets vary, "
        f"or {_IN_A_BUFFER}",
        forms=_after("a global Python number changes from step to step: "),
        guard=r"G\[\S+ == -?\d",
    ),
    Cause(
        "number that the forward is given",
        f"{_EACH_VALUE}: hand it in as a tensor, torch.tensor(step); dynamic=auto lets a number vary that selects nothing",
        forms=(
            (
                r"\bcalls_dropout\b|\bin dropout\b",
                "rate of dropout",
                f"{_EACH_VALUE}: hand it in as a tensor and write out dropout by it, {DROPOUT_OF_TENSORS}",
            ),
            (
                r"\bcontainer\.py|\bcalls_an_index\b",
                "module that it picks",
                f"{_EACH_VALUE}, because it picks one of several modules: pick outside compiled code, or set recompile_limit "
                f"above the number of its values",
            ),
            (
                r"\bcalls_range\b|\bin_a_loop\b",
                "rounds of a loop",
                f"{_EACH_VALUE}: where it is the number of rounds of a loop, which no tensor can be, set recompile_limit above "
                "the number of its values, or compile what a round calls apart (scope=modular or regional)",
            ),
            (
                r"\bindex_",
                "one of several tensors",
                f"{_EACH_VALUE}: stack the tensors that it picks from, and index with a tensor of one element, "
                "torch.stack(tables)[torch.tensor([step])]",
            ),
            (
                r"\bcalls_(int|linspace)\b|\bslice_",
                "size that follows from it",
                f"{_EACH_VALUE}: compute sizes that follow from it outside, and hand them in, n = int(share * length), with "
                "torch.arange(n) / (n - 1) in place of torch.linspace(0, 1, n)",
            ),
        ),
        guard=rf"{ARGUMENT} == -?\d",
    ),
    Cause(
        "setting of a torch.nn module",
        "modules of torch.nn take this as a number, and each of its values takes a graph: change it rarely, such as once an "
        "epoch, with a recompile_limit above the number of its values",
        guard=r"\S+\.(momentum|eps|label_smoothing|negative_slope) == ",
    ),
    METRIC,
    Cause(
        "module's counter",
        f"a Python integer changes: let it vary with {_COUNTED_AS_ONE}, or {_IN_A_BUFFER}",
        forms=(
            (
                r"\bin_a_with\b",
                "setting of a context",
                f"a Python integer changes: let it vary with {_COUNTED_AS_ONE}, and write "
                f"{TRUE_OR_FALSE.replace('step', 'self.steps')} where torch needs a constant, with a graph for each answer",
            ),
            *(
                (pattern, name, f"a Python integer changes: {advice}")
                for pattern, name, advice in _IN_PLACE_OF_IT
                if name != "condition"
            ),
            (
                r"\bin_a_branch\b",
                "condition",
                f"a Python integer changes: let it vary with {_COUNTED_AS_ONE}, which takes a graph for each branch, or keep it "
                f"in a buffer, {_BUFFER}, that a new tensor replaces, and write torch.where(self.steps > 5, a, b) in place of "
                f"`if`",
            ),
            (
                r"\bindex_",
                "index of a list",
                f"a Python integer changes: each value that a list is indexed with takes a graph, so keep it in a buffer, "
                f"{_BUFFER}, that a new tensor replaces, and index a tensor with it, "
                f"torch.stack(tables)[self.steps.long()[None]]",
            ),
        ),
        guard=r"(?!.*\.size\(\)\[)\S+ == -?\d+(?![\d.e])",
        remedy="dynamo.allow_unspec_int_on_nn_module=on",
    ),
    Cause(
        "Python number that changes",
        f"a Python number changes from step to step: hand it in as a tensor, or {_IN_A_BUFFER}",
        forms=_after("a Python number changes from step to step: "),
        guard=r"(?!not \(|.*(\.size\(\)\[| % \d+\) )).* == -?\d|___normalize_count_iter",
    ),
    Cause(
        "number of each block",
        f"{_OF_BLOCKS}; if it changes from step to step, hand it in as a tensor, or keep it in a buffer, {_BUFFER}, that a new "
        "tensor replaces, self.steps = self.steps + 1",
        remedy=HIGHER_LIMIT,
    ),
    Cause(
        "first value of a number",
        "torch compiles a Python number's first value apart, and its later ones as a number that varies: accept one graph more, "
        "or, if only the first forward changes it, run one forward before compiling",
    ),
    Cause(
        "number of rounds or modules",
        "each value of this number takes a graph, because it says how often a loop runs or which modules do, as in range(n) and "
        "self.blocks[:n], and neither a tensor nor allow_unspec_int_on_nn_module changes that: set recompile_limit above the "
        "number of its values, or compile the blocks apart (scope=regional, or scope=modular and parts)",
        remedy=HIGHER_LIMIT,
    ),
    Cause(
        "end of a slice",
        "a slice that is empty, of one element or of the whole length takes a graph of its own, as do its ends at 0 and 1: set "
        "recompile_limit above the number of such cases, some 20 for x[:, start:end], or mark the span by a mask, with start and "
        "end as tensors, at = torch.arange(x.shape[1]) and torch.where(((at >= start) & (at < end))[:, None], a, b)",
        remedy=HIGHER_LIMIT,
    ),
    Cause(
        "number that crosses a limit",
        "the code compares this number with a limit, and each side of the limit needs its own graph: the work changes between "
        "steps, so time both sides separately, or compare outside compiled code",
        guard=r"(?!.*\.size\(\)\[)(not \(|((\S+|\(.+\)) (<=|<|>=|>|!=)|.* % \d+\) ==) -?\d|-?\d\S* (<=|<|>=|>|!=) )",
    ),
)
"""Causes of recompiles for a number, the most specific first."""
