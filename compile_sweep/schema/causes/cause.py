"""A cause with what helps, and the words that causes of graph breaks share with those of recompiles and errors."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause, what helps, and the patterns that it is recognized by."""

    name: str
    advice: str
    headline: str = ""  # pattern of torch's headline of a graph break
    explanation: str = ""  # pattern of the explanation below torch's headline
    inside: str = ""  # pattern of the place in torch or another library that the user's line led to, or of the break's own
    code: str = ""  # pattern of the line, if it is a library's
    needs_all: bool = False  # whether all of a break's patterns must match, not just one
    guard: str = ""  # pattern of a failed guard, matched from its beginning
    error: str = ""  # pattern of an error's text
    forms: tuple[tuple[str, str, str], ...] = ()  # forms of the cause that need other advice: see `advice_on`
    remedy: str = ""  # settings to add that the advice names and that are worth a trial, as a key spells them

    def advice_on(self, line: str, said: str = "") -> str:
        """Returns what helps against the form of this cause that was met, in at most two sentences.

        Each form is a pattern, what to call it in the documentation, and its advice. The pattern is searched for in the kinds of
        the line, `in_a_branch` and the like, followed by what torch says; the first form that matches counts.

        Args:
            line: The line of code, or its beginning.
            said: What torch says of it, with the place.
        """
        facts = f"{' '.join(sorted(kinds_of_line(line)))} {said}"
        return next((advice for pattern, _, advice in self.forms if re.search(pattern, facts)), self.advice)

    @property
    def documented(self) -> str:
        """The advice on this cause and on each of its forms, as docs/causes.md has it."""
        return " · ".join([self.advice, *dict.fromkeys(f"{name}: {advice}" for _, name, advice in self.forms)])


def kinds_of_line(line: str) -> frozenset[str]:
    """Returns the kinds of statement and expression that a line of code consists of, by its syntax and never by its names.

    Only the beginning of a statement on several lines is known; then the kinds are those of its first word.
    """
    line = line.strip()
    found = {kind for word, kind in _BY_FIRST_WORD.items() if re.match(rf"{word}\b", line)}
    for text in (line, f"{line} pass", f"if True: pass\n{line} pass"):
        try:
            return frozenset(found | set(_kinds(ast.parse(text))))
        except SyntaxError:
            continue
    return frozenset(found)


_BY_FIRST_WORD = {
    "if": "in_a_branch",
    "elif": "in_a_branch",
    "while": "in_a_while",
    "assert": "in_an_assert",
    "for": "in_a_loop",
    "with": "in_a_with",
}


def _kinds(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            what = "slice" if any(isinstance(part, ast.Slice) for part in parts) else "index"
            of = "of_a_module" if isinstance(node.value, ast.Attribute) else "of_a_tensor"
            yield f"{what}_assigned_{of}" if isinstance(node.ctx, ast.Store) else f"{what}_{of}"
        elif isinstance(node, ast.Call):
            named = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if named in _CALLS:
                yield f"calls_{named}"
            if isinstance(node.func, ast.Subscript):
                yield "calls_an_index"
            if any(isinstance(argument, (ast.List, ast.ListComp)) and _has_numbers(argument) for argument in node.args):
                yield "list_of_numbers"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "negated"
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            yield "in_a_loop"
        if _is_number_of_an_attribute(node):
            yield "number_of_an_attribute"
        if isinstance(node, (ast.If, ast.While)):
            test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
            test = test.left if isinstance(test, ast.Compare) else test
            if isinstance(test, ast.Attribute) or _is_number_of_an_attribute(test):
                yield "on_an_attribute"


def _has_numbers(tree: ast.AST) -> bool:
    """Tells whether a list holds numbers that are read from tensors, by `.item()`, `float` or `int`."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(getattr(called, "attr", None) == "item" or getattr(called, "id", None) in ("float", "int") for called in calls)


def _is_number_of_an_attribute(node: ast.AST) -> bool:
    """Tells whether an expression is `int(self.start)`, `self.start.item()` or the like."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id in ("int", "float", "bool", "round"):
        return bool(node.args) and isinstance(node.args[0], ast.Attribute)
    return isinstance(node.func, ast.Attribute) and node.func.attr == "item" and isinstance(node.func.value, ast.Attribute)


_CALLS = (
    *("any", "all", "max", "min", "amax", "mean", "sum", "numel", "tolist"),
    *("range", "int", "exp", "log", "sqrt", "dropout", "linspace"),
)
"""Methods and functions of torch and Python that tell forms of a cause apart."""

PRODUCT_OF_PYTHON = "math.prod(x.shape) in place of np.prod(x.shape)"

NUMPY = (
    "torch.compile supports only part of numpy, and none of scipy: compute this with torch, sizes and other numbers with Python, "
    f"{PRODUCT_OF_PYTHON}, or call it outside the forward, for constants once in __init__"
)

NUMBER_OF_NUMPY = (
    "make it one of Python before the forward, rates = np.linspace(0, 0.1, depth).tolist(), float(rate), int(level) or bool(flip)"
)

FAKE = (
    "torch.compile must know what an operator returns without running it: put @torch.library.register_fake('library::name') "
    "on a function that returns an empty tensor of the right shape and dtype"
)

ROWS_IN_THE_GRAPH = (
    "try dynamo.capture_dynamic_output_shape_ops=on (torch._dynamo.config.capture_dynamic_output_shape_ops = True), which keeps "
    "any number of rows in the graph"
)

ANY_ROWS = f"{ROWS_IN_THE_GRAPH}, or keep all rows and weight them by a mask"

MASK_OF_LENGTHS = (
    "mark what is padding at once, torch.arange(T) >= lengths[:, None], in place of a loop that reads each sample's length"
)

TRUE_OR_FALSE = "set_grad_enabled(not step % 4)"

KEPT_ASSERT = (
    "stays in the graph as an assert with a fixed text and without `not`, assert torch.isfinite(x).all(), 'not finite' in place "
    "of f'not finite: {x}', or as torch._assert_async(condition), or belongs after the step"
)

LIST_OF_TENSORS = "torch.stack(values) in place of torch.tensor([value.item() for value in values]) keeps them tensors"

BANK_OF_TENSORS = (
    "write to a queue or bank by a new tensor, self.bank = self.bank.index_copy(0, (self.start + torch.arange(n)) % "
    "len(self.bank), rows) and self.start = (self.start + n) % len(self.bank), in place of self.bank[int(self.start) : …] = rows"
)

DROPOUT_OF_TENSORS = "x * (torch.rand_like(x) >= p) / (1 - p)"

KL_DIVERGENCE = Cause(
    "KL divergence",
    "torch looks up the formula for two kinds of distributions at its first kl_divergence of them, which breaks or recompiles "
    "the graph once: call it once before compiling, or write the formula out",
    explanation=r"builtin operator `min` with argument types \['generator'\]",
    guard=r".*\b_KL_MEMOIZE\b",
)

METRIC = Cause(
    "metric in the forward",
    "torchmetrics counts its updates in a Python integer, and looks at values: update metrics after the step, outside compiled "
    "code",
    inside=r"\btorchmetrics/",
    guard=r"\S*_update_count == ",
)

KEPT_A_TENSOR = (
    "keep the value a tensor, x.detach() in place of x.item() and torch.where(condition, a, b) in place of `if`, or read it "
    "after the step and not in the forward"
)

NUMBERS_IN_THE_GRAPH = "or try dynamo.capture_scalar_outputs=on, which keeps the number of .item(), int() or float() in the graph"
