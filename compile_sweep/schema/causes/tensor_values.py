"""Why a graph breaks where the code needs the values of a tensor, and what helps."""

from compile_sweep.schema.causes.cause import (
    ANY_ROWS,
    BANK_OF_TENSORS,
    DROPOUT_OF_TENSORS,
    KEPT_A_TENSOR,
    KEPT_ASSERT,
    LIST_OF_TENSORS,
    MASK_OF_LENGTHS,
    NUMBERS_IN_THE_GRAPH,
    PRODUCT_OF_PYTHON,
    ROWS_IN_THE_GRAPH,
    Cause,
)

_SETUP_BY_A_BATCH = (
    "keep the flag of a setup from the first batch as a bool of Python, self.ready = True in place of self.ready.fill_(1), or "
    "set up before training"
)

_RANDOM_SPAN = "hide a random span by a mask, x.masked_fill((at >= a) & (at < b), 0) in place of x[a:b] = 0"

_READ_THEN_CHANGED = "what the forward reads and then changes in place can give wrong gradients without an error"

_CHOSEN = "compute both sides and choose with torch.where(condition, a, b), or use torch.cond, which keeps both in the graph"

_COUNTED_ROUNDS = (
    "a loop that ends when values allow it needs a fixed number of rounds, with torch.where(done, x, y) for what is done before"
)

_ROWS = "the number of rows depends on the data"

MODULE_PICKED = (
    "a tensor picks one of several modules: run all and pick from their results, torch.stack([head(x) for head in self.heads])"
    "[which[None]][0], or pick outside compiled code"
)

