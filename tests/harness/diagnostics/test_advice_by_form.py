"""Advice is short, and is chosen by the syntax of a line and by what torch says, never by the names in the line."""

from __future__ import annotations

import pytest

from compile_sweep.schema.causes import breaks, errors, guards
from compile_sweep.schema.causes.cause import Cause, kinds_of_line
from compile_sweep.schema.causes.recompiles import fold_recompiles

TABLE = (*breaks.BREAKS, *guards.GUARDS, *errors.ERRORS, *errors.EXCEPTIONS)

LONGEST = 420
"""Characters of an advice, with its code: three lines of a terminal of 140 columns."""


@pytest.mark.parametrize("cause", TABLE, ids=lambda cause: cause.name)
def test_an_advice_is_at_most_two_short_sentences(cause: Cause) -> None:
    told = [cause.advice, *(advice for _, _, advice in cause.forms)]
    assert [advice for advice in told if advice.count("; ") > 1 or len(advice) > LONGEST] == []


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("if x.sum() > 0:", {"in_a_branch", "calls_sum"}),
        ("elif not self.ready:", {"in_a_branch", "negated", "on_an_attribute"}),
        ("while x.norm() > 1:", {"in_a_while"}),
        ("assert x.isfinite().all(), 'not finite'", {"in_an_assert", "calls_all"}),
        ("self.bank[start : start + n] = rows", {"slice_assigned_of_a_module"}),
        ("x[a:b] = 0", {"slice_assigned_of_a_tensor"}),
        ("x[mask] = y", {"index_assigned_of_a_tensor"}),
        ("return table[:, level]", {"slice_of_a_tensor"}),
        ("w = torch.tensor([row.mean().item() for row in y])", {"list_of_numbers", "in_a_loop", "calls_mean"}),
        ("w = torch.stack([row / 2 for row in y])", {"in_a_loop"}),
        ("for n in lengths.tolist():", {"in_a_loop", "calls_tolist"}),
        ("with torch.set_grad_enabled(self.steps % 4 == 0):", {"in_a_with"}),
        ("h = self.blocks[level](h)", {"calls_an_index", "index_of_a_module"}),
        ("start = int(self.start)", {"calls_int", "number_of_an_attribute"}),
        ("y = call(x,", set()),
        ("if call(x,", {"in_a_branch"}),
        ("if_any = 'while x[0]: assert print(range(3))'", set()),
        ("", set()),
    ],
)
def test_the_kinds_of_a_line_are_those_of_its_syntax(line: str, kinds: set[str]) -> None:
    assert kinds_of_line(line) == kinds


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("if x.sum() > 0:", "compute both sides and choose with torch.where(condition, a, b)"),
        ("while x.norm() > 1:", "a fixed number of rounds"),
        ("if not self.ready:", "self.ready = True in place of self.ready.fill_(1)"),
        ("if mask.any():", "leave out a check for no rows"),
        ("if not torch.isfinite(x):", "a check that only raises an error stays in the graph as an assert"),
        ("assert x.isfinite().all(), text", "a check stays in the graph as an assert"),
    ],
)
def test_a_branch_has_the_advice_of_its_form_first(line: str, words: str) -> None:
    text = f"model.py:3 in forward: Data-dependent branching\n  code: {line}\n  explanation: Detected data-dependent branching"
    assert words in (breaks.advice_on_break(text) or "").partition("; ")[0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("Random.betavariate", "torch.distributions.Beta(a, a).sample()"),
        ("Random.randint", "torch.where(torch.arange(n) < k, a, b)"),
        ("Random.shuffle", "x[torch.randperm(len(x))]"),
        ("Random.random", "keep = torch.rand(()) > 0.2"),
    ],
)
def test_a_draw_has_the_advice_of_what_is_drawn(function: str, words: str) -> None:
    explained = f"explanation: Dynamo developers have intentionally marked that the function `{function}` in file `random.py`"
    assert words in (breaks.advice_on_break(f"model.py:3 in forward: Attempted to call\n  code: x\n  {explained}") or "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("y = dropout(x, level)", "x * (torch.rand_like(x) >= p) / (1 - p)"),
        ("h = self.blocks[level](h)", "it picks one of several modules"),
        ("for _ in range(level):", "the number of rounds of a loop, which no tensor can be"),
        ("y = x * self.tables[level]", "torch.stack(tables)[torch.tensor([step])]"),
        ("y = x[:level]", "n = int(share * length)"),
        ("y = x * level", "hand it in as a tensor, torch.tensor(step)"),
    ],
)
def test_a_number_that_is_given_has_the_advice_of_how_it_is_used(line: str, words: str) -> None:
    recompiles = [f"forward (model.py:3): level == {value} # {line} # model.py:4 in forward" for value in (2, 3, 4)]
    (series,) = fold_recompiles(recompiles)
    cause = guards.lasting_cause(series, (), ())
    assert cause is not None
    assert (cause.name, words in guards.named_advice(cause, series)) == ("number that the forward is given", True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("y = x * self.count", "self.register_buffer('count', torch.zeros(()))"),
        ("y = x * math.exp(self.count)", "torch.exp(self.count) in place of math.exp(self.count)"),
        ("if self.count > 5:", "torch.where(self.count > 5, a, b) in place of `if`"),
        ("with torch.set_grad_enabled(self.count % 4 == 0):", "set_grad_enabled(not self.count % 4)"),
        ("y = x * self.scales[self.count]", "torch.stack(tables)[self.count.long()[None]]"),
    ],
)
def test_a_counter_has_the_advice_of_how_it_is_used(line: str, words: str) -> None:
    recompiles = [f"forward (model.py:3): self.count == {value} # {line} # model.py:4 in forward" for value in (1, 2, 3)]
    (series,) = fold_recompiles(recompiles)
    cause = guards.cause_of_series(series)
    assert cause is not None
    assert (cause.name, words in guards.named_advice(cause, series)) == ("module's counter", True)
