"""A step that cannot work is refused before anything is planned, naming the function, the argument and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from compile_sweep import WorkloadFromModel
from compile_sweep.contract.first_step import check_first_step
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.contract.inspect_model import find_reused_modules, run_first_forward
from compile_sweep.contract.optimizers import SeveralOptimizers
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.settings import CompileSettings, OptimizerKind

pytestmark = pytest.mark.usefixtures("one_thread")


def batch_of(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8), "y": torch.randint(3, (4,))}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def made(loss_fn: Callable[..., Any] | None = loss_of, **told: Any) -> ModelWorkload:
    return WorkloadFromModel(lambda: nn.Linear(8, 3), batch_of, loss_fn, num_batches=2, **told)()


def stepped(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach()


def stepped_and_returned(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def updated(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = stepped(model, batch)
    torch.optim.SGD(model.parameters()).step()
    return loss


class Duck:
    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        pass


class NoLoss(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return type("Output", (), {"loss": None})()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"loss_fn": lambda model, batch: model(batch["input"])},
            r"loss_fn asks its batch for 'input', .* batches have x \(4, 8\)",
        ),
        (
            {"loss_fn": lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")},
            r"loss_fn returned a tensor of shape \(4,\), and a loss is one number; reduce it, say with \.mean\(\)",
        ),
        ({"loss_fn": stepped}, r"it calls backward\(\) itself; .* or give the function as step_fn"),
        (
            {"loss_fn": stepped_and_returned},
            r"loss_fn calls backward\(\) itself, and .*; leave backward\(\) out, or give the function as step_fn",
        ),
        ({"loss_fn": lambda model, batch: loss_of(model, batch).detach()}, "it is detached"),
        ({"loss_fn": lambda model, batch: loss_of(model, {**batch, "x": batch["x"].mul_(2)})}, "a step changes 'x' of its batch"),
        (
            {"loss_fn": lambda model, batch: model(batch["y"])},
            r"loss_fn, or the model .* failed at test_first_step\.py:\d+ in eager",
        ),
        ({"loss_fn": lambda model, batch: batch["x"].requires_grad_().sum()}, "no parameter gets a gradient"),
        ({"loss_fn": None}, r"failed.* in eager mode.*unexpected keyword argument"),
        ({"optimizer_fn": Duck}, r"optimizer_fn: Duck made Duck, no torch\.optim\.Optimizer; return one, or a list"),
        ({"optimizer_fn": torch.optim.LBFGS}, "optimizer_fn: LBFGS needs a closure"),
        ({"optimizer_fn": torch.optim.Muon}, r"optimizer_fn: Muon failed: .*Muon is for matrices: return \["),
        ({"optimizer_fn": lambda weights: torch.optim.SGD(weights.items())}, r"optimizer_fn: .* it is given model\.parameters"),
        ({"loss_fn": nn.CrossEntropyLoss()}, r"CrossEntropyLoss takes outputs and targets; give lambda model, batch: Cross"),
        (
            {"loss_fn": nn.CrossEntropyLoss},
            r"loss_fn .* is the class CrossEntropyLoss; give an object of it, CrossEntropyLoss\(\)",
        ),
        ({"loss_fn": functional.cross_entropy}, r"; loss_fn is called as loss_fn\(model, batch\), not with the model's outputs"),
        ({"loss_fn": lambda model, x, y: None}, r"called as loss_fn\(model, batch\), and <lambda> takes \(model, x, y\)"),
        ({"loss_fn": None, "step_fn": lambda m, b, optimizer: None}, r"called as step_fn\(model, batch\), and <lambda> takes"),
        ({"loss_fn": None, "step_fn": lambda model, batch: None}, "step_fn returned NoneType; return the loss"),
        ({"loss_fn": None, "step_fn": loss_of}, r"no parameter has a gradient after step_fn: it calls backward\(\)"),
        ({"loss_fn": None, "step_fn": updated}, r"step_fn calls the step of its own optimizer, SGD, .* optimizer_fn=partial"),
        (
            {"optimizer_fn": torch.optim.SGD([torch.ones(1)])},
            r"optimizer_fn .* is an optimizer, .* give partial\(torch\.optim\.SGD",
        ),
        ({"optimizer_fn": lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters())}, "made an optimizer over other parameters"),
        ({"scheduler_fn": torch.optim.lr_scheduler.StepLR}, r"and StepLR takes \(optimizer, step_size\); give partial\("),
        ({"scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau}, "leave out one that waits for the validation's"),
        ({"accumulate": 3}, "accumulate=3 does not split 4 samples evenly"),
    ],
)
def test_the_culprit_is_named(told: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        check_first_step(made(**told), has_gpu=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.Linear(8, 3), batch_of, r"model_fn of WorkloadFromModel is a model, .* give lambda: Linear\("),
        (nn.Linear, batch_of, r"called as model_fn\(\), and Linear takes \(in_features, out_features\); give lambda: Net"),
        (lambda: nn.Linear(8, 3).requires_grad_(False), batch_of, "no parameter of the model has requires_grad"),
        (lambda: nn.Linear(8, 3), lambda: batch_of(0), r"called as batch_fn\(number\), and <lambda> takes \(\)"),
        (lambda: nn.Linear(8, 3), lambda number: {"x": np.ones((4, 8))}, r"'x' as ndarray, .* torch\.from_numpy"),
        (lambda: nn.Linear(8, 3), lambda number: {}, "the batch function returned a dict without a tensor; put the tensors"),
        (lambda: nn.Linear(8, 3), lambda number: ({"name": "a"}, 3), "returned a tuple without a tensor; put the tensors"),
        (
            lambda: nn.LazyLinear(3),
            lambda number: {"x": torch.randn(4, 8).double(), "y": torch.randint(3, (4,))},
            "the model's first forward, in which lazy layers get their weights, failed: RuntimeError: .* same dtype",
        ),
        (
            lambda: nn.Linear(8, 3),
            lambda number: batch_of(0) if number == 0 else {"x": torch.ones(4, 8)},
            "loss_fn asks its batch for 'y', which batch_fn does not put in; batches have x",
        ),
        (
            lambda: nn.Linear(8, 3),
            lambda number: batch_of(0) | ({"y": torch.ones(4, 3)} if number else {}),
            "another x .*; name 'y' otherwise where it has other dimensions, which makes kinds of batches",
        ),
        (
            lambda: nn.Linear(8, 3),
            lambda number: (batch_of(0), [torch.ones(2)] * (number + 1)),
            "made of: '1' has 1 parts in one and 2 in another",
        ),
    ],
)
def test_a_model_or_batch_that_is_not_as_needed_is_named(model: Any, batch: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        check_first_step(WorkloadFromModel(model, batch, loss_of, num_batches=2)(), has_gpu=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"trains": False}, {"accumulate": 2}])
def test_a_tuple_without_a_loss_function_is_told_to_be_a_dictionary(options: dict[str, Any]) -> None:
    made_of = lambda number: (torch.randn(4, 8), torch.ones(4))  # noqa: E731
    workload = WorkloadFromModel(lambda: NoLoss(8, 3), made_of, num_batches=2, **options)()
    with pytest.raises(
        WorkloadError, match=r"^without loss_fn, .* give loss_fn=lambda model, batch: model\(\*batch\); the batch has 0"
    ):
        check_first_step(workload, has_gpu=False)


def test_an_error_that_holds_the_text_of_the_whole_model_is_told_without_it() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(model(**batch)).sum()

    workload = WorkloadFromModel(
        lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU()), lambda number: (torch.randn(4, 8), torch.ones(4)), loss, num_batches=2
    )()
    with pytest.raises(WorkloadError, match="TypeError: the model argument after \\*\\* must be a mapping, not tuple; the batch"):
        check_first_step(workload, has_gpu=False)


def test_a_step_may_return_a_number_and_step_an_optimizer_of_something_else() -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> float:
        inner = nn.Linear(8, 3)
        stepped(inner, batch)
        torch.optim.SGD(inner.parameters()).step()
        return stepped(model, batch).item()

    check_first_step(workload := made(None, step_fn=step), has_gpu=False)
    torch.testing.assert_close(
        workload.build_model()(**(batch := batch_of(0))), made().build_model()(**batch), check_device=False
    )


def test_memory_that_lacks_is_left_to_the_trials_whichever_library_says_so() -> None:
    def full(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    check_first_step(made(full), has_gpu=False)


class WithLoss(nn.Module):
    def __init__(self, packed: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.packed, self.head = packed, nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.head(x)
        return self.packed(scores, functional.cross_entropy(scores, y))


@pytest.mark.parametrize(
    "packed",
    [
        lambda scores, loss: loss,
        lambda scores, loss: (scores, loss),
        lambda scores, loss: (loss, scores),
        lambda scores, loss: {"loss": loss, "logits": scores},
    ],
)
def test_a_model_may_return_its_loss_alone_or_beside_its_outputs(packed: Callable[[Tensor, Tensor], Any]) -> None:
    workload = WorkloadFromModel(lambda: WithLoss(packed), batch_of, num_batches=2)()
    check_first_step(workload, has_gpu=False)
    assert workload.build_model()(**workload.raw_batches(0)[0]).dim() == 0


def test_a_model_without_a_loss_is_told_of_its_labels() -> None:
    workload = WorkloadFromModel(lambda: NoLoss(8, 3), batch_of, num_batches=2)()
    with pytest.raises(WorkloadError, match=r"without a loss, .* put labels into the batch, or give loss_fn"):
        check_first_step(workload, has_gpu=False)


def test_optimizers_are_made_of_parameters_names_or_the_model_one_or_several() -> None:
    def by_name(named: Any, **options: Any) -> torch.optim.Optimizer:
        decayed = [{"params": [p for n, p in named if n == "weight"], "weight_decay": 0.1}]
        return torch.optim.AdamW([*decayed, {"params": [p for n, p in named if n == "bias"]}], **options)

    def by_model(model: nn.Linear) -> list[torch.optim.Optimizer]:
        return [torch.optim.Muon([model.weight]), torch.optim.AdamW([model.bias])]

    workload = made(optimizer_fn=by_name)
    optimizer = workload.optimizer(workload.build_model(), OptimizerKind.FOREACH)
    assert optimizer is not None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    workload = made(optimizer_fn=by_model)
    check_first_step(workload, has_gpu=False)
    model = workload.build_model()
    several = workload.optimizer(model, OptimizerKind.FOREACH)
    assert isinstance(several, SeveralOptimizers)
    before = [weights.detach().clone() for weights in model.parameters()]
    model(**batch_of(0)).backward()
    several.step()
    several.zero_grad()
    assert all(weights.grad is None for weights in model.parameters())
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_step_of_ones_own_leaves_the_gradients_that_the_loss_would() -> None:
    expected = made().build_model()
    expected(**batch_of(0) | (batch := batch_of(0))).backward()
    for told in ({"loss_fn": None, "step_fn": lambda model, batch: (stepped(model, batch), {"accuracy": 0})}, {"accumulate": 2}):
        workload = made(**told)  # type: ignore[arg-type]
        model = workload.build_model()
        loss = model(**batch)
        loss.backward()  # as the sweep's step does
        torch.testing.assert_close(loss, expected(**batch))
        torch.testing.assert_close([w.grad for w in model.parameters()], [w.grad for w in expected.parameters()])
        with pytest.raises(SettingsError, match="use scope=modular, the model alone"):
            workload.validate(CompileSettings.parse("scope=full"))


class Settled(nn.Linear):
    """Decides in its first forward what it computes, as the classifiers of Hugging Face's do, and installs a hook."""

    def __init__(self, *, hooks: bool) -> None:
        super().__init__(8, 3)
        self.config = SimpleNamespace(problem_type=None, labels=3, layers=[1])
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        if self.hooks and not self._forward_hooks:
            self.register_forward_hook(lambda module, inputs, output: output)
        self.config.problem_type = self.config.problem_type or "single_label_classification"
        return super().forward(x)


