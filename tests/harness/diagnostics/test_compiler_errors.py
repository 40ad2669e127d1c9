"""Whose error an exception is: the compiler's, or that of the code that it compiles."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from test_causes import advice_of_a_trial
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema.causes.errors import advice_on_error
from compile_sweep.schema.outcome import Label

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
@pytest.mark.skipif(torch_version() < (2, 13), reason="torch 2.11 fixes no length there")
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


class Pictures(nn.Module):
    """A convolution and a head; `flat` makes vectors of pictures."""

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.head, self.flat = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2), flat

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(self.convolution(x)))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_view_that_fails_only_in_channels_last_has_advice_on_the_memory_format_and_flatten_works(compiles: bool) -> None:
    torch._dynamo.reset()

    def run(flat: Callable[[Tensor], Tensor], memory_format: torch.memory_format) -> Tensor:
        torch.manual_seed(0)
        net = Pictures(flat).to(memory_format=memory_format)
        return (torch.compile(net, backend="aot_eager") if compiles else net)(torch.ones(2, 3, 8, 8))  # type: ignore[no-any-return]

    def viewed(x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)

    expected = run(viewed, torch.contiguous_format)
    with pytest.raises(Exception, match=r"view size is not compatible|Cannot view a tensor") as raised:
        run(viewed, torch.channels_last)
    advice = advice_of_a_trial(raised.value, Label.COMPILE_ERROR if compiles else Label.EXCEPTION)
    assert "with memory_format=channels_last, write x.flatten(1) or x.reshape(…) in its place" in advice
    torch.testing.assert_close(run(lambda x: x.flatten(1), torch.channels_last), expected)


class Recommender(nn.Module):
    """An embedding of ids that arrive as an array of numpy; `made` makes a tensor of them."""

    def __init__(self, made: Callable[[np.ndarray], Tensor]) -> None:
        super().__init__()
        self.items, self.made = nn.Embedding(10, 4), made

    def forward(self, ids: np.ndarray) -> Tensor:
        return self.items(self.made(ids).long())


@pytest.mark.parametrize(
    ("made", "mended"),
    [
        (lambda ids: torch.LongTensor(ids), lambda ids: torch.as_tensor(ids, dtype=torch.long)),
        (lambda ids: torch.FloatTensor(ids), lambda ids: torch.as_tensor(ids, dtype=torch.float32)),
    ],
    ids=["LongTensor", "FloatTensor"],
)
def test_a_tensor_that_only_eager_makes_of_an_array_has_advice_on_its_dtype_which_helps(
    made: Callable[[np.ndarray], Tensor], mended: Callable[[np.ndarray], Tensor]
) -> None:
    torch._dynamo.reset()
    ids = np.arange(6, dtype=np.int32)
    torch.manual_seed(0)
    expected = Recommender(made)(ids)
    with pytest.raises(Exception, match="expected TensorOptions") as raised:
        torch.compile(Recommender(made), backend="aot_eager")(ids)
    advice = advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    assert "torch.as_tensor(ids, dtype=torch.long) in place of torch.LongTensor(ids)" in advice
    assert "eager fails" not in advice
    torch.manual_seed(0)
    torch.testing.assert_close(torch.compile(Recommender(mended), backend="aot_eager", fullgraph=True)(ids), expected)


def test_an_operator_that_refuses_its_tensors_is_not_said_to_fail_in_eager_where_the_forward_catches_its_exception() -> None:
    torch._dynamo.reset()

    def forward(x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError:
            return x @ x.mT

    x = torch.ones(2, 3)
    assert forward(x).shape == (2, 2)
    with pytest.raises(Exception, match="when making fake tensor call") as raised:
        torch.compile(forward, backend="aot_eager", fullgraph=True)(x)
    advice = advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    assert "fix the call if eager fails here, too, or leave the module that makes it eager" in advice


class ActorAndCritic(nn.Module):
    """Two networks without a shared layer, called as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), nn.Sequential(nn.Linear(8, 1), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def test_a_second_loss_of_one_compiled_call_is_told_to_be_added_to_the_first_and_then_has_eagers_gradients() -> None:
    def gradients(*, compiles: bool, adds_up: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        agent = ActorAndCritic()
        action, value = (torch.compile(agent, backend="aot_eager") if compiles else agent)(torch.ones(2, 8))
        actor_loss, critic_loss = action.square().mean(), value.square().mean()
        if adds_up:
            (actor_loss + critic_loss).backward()
        else:
            actor_loss.backward()
            critic_loss.backward()
        return [weight.grad for weight in agent.parameters() if weight.grad is not None]

    eager = gradients(compiles=False, adds_up=False)
    with pytest.raises(RuntimeError, match="second time") as raised:
        gradients(compiles=True, adds_up=False)
    assert "add up the losses of a call, (actor_loss + critic_loss).backward()" in advice_of_a_trial(raised.value)
    torch.testing.assert_close(gradients(compiles=True, adds_up=True), eager)
