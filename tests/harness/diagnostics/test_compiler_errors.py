"""Whose error an exception is: the compiler's, or that of the code that it compiles."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema.causes.errors import advice_on_error

GENERATED = "torch._inductor.runtime.compile_tasks.cbm4l3dpp"


def raised_by(module_name: str, statement: str) -> Exception:
    """Returns what a statement raises in a module of this name."""
    module = ModuleType(module_name)
    module.torch = torch  # type: ignore[attr-defined]
    exec(compile(f"def call():\n    {statement}\n", f"/tmp/{module_name.rpartition('.')[2]}.py", "exec"), vars(module))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        module.call()
    return raised.value


@pytest.mark.parametrize("statement", ["torch.empty(196).view(443, 768)", "assert False, 'expected size 3==4'", "len(3)"])
def test_what_inductors_own_code_raises_is_the_compilers(statement: str) -> None:
    assert is_compiler_error(raised_by(GENERATED, statement))
    assert not is_compiler_error(raised_by("model", statement))


def test_a_matrix_that_cannot_be_decomposed_is_the_models_own_fault_wherever_it_is_noticed() -> None:
    assert not is_compiler_error(raised_by(GENERATED, "torch.linalg.cholesky(-torch.eye(2))"))


@pytest.mark.slow
def test_an_operator_of_ones_own_that_compiled_code_calls_raises_its_own_errors() -> None:
    @torch.library.custom_op("compile_sweep_tests::refusing", mutates_args=())
    def refusing(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such table")

    @refusing.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="no such table") as raised:
        torch.compile(lambda x: refusing(x * 2), fullgraph=True)(torch.ones(3))
    assert not is_compiler_error(raised.value)


@pytest.mark.slow
def test_a_length_that_inductor_fixes_at_a_convolution_is_not_blamed_on_the_code() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Conv1d(4, 4, 1))
    x = torch.randn(2, 4, 25, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 2)
    with pytest.raises(Exception, match="Constraints violated") as raised:
        compiled(x)
    advice = advice_on_error(str(raised.value))
    assert advice is not None
    assert "Inductor itself, as in the backward pass of a convolution over that length on a CPU: use dynamic=auto" in advice
    for length in (25, 30):
        x = torch.randn(2, 4, length, requires_grad=True)
        assert compiled(x).shape == (2, 4, length)