@pytest.mark.parametrize("hooks", [True, False])
def test_what_a_first_forward_installs_or_sets_is_there_before_anything_is_compiled(hooks: bool) -> None:
    workload = WorkloadFromModel(lambda: Settled(hooks=hooks), batch_of, loss_of, num_batches=2)()
    runs = "runs the model once before anything is compiled: its first forward installs hooks"
    sets = "sets config.problem_type before anything is compiled, as the model's first forward would"
    assert workload.remarks() == ([runs, sets] if hooks else [sets])
    for _ in range(2):
        model = workload.build_model().get_submodule("model")
        assert model.config.problem_type == "single_label_classification"
        assert len(model._forward_hooks) == hooks
    assert made().remarks() == []


class Decorated(nn.Module):
    """A block that its library compiles itself."""

    def __init__(self, graphs: CompileCounter) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.compiled = torch.compile(self.layer, backend=graphs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.compiled(x))  # type: ignore[no-any-return]


def test_a_look_at_shapes_alone_compiles_nothing_that_the_model_compiles_itself() -> None:
    """Inductor's kernels, on a tensor that has no data, end the process."""
    graphs = CompileCounter()
    model, batch = nn.Sequential(Decorated(graphs), Decorated(graphs)), {"input": torch.randn(2, 3)}
    run_first_forward(model, batch, on_shapes=True)
    find_reused_modules(model, "", batch)
    assert graphs.frame_count == 0
    model(**batch)
    assert graphs.frame_count == 2


def views(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), model(batch["x"].flip(0)))


def test_a_model_that_a_loss_calls_twice_is_no_model_with_repeated_blocks() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Sequential(nn.Linear(8, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.head(self.backbone(x)))

    for options in ({"loss_fn": views}, {"loss_fn": views, "accumulate": 2}):
        workload = WorkloadFromModel(Encoder, batch_of, num_batches=2, **options)()
        assert workload.regions(workload.build_model()) == []


def test_a_layer_that_one_forward_calls_again_is_a_repeated_block_also_where_the_model_is_called_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(self.layer(x)))

    workload = WorkloadFromModel(Shared, batch_of, views, num_batches=2)()
    assert workload.regions(workload.build_model()) == ["model.layer"]