VALUES = (
    Cause(
        "assertion by a function",
        "write torch._assert(condition, 'text') as a statement, assert condition, 'text', which stays in the graph",
        explanation=r"\(torch\._assert\)",
    ),
    Cause(
        "comparison of whole tensors",
        "torch.allclose and torch.equal return a bool of Python: write torch.isclose(a, b).all() or (a == b).all(), which stays "
        "in the graph in an assert, assert torch.isclose(a, b).all(), 'text', and in torch.where(condition, x, y)",
        explanation=r"`aten\.(allclose|equal)\b",
    ),
    Cause(
        "tensor without dimensions as an index",
        "torch reads the number to index with it: give the index a dimension, table[level[None]][0] or table.index_select(0, "
        "level[None])[0] in place of table[level], which stay in the graph; capture_scalar_outputs, which torch names, is "
        "no help",
        explanation=r"_local_scalar_dense.*\(operator\.getitem\)",
    ),
    Cause(
        "module picked by a tensor",
        MODULE_PICKED,
        headline=r"Tensor\.item\(\)|[Dd]ata.dependent",
        inside=r"torch/nn/modules/container\.py",
        needs_all=True,
    ),
    Cause(
        "tensor in place of a number",
        "an operator here takes a number, so that it reads the value of the tensor it is given: write it out with tensors, "
        f"torch.sqrt(x) for a function of math, {DROPOUT_OF_TENSORS} for dropout, torch.randn_like(x) * s for noise of width s; "
        f"if it is a number of numpy, make it one of Python before the forward, float(rate) or {PRODUCT_OF_PYTHON}",
        forms=(
            (
                r"\bslice_",
                "an end of a slice",
                "a slice takes numbers, so that it reads the value of the tensor it is given: mark rows or columns, "
                "torch.arange(n) < k, in place of x[:k]",
            ),
            (
                r"\bnegated\b",
                "`not`",
                "`not` reads the value of the tensor it is given: write ~condition, which stays in the graph",
            ),
        ),
        headline=r"Data dependent operator",
        explanation=r"`aten\._local_scalar_dense(?!.*\(Tensor\.tolist\))",
        needs_all=True,
    ),
    Cause(
        "tensors compared by Python",
        "Python's sorted, max and min compare values: put rows in order by x[x[:, 0].argsort()], and names by for name in "
        "sorted(inputs) in place of sorted(inputs.items()); take the largest of several tensors as torch.stack(views)["
        "torch.stack([view.norm() for view in views]).argmax(0, keepdim=True)][0]",
        headline=r"sort with non-constant keys",
        explanation=r"builtin operator `sorted` with argument types|trying to handle op (max|min)\b",
    ),
    Cause(
        "value of a tensor",
        f"{KEPT_A_TENSOR}; {NUMBERS_IN_THE_GRAPH}",
        forms=(
            (
                r"\bin_a_branch\b.*\bon_an_attribute\b",
                "`if` on what the model keeps",
                f"{_SETUP_BY_A_BATCH}; else keep the value a tensor, torch.where(condition, a, b) in place of `if`",
            ),
            (
                r"\b(slice_assigned_of_a_module|number_of_an_attribute)\b",
                "number that the model keeps",
                "keep the number a tensor, x * self.scale in place of x * self.scale.item(); "
                f"{BANK_OF_TENSORS}: {_READ_THEN_CHANGED}",
            ),
            (r"\bslice_assigned_of_a_tensor\b", "assignment to a span", f"{_RANDOM_SPAN}; {NUMBERS_IN_THE_GRAPH}"),
            (r"\blist_of_numbers\b", "list of numbers", f"{LIST_OF_TENSORS}; {NUMBERS_IN_THE_GRAPH}"),
            (
                r"\bcalls_a?max\b",
                "the largest of several",
                f"take sizes from shapes, x.size(1) in place of int(lengths.max()), and keep other values tensors, x.detach() in "
                f"place of x.item(); {NUMBERS_IN_THE_GRAPH}",
            ),
            (
                r"\b(in_a_loop|calls_range|calls_tolist)\b|Tensor\.tolist|`range`|graph break in loop",
                "loop over numbers",
                f"keep the value a tensor, x.detach() in place of x.item(), and {MASK_OF_LENGTHS}; {NUMBERS_IN_THE_GRAPH}",
            ),
        ),
        remedy="dynamo.capture_scalar_outputs=on",
        headline=r"Tensor\.(item|tolist)\(\)|Data dependent operator",
        explanation=r"builtin operator `(range|int|float|round|complex)` with argument types \[[^]]*'Tensor'"
        r"|failed with aten\._local_scalar_dense",
    ),
    Cause(
        "layers left out at random",
        "LayerDrop draws a number for each layer and branches on it: set layerdrop, encoder_layerdrop and decoder_layerdrop to 0 "
        "in the model's configuration, and if they are 0 already, update transformers (5.17 branches all the same, 5.23 does "
        "not); scope=regional compiles the layers either way",
        code=r"\blayerdrop\b",
    ),
    Cause(
        "data-dependent branch",
        f"{_CHOSEN}; a check that only raises an error {KEPT_ASSERT}",
        forms=(
            (r"\bin_an_assert\b", "`assert`", f"a check {KEPT_ASSERT}"),
            (
                r"\(NumpyNdarrayVariable\)",
                "condition that numpy computes",
                "compute the condition with torch and choose by it, torch.where((x > 2).any(), a, b) in place of `if np.any(x > "
                "2)`; make a bool of numpy that comes from outside one of Python before the forward, bool(flip)",
            ),
            (r"\bin_a_while\b", "`while`", _COUNTED_ROUNDS),
            (
                r"\bin_a_branch\b.*\bon_an_attribute\b",
                "`if` on what the model keeps",
                f"{_SETUP_BY_A_BATCH}; else {_CHOSEN}",
            ),
            (
                r"\bcalls_(any|numel)\b",
                "`if` on whether there are any",
                "leave out a check for no rows or for an empty mask, because operators take those, too; else "
                "choose with torch.where(condition, a, b)",
            ),
            (
                r"\bin_a_branch\b.*\bnegated\b",
                "`if not`",
                f"a check that only raises an error {KEPT_ASSERT}; else {_CHOSEN}",
            ),
        ),
        headline=r"[Dd]ata-dependent (branch|jump)",
    ),
    Cause(
        "number of classes",
        "pass the number of classes, one_hot(labels, num_classes=10); otherwise torch looks for the largest label",
        headline=r"one_hot` with data-dependent",
    ),
    Cause(
        "CTC loss",
        "torch.compile cannot trace the CTC loss: the rest is compiled all the same; scope=modular compiles the model alone, "
        "without a break",
        explanation=r"`aten\._ctc_loss",
    ),
    Cause(
        "repeats that are a tensor",
        "pass the number of rows that come out, repeat_interleave(x, repeats, output_size=n), if it is known beforehand; "
        "otherwise torch sums up the repeats",
        explanation=r"`aten\.repeat_interleave",
    ),
    Cause(
        "number of bins",
        "count with one_hot(ids, num_classes=n).sum(0), which has a known size, where bincount looks for the largest number; or, "
        "as in a library, try dynamo.capture_dynamic_output_shape_ops=on, which keeps any number of bins in the graph",
        explanation=r"`aten\.bincount",
        remedy="dynamo.capture_dynamic_output_shape_ops=on",
    ),
    Cause(
        "least squares",
        "torch.compile cannot trace torch.linalg.lstsq: write q, r = torch.linalg.qr(a) and torch.linalg.solve_triangular(r, "
        "q.mT @ b, upper=True), or torch.linalg.pinv(a) @ b where columns may depend on each other",
        explanation=r"`aten\.linalg_lstsq\b",
    ),
    Cause(
        "unique values",
        "how many different values there are depends on the data: call torch.unique before the forward, as in the collator, and "
        "pass in what it returns; or try dynamo.capture_dynamic_output_shape_ops=on "
        "(torch._dynamo.config.capture_dynamic_output_shape_ops = True), which keeps any number of values in the graph",
        forms=(
            (
                r"unique_consecutive",
                "runs of equal values",
                "number runs of equal values by where one begins, starts = torch.cat([torch.ones_like(ids[:1], "
                "dtype=torch.bool), ids[1:] != ids[:-1]]) and starts.cumsum(0) - 1, with rows for as many runs as there can be; "
                "or try dynamo.capture_dynamic_output_shape_ops=on, which keeps any number of values in the graph",
            ),
        ),
        explanation=r"`aten\._?unique\w*\.",
        remedy="dynamo.capture_dynamic_output_shape_ops=on",
    ),
    Cause(
        "rows picked by torch.nn",
        "a module of torch.nn picks rows here, and asks whether there are any: accept the break, or compile around it "
        "(scope=regional, or parts.NAME.compile=off); or use a module that computes all rows, such as a Linear and cross_entropy "
        "in place of AdaptiveLogSoftmaxWithLoss",
        headline=r"[Dd]ynamic shape operator",
        inside=r"torch/nn/modules/",
        needs_all=True,
    ),
    Cause(
        "output of unknown size",
        f"{_ROWS}: {ANY_ROWS}, out + mask[:, None] * value",
        forms=(
            (
                r"\bindex_assigned_",
                "assignment to rows",
                f"{_ROWS}: write x = torch.where(mask, y, x) in place of x[mask] = y[mask]; or {ROWS_IN_THE_GRAPH}",
            ),
            (
                r"\bcalls_a?(max|min)\b",
                "the largest of some rows",
                f"{_ROWS}: write x.masked_fill(~mask, -torch.inf).amax(1) in place of x[mask].max(); or {ROWS_IN_THE_GRAPH}",
            ),
            (
                r"\bcalls_(mean|sum)\b",
                "loss of some rows",
                f"{_ROWS}: weight all rows by a mask, (loss * mask).sum() / mask.sum(), or leave out labels by "
                f"labels.masked_fill(~mask, -100); or {ROWS_IN_THE_GRAPH}",
            ),
        ),
        headline=r"[Dd]ynamic shape operator|data-dependent output shape",
        explanation=r"failed with aten\.nonzero",
        remedy="dynamo.capture_dynamic_output_shape_ops=on",
    ),
    Cause(
        "module picked by a tensor",  # whose number is in the graph, by capture_scalar_outputs
        MODULE_PICKED,
        headline=r"Could not (guard|extract)",
        inside=r"torch/nn/modules/container\.py",
        needs_all=True,
    ),
    Cause(
        "number that is not known",
        "a number that is read from a tensor is used where torch must know it: keep the value a tensor, with torch.where("
        "condition, a, b) in place of `if`, torch.sqrt(x) in place of math.sqrt(x), table[level[None]] in place of table[level]",
        forms=(
            (
                r"\bslice_",
                "span",
                f"a number that is read from a tensor is used where torch must know it: {_RANDOM_SPAN}",
            ),
        ),
        headline=r"Could not (guard|extract) .*Size-like symbols: none",
    ),
    Cause(
        "size that is not known",
        "torch asks whether a size that depends on the data is 0 or 1, as BatchNorm does, or loops over it: keep all rows and "
        "weight them by a mask, or tell the size beforehand, torch._check(len(rows) > 1), if that always holds",
        headline=r"Could not (guard on data-dependent expression|extract specialized integer)",
    ),
)
"""Causes of graph breaks, the most specific first."""
