"""Runs of workloads made of a model: what their numbers are compared with, for any kind of model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from stacks import CPU, SHORT, Layer, Stack, loss_of, made, measured, rows_of
from torch import Tensor, nn

from compile_sweep import WorkloadFromModel, measure
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToLongest, PadToMax

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class _Wrong(Stack):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden * 1.01 if torch.compiler.is_compiling() else hidden


class _Nan(Stack):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        if torch.compiler.is_compiling():
            hidden = hidden.clone()
            hidden[-1, -1, -1] = torch.nan
        return hidden


def inference_of(model_fn: Callable[[], nn.Module]) -> ModelWorkload:
    workload = WorkloadFromModel(
        model_fn, rows_of(3, 7, 5), lambda model, batch: {"scores": model(batch["hidden"])}, trains=False, num_batches=3
    )("only", 0)
    assert isinstance(workload, ModelWorkload)
    return workload


def test_inference_has_neither_gradients_nor_an_optimizer() -> None:
    workload = inference_of(Stack)
    found = measured(workload, "scope=full,backend=aot_eager")
    assert (found.numerics["status"], found.numerics["gradients"]) == ("ok", {})
    assert found.numerics["outputs"]["gap"] <= found.numerics["outputs"]["tolerance"] < 1e-4
    assert "inference_mode" in found.source
    assert "OPTIMIZER" not in found.source
    assert "backward" not in found.source
    assert not workload.build_model().training
    assert found.speedup_eager is None or found.speedup_eager > 0
    for spelled in ("optimizer=fused", "scope=full,static_gradients=on"):
        with pytest.raises(SettingsError, match="only infers"):
            workload.validate(CompileSettings.parse(spelled))


@pytest.mark.parametrize(("model_fn", "status"), [(_Wrong, "diverges"), (_Nan, "nan")])
def test_wrong_outputs_of_compiled_inference_are_found(model_fn: Callable[[], nn.Module], status: str) -> None:
    found = measured(inference_of(model_fn), "scope=full,backend=aot_eager")
    assert found.numerics["status"] == status


def test_models_with_a_forward_that_was_replaced_are_made_anew_and_trained_whole() -> None:
    made_models = []

    def patched() -> nn.Module:
        model = Stack()
        block = model.get_submodule("stages.0.1")
        kept = block.forward
        block.forward = lambda hidden: kept(hidden) * 0.5  # type: ignore[assignment]  # a scaled branch, as people patch models
        made_models.append(model)
        return model

    workload = WorkloadFromModel(patched, rows_of(3), loss_of, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    one, other = workload.build_model(), workload.build_model()
    assert len(made_models) == 2
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    other(hidden=torch.ones(2, 3, 4), kind=torch.ones(2)).backward()
    graded = {name for name, weights in other.named_parameters() if weights.grad is not None}
    assert {f"model.stages.0.1.linear.{what}" for what in ("weight", "bias")} <= graded
    assert all(weights.grad is None for weights in one.parameters())
    updates = measured(workload, "scope=full,backend=aot_eager").numerics["updates"]
    assert updates["model.stages.0.1"]["tolerance"] > 0


def test_one_model_with_hooks_that_is_returned_again_and_again_is_refused() -> None:
    model = Stack()
    model.register_forward_hook(lambda module, inputs, output: output)
    workload = WorkloadFromModel(lambda: model, rows_of(3), loss_of)("only", 0)
    kept = workload.build_model()
    with pytest.raises(WorkloadError, match="returned the same model twice; make a new one"):
        workload.build_model()
    assert kept.get_submodule("model") is model


def test_a_model_with_nothing_attached_is_made_once() -> None:
    made_models = []

    def model() -> nn.Module:
        made_models.append(Stack())
        return made_models[-1]

    workload = WorkloadFromModel(model, rows_of(3), loss_of)("only", 0)
    one, other = workload.build_model(), workload.build_model()
    assert len(made_models) == 1
    assert {id(weights) for weights in one.parameters()}.isdisjoint(id(weights) for weights in other.parameters())


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("spelled", ["scope=full,backend=aot_eager", "scope=eager"])
def test_a_step_that_writes_into_its_batch_is_refused_by_the_name_of_the_tensor(spelled: str, trains: bool) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = loss_of(model, {"hidden": batch["hidden"].sub_(0.5)})
        return found * batch["kind"].float().mean()

    workload = WorkloadFromModel(Stack, rows_of(3), loss, num_batches=3, trains=trains)("only", 0)
    assert isinstance(workload, ModelWorkload)
    with pytest.raises(WorkloadError, match=r"^a step changes 'hidden' of its batch in place.*x - 0\.5"):
        measured(workload, spelled)


class Turned(Layer):
    """A block with the input that its library gives all blocks: a pair, and the rest by name."""

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor], **others: Any) -> Tensor:
        cos, sin = turns
        return super().forward(hidden * cos + hidden.flip(-1) * sin) * others["masks"]["full"]


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Turned(), Turned()])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        angles = torch.arange(hidden.size(1))[:, None] / torch.arange(1, 5)
        for layer in self.layers:
            hidden = layer(hidden, (angles.cos(), angles.sin()), masks={"full": hidden.new_ones(hidden.size(1), 1), "none": None})
        return hidden


def test_tensors_that_change_inside_other_arguments_are_found_and_marked() -> None:
    workload = WorkloadFromModel(Turning, rows_of(3, 7, 5), loss_of, num_batches=3)("only", 0)
    dims = {"hidden": (1,), "turns.0": (0,), "turns.1": (0,), "others.masks.full": (0,)}
    assert workload.dynamic_dims("model.layers.0") == dims
    settings = CompileSettings.parse("scope=regional,dynamic=mark,pad_multiple=2,backend=aot_eager")
    found = measure(prepare(workload, settings, CPU), protocol=SHORT)
    assert (found.graphs, found.recompile_reasons, found.numerics["status"]) == (1, [], "ok")
    assert '"others.masks.full": (0,)' in prepare(workload, settings, CPU).source(workload.build_model())


def test_what_a_trial_marks_does_not_stay_on_the_batches_that_a_workload_keeps() -> None:
    def batch_fn(number: int) -> dict[str, Tensor]:
        ids = torch.zeros(2, (3, 7, 5)[number], dtype=torch.long)
        return {"ids": ids, "scale": torch.ones(1, requires_grad=True)}

    workload = WorkloadFromModel(Stack, batch_fn, loss_of, num_batches=3, lengths="real")("only", 0)
    for _ in range(2):
        batch = workload.pool(PadToLongest(max_length=7), rank=0, device=CPU)[1]
        assert batch.inputs["scale"].requires_grad
        assert not hasattr(batch.inputs["ids"], "_dynamo_dynamic_indices")
        torch._dynamo.mark_dynamic(batch.inputs["ids"], 1)


@lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length)[:, None] / 10


class Positioned(Stack):
    """Caches what depends only on the length for the next forward of that length."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + positions(hidden.size(1)))


