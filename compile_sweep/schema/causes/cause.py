"""A cause with what helps, and the words that causes of graph breaks share with those of recompiles and errors."""

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
    branch_advice: str = ""  # what helps where the line is an `if` or a `while`, if less than all of `advice` may
    assert_advice: str = ""  # the same where it is an `assert`
    remedy: str = ""  # settings to add that the advice names and that are worth a trial, as a key spells them


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

ANY_ROWS = (
    "try dynamo.capture_dynamic_output_shape_ops=on (torch._dynamo.config.capture_dynamic_output_shape_ops = True), which keeps "
    "any number of rows in the graph, or keep all rows and weight them by a mask"
)

MASK_OF_LENGTHS = (
    "mark what is padding at once, torch.arange(T) >= lengths[:, None], in place of a loop that reads each sample's length"
)

TRUE_OR_FALSE = "set_grad_enabled(not step % 4)"

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
