"""Recompiles with one source are one finding."""

from __future__ import annotations

import pytest

from compile_sweep.schema.causes.recompiles import Recompile, fold_recompiles, plain_guard

COUNTED = [f"forward (model.py:3): self.steps == {value} # self.steps += 1 # model.py:4 in forward" for value in range(8)]


def test_a_counter_that_fails_at_each_value_is_one_line_with_the_first_values_and_the_last() -> None:
    (series,) = fold_recompiles(COUNTED)
    assert series.text == (
        "forward (model.py:3): self.steps == 0, then 1, 2, 3, 4, …, 7 (8 times) # self.steps += 1 # model.py:4 in forward"
    )


def test_a_list_is_one_source_whether_it_was_empty_or_not() -> None:
    (series,) = fold_recompiles(
        ["f (m.py:1): not self.seen", "f (m.py:1): len(self.seen) == 1 (one of 2 graphs, none of which fits)"]
    )
    assert series.values == ["0", "1"]


def test_other_functions_sources_and_dimensions_stay_apart() -> None:
    sizes = "tensor 'x' size mismatch at index {}. expected 4, actual 6"
    texts = [
        *COUNTED,
        "other (model.py:9): self.steps == 1",
        *(f"forward (model.py:3): {sizes.format(index)}" for index in (0, 1)),
    ]
    assert [series.count for series in fold_recompiles(texts)] == [8, 1, 1, 1]


@pytest.mark.parametrize(
    ("guard", "source", "kind", "value"),
    [
        ("len(self._modules['net'].seen) == 3", "self.net.seen", "length", "3"),
        ("tensor 'self._buffers['table']' size mismatch at index 1. expected 4, actual 6", "self.table", "size 1", "4"),
        ("tensor 'x' dtype mismatch. expected Float, actual BFloat16", "x", "dtype", ""),
        ("self.cache is None # if self.cache is None: # m.py:3 in forward", "self.cache", "value", "None"),
        ("___check_obj_id(self.mode, 14), type=<enum>", "___check_obj_id(self.mode, 14), type=<enum>", "", ""),
    ],
)
def test_a_guard_has_a_source_a_kind_and_a_value(guard: str, source: str, kind: str, value: str) -> None:
    one = Recompile.parse(guard)
    assert (one.source, one.kind, one.value) == (source, kind, value)


def test_torchs_general_hints_are_left_out() -> None:
    hint = "(HINT: torch.compile considers integer attributes to be static. Use x(), or a tensor.)"
    assert (
        plain_guard(f"self.n == 1 # code # m.py:3 in f {hint} (one of 2 graphs, none of which fits)")
        == "self.n == 1 # code # m.py:3 in f"
    )
    frozen = "tensor 'self._parameters['bias']' requires_grad mismatch. expected requires_grad=0."
    assert plain_guard(f"{frozen} Guard failed on a parameter, consider using x.y = False to allow dynamism on parameters.") == (
        "tensor 'self.bias' requires_grad mismatch. expected requires_grad=0."
    )
    assert (
        plain_guard("___check_type_id(self.drop, 94252720711568), type=<Identity>")
        == "___check_type_id(self.drop), type=<Identity>"
    )


def test_a_python_float_that_varies_has_its_own_name_in_the_words_of_torch_2_11_too() -> None:
    first = "forward (m.py:3): self.heat == 3.0 # self.heat *= 0.99 # m.py:5 in forward"
    varying = "___as_tensor(self.heat).item()"
    later = (f"forward (m.py:3): {varying} == {heat} # (unknown source {varying}, please file a bug)" for heat in (2.97, 2.94))
    (series,) = fold_recompiles([first, *later])
    assert (series.first.source, series.values) == ("self.heat", ["3.0", "2.97", "2.94"])


@pytest.mark.parametrize(
    ("function", "is_shared"),
    [
        ("forward of Block (model.py:3)", True),
        ("forward of Block from line 9 on (model.py:3)", True),
        ("module of torch.nn (torch/_dynamo/external_utils.py:67)", True),
        ("loss_of_batch (model.py:3)", False),
        ("loss_of_batch from line 9 on (model.py:3)", False),
        ("forward (models of mine/model.py:3)", False),
    ],
)
def test_a_function_is_shared_by_what_it_is_a_copy_of_and_not_by_the_users_words(function: str, is_shared: bool) -> None:
    assert Recompile.parse(f"{function}: self.steps == 1").is_shared is is_shared


@pytest.mark.parametrize("number", ["-0.07", "-3", "-1e-05", "-inf"])
def test_a_negative_number_has_no_brackets(number: str) -> None:
    one = Recompile.parse(f"f (m.py:1): ((-10.0)*(self.step / 1000)) == ({number}) # y = x # m.py:2 in f")
    assert (one.source, one.value, one.line) == ("((-10.0)*(self.step / 1000))", number, "y = x # m.py:2 in f")