def test_what_a_model_keeps_for_the_next_forward_is_not_spoilt_by_finding_dimensions() -> None:
    workload = WorkloadFromModel(Positioned, rows_of(3, 7, 5), loss_of, num_batches=3)("only", 0)
    assert workload.dynamic_dims("model.stages.0.1") == {"hidden": (1,)}
    assert positions.cache_info().currsize == 3
    assert workload.build_model()(hidden=torch.ones(2, 7, 4)).item() > 0


def test_batches_that_count_no_changes_are_measured() -> None:
    @torch.inference_mode()
    def batch(number: int) -> dict[str, Tensor]:
        return {"hidden": torch.randn(2, 3, 4)}

    workload = WorkloadFromModel(Stack, batch, lambda model, batch: model(batch["hidden"]), num_batches=3, trains=False)(
        "only", 0
    )
    assert isinstance(workload, ModelWorkload)
    assert workload.pool(PadToMax(max_length=1), rank=0, device=CPU)[0].inputs["hidden"].is_inference()
    assert measured(workload, "scope=eager").numerics["status"] == "ok"


def test_what_functions_draw_from_numpy_and_python_is_seeded_and_leaves_the_callers_states() -> None:
    def batch(number: int) -> dict[str, Tensor]:
        return {"hidden": torch.full((2, random.randint(3, 30), 4), float(np.random.rand()))}

    def model() -> nn.Module:
        stack = Stack()
        nn.init.constant_(stack.heads[0].weight, random.random() + np.random.rand())
        return stack

    def drawn(seed: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        workload = WorkloadFromModel(model, batch, loss_of, num_batches=3, max_length=30)("only", seed)
        pool = workload.pool(PadToLongest(max_length=30), rank=rank, device=CPU)
        return [one.inputs["hidden"] for one in pool], list(workload.build_model().parameters())

    before = random.getstate(), np.random.get_state()[1].tolist()
    found = drawn(2**32 + 1, 0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.random(), np.random.rand()
    again, other_rank = drawn(2**32 + 1, 0), drawn(2**32 + 1, 1)
    assert all(torch.equal(*pair) for ours, theirs in zip(found, again, strict=True) for pair in zip(ours, theirs, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found[0], other_rank[0], strict=True))


@pytest.mark.parametrize("draw", [lambda: float(np.random.rand()), random.random])
def test_steps_that_draw_from_numpy_or_python_are_random_and_run_again_as_they_were(draw: Callable[[], float]) -> None:
    drawn: list[float] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        drawn.append(draw())
        return loss_of(model, batch) * (1 + 0.01 * drawn[-1])

    workload = WorkloadFromModel(Stack, rows_of(3), loss, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    found = measured(workload, "scope=eager")
    assert (found.numerics["status"], found.numerics["random"]) == ("ok", True)
    _, first, *_ = drawn  # before it, one run of the model that needs no seed
    assert drawn.count(first) > 1, "the eager reference draws as the measured run did"


@pytest.mark.parametrize("is_module", [True, False])
def test_a_loss_whose_state_outlives_its_run_leaves_the_numbers_unchecked_and_one_that_is_a_module_does_not(
    is_module: bool,
) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(4))

        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            hidden = model(batch["hidden"])
            loss = (hidden - self.center).square().mean()
            self.center.mul_(0.5).add_(hidden.detach().mean((0, 1)), alpha=0.5)
            return loss

    centred = Centred()
    loss = centred if is_module else lambda model, batch: centred(model, batch)
    workload = WorkloadFromModel(Stack, rows_of(3), loss, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    found = measured(workload, "scope=eager").numerics
    assert found["status"] == ("ok" if is_module else "eager_unstable")
    assert is_module or "something outside the model changes between runs" in found["worst"]


class Warmup:
    """A weight of the loss that rises with each call, as people write one beside the training loop."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return loss_of(model, batch) * min(1.0, self.calls / 40)


warmup = Warmup()


@pytest.mark.parametrize("loss", [warmup, lambda model, batch: warmup(model, batch)])
def test_each_run_starts_with_the_schedule_that_the_first_one_started_with(loss: Any) -> None:
    workload = WorkloadFromModel(Stack, rows_of(3), loss, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    warmup.calls = 0
    assert measured(workload, "scope=eager").numerics["status"] == "ok"


@pytest.mark.parametrize(
    "spelled", ["scope=eager", "scope=eager,padding=longest,pad_multiple=4", "scope=full,dynamic=buckets,buckets=4/7"]
)
def test_a_batch_longer_than_any_at_the_time_of_the_sweep_is_refused_and_not_cut(spelled: str) -> None:
    exported: dict[str, Any] = {"__name__": "best"}
    then = made()
    exec(prepare(then, CompileSettings.parse(spelled), CPU).source(then.build_model()), exported)
    now = made(rows_of(3, 9))
    assert now.padded({"hidden": torch.ones(2, 6, 4)}, exported["padded_length"])["hidden"].size(1) == 7
    for padded_length in (exported["padded_length"], lambda longest: min(7, longest)):
        with pytest.raises(WorkloadError, match="this batch has length 9, above the longest that the settings were measured"):
            now.padded({"hidden": torch.ones(2, 9, 4)}, padded_length)


def test_a_model_whose_first_weights_are_frozen_whole_numbers_is_measured() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randint(-9, 9, (4, 4), dtype=torch.int8), requires_grad=False)
            self.stack = Stack()

        def forward(self, hidden: Tensor) -> Tensor:
            return self.stack(hidden @ self.table.to(hidden.dtype))  # type: ignore[no-any-return]

    workload = WorkloadFromModel(Quantised, rows_of(3), loss_of, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    numerics = measured(workload, "scope=eager").numerics
    assert (numerics["status"], numerics["reference"]) == ("ok", "float64")


def test_a_model_with_sparse_gradients_is_measured() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
            self.stack = Stack()

        def forward(self, words: Tensor) -> Tensor:
            return self.stack(self.words(words))  # type: ignore[no-any-return]

    workload = WorkloadFromModel(
        Embedded,
        lambda number: {"words": torch.randint(9, (2, 3))},
        lambda model, batch: model(batch["words"]).square().mean(),
        num_batches=3,
        optimizer_fn=partial(torch.optim.SGD, lr=1e-2),
    )("only", 0)
    assert isinstance(workload, ModelWorkload)
    numerics = measured(workload, "scope=eager").numerics
    assert numerics["status"] == "ok"
    assert numerics["gradients"]["model.words"]["gap"] < 1e-4


def test_a_model_that_cannot_be_copied_is_made_anew() -> None:
    class Locked(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    workload = WorkloadFromModel(Locked, rows_of(3), loss_of, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    one, other = workload.build_model(), workload.build_model()
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    assert {id(weights) for weights in one.parameters()}.isdisjoint(id(weights) for weights in other.parameters())
    assert measured(workload, "scope=eager").numerics["status"] == "ok"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_is_compiled_already_is_refused(in_place: bool, inside: bool) -> None:
    def compiled() -> nn.Module:
        model = Stack()
        if in_place:
            (model.stages if inside else model).compile(backend="eager")
        elif inside:
            model.stages = torch.compile(model.stages, backend="eager")
        else:
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        return model

    where = "model.stages" if inside else "model"
    with pytest.raises(WorkloadError, match=f"^{where} is already compiled; return the plain model, the sweep compiles it$"):
        WorkloadFromModel(compiled, rows_of(3), loss_of)("only", 0).build_model()


def test_a_loss_that_is_no_tensor_is_one_sentence() -> None:
    workload = WorkloadFromModel(Stack, rows_of(3), lambda model, batch: {"logs": 0}, num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    with pytest.raises(WorkloadError, match=r"^loss_fn returned dict without a loss; return the loss, a tensor, alone or first"):
        measured(workload, "scope=eager")


def test_an_optimizer_that_wants_a_closure_is_one_sentence() -> None:
    workload = made(optimizer_fn=partial(torch.optim.LBFGS, lr=1.0))
    with pytest.raises(WorkloadError, match=r"^optimizer_fn: LBFGS needs a closure at each step; use one that steps without$"):
        measured(workload, "scope=eager")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_layers_get_their_weights_before_anything_is_counted_or_compiled() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.Flatten(0, 1), nn.LazyBatchNorm1d(), nn.LazyLinear(2))

    workload = WorkloadFromModel(lazy, rows_of(3), loss_of, num_batches=2)("only", 0)
    one, other = workload.build_model(), workload.build_model()
    assert [tuple(weights.shape) for weights in one.parameters()] == [(4, 4), (4,), (4,), (4,), (2, 4), (2,)]
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    assert one.training
    assert not one.get_buffer("model.3.num_batches_tracked").item()
    found = measured(workload, "scope=full,dynamic=static,backend=eager")
    assert (found.numerics["status"], found.graphs, found.fallbacks) == ("ok", 1, [])
