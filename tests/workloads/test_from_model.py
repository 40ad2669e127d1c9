"""A workload made of a model, a batch function and a loss: what is found out, what can be told, and what is refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workloads import WorkloadFromModel, load_workload, measure
from workloads.compiling import source_for
from workloads.errors import SettingsError, WorkloadError
from workloads.finding import repeated_blocks
from workloads.from_model import ModelAndLoss, ModelWorkload, own_loss
from workloads.measuring import Measurement, Protocol
from workloads.settings import CompileSettings
from workloads.shapes import PadToLongest, PadToMax

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=2, min_passes=2, max_passes=2, cpu_window_s=0.0)
EXAMPLES = "examples.bring_your_own"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch, repository: Any, one_thread: None) -> None:
    monkeypatch.syspath_prepend(str(repository))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).relu()


class Stack(nn.Module):
    """Two kinds of lists, and one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])])
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.mixed = nn.ModuleList([Layer(), nn.Sequential(nn.Linear(4, 4))])

    def forward(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                hidden = layer(hidden)
        return hidden


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["hidden"]).square().mean()


def rows_of(*lengths: int, samples: int = 2) -> Callable[[int], dict[str, Tensor]]:
    return lambda number: {"hidden": torch.randn(samples, lengths[number % len(lengths)], 4), "kind": torch.arange(samples)}


def made(batch_fn: Callable[[int], Any] | None = None, **told: Any) -> ModelWorkload:
    workload = WorkloadFromModel(Stack, batch_fn or rows_of(3, 7, 5), loss_of, **{"num_batches": 3, **told})("only", 0)
    assert isinstance(workload, ModelWorkload)
    return workload


def measured(workload: ModelWorkload, spelled: str) -> Measurement:
    return measure(workload, CompileSettings.parse(spelled), device=CPU, protocol=SHORT)


def test_blocks_are_members_of_lists_of_one_class_and_no_lone_layers() -> None:
    assert repeated_blocks(Stack()) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert repeated_blocks(nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Linear(4, 4))) == ["0.0", "0.1"]
    assert repeated_blocks(nn.Linear(4, 4)) == []


def test_of_stages_of_different_sizes_the_blocks_inside_are_taken() -> None:
    def stage(width: int) -> nn.Module:
        block = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(2))
        return nn.ModuleDict({"before": nn.Linear(4, width), "blocks": block})

    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = stage(width)

    assert repeated_blocks(nn.ModuleDict({"stages": nn.ModuleList([Stage(4), Stage(8)])})) == [
        f"stages.{number}.inner.blocks.{block}" for number in range(2) for block in range(2)
    ]
    assert repeated_blocks(nn.ModuleDict({"stages": nn.ModuleList([Stage(4), Stage(4)])})) == ["stages.0", "stages.1"]


def test_the_length_is_what_changes_and_batches_are_padded_by_the_policy() -> None:
    workload = made()
    assert (workload.batch_size, workload.max_length, workload.found.length) == (2, 7, {"hidden": (1,)})
    pool = workload.pool(PadToLongest(max_length=7, multiple=4), rank=0, device=CPU)
    assert [batch.length for batch in pool] == [4, 7, 7]
    assert [tuple(batch.inputs["hidden"].shape) for batch in pool] == [(2, 4, 4), (2, 7, 4), (2, 7, 4)]
    assert [batch.tokens for batch in pool] == [6, 14, 10]
    assert not pool[0].inputs["hidden"][:, 3:].any()
    assert pool[0].inputs["hidden"][:, :3].all()
    assert workload.batch_of_length(2, rank=0, device=CPU).inputs["hidden"].shape == (2, 2, 4)
    assert workload.dynamic_dims("model.stages.0.1") == {"hidden": (1,)}


class Windowed(nn.Module):
    """Cannot take rows of fewer than five."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.first(hidden.mT)


def test_lengths_below_the_shortest_batch_are_neither_warmed_up_nor_padded_to() -> None:
    workload = WorkloadFromModel(Windowed, rows_of(6, 9, 7), loss_of, num_batches=3)("only", 0)
    assert (workload.min_length, workload.max_length) == (6, 9)
    for spelled in ("dynamic=mark,pad_multiple=1", "dynamic=buckets,buckets=3/7/9"):
        found = measured(workload, f"scope=full,backend=aot_eager,{spelled}")
        assert found.numerics["status"] == "ok"
        assert found.graphs == CompileSettings.parse(f"scope=full,{spelled}").num_graphs(9, workload.min_length)


def test_shorter_batches_than_the_shortest_told_are_padded_to_it() -> None:
    workload = made(min_length=4)
    pool = workload.pool(PadToLongest(max_length=7), rank=0, device=CPU)
    assert [batch.length for batch in pool] == [4, 7, 5]
    assert workload.padded({"hidden": torch.ones(2, 3, 4)}, lambda longest: longest)["hidden"].shape == (2, 4, 4)
    assert made(min_length=2).pool(PadToLongest(max_length=7), rank=0, device=CPU)[0].length == 3


def test_labels_are_padded_with_what_losses_ignore_and_anything_can_be_told() -> None:
    def batch(number: int) -> dict[str, Tensor]:
        return {"labels": torch.ones(2, 3 + number, dtype=torch.long), "hidden": torch.ones(2, 3 + number, 4)}

    workload = made(batch, pad_with={"hidden": 9.0})
    first = workload.pool(PadToMax(max_length=5), rank=0, device=CPU)[0].inputs
    assert first["labels"].tolist() == [[1, 1, 1, -100, -100]] * 2
    assert first["hidden"][0, :, 0].tolist() == [1, 1, 1, 9, 9]


def test_dimensions_that_change_apart_are_padded_to_their_largest() -> None:
    def batch(number: int) -> dict[str, Tensor]:
        return {"hidden": torch.ones(2, 3 + number, 4), "mask": torch.ones(2, 3 + number), "boxes": torch.ones(2, 9 - number)}

    workload = made(batch)
    assert workload.found.length == {"hidden": (1,), "mask": (1,)}
    assert {one.inputs["boxes"].size(1) for one in workload.pool(PadToMax(max_length=5), rank=0, device=CPU)} == {9}
    assert made(batch, dynamic={"boxes": (1,)}).max_length == 9


def test_batches_of_one_size_have_one_length() -> None:
    workload = made(rows_of(3))
    assert (workload.max_length, workload.found.length) == (1, {})
    assert workload.dynamic_dims("model.stages.0.1") == {}
    with pytest.raises(SettingsError, match="above the workload's 1 tokens"):
        workload.validate(CompileSettings.parse("scope=full,dynamic=mark"))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"batch_fn": lambda number: [1]}, "returned list"),
        ({"batch_fn": lambda number: {"x": torch.ones(2), "n": 3}}, "returned 'n' as int, which is no tensor"),
        ({"num_batches": 0}, "num_batches=0 of WorkloadFromModel is no whole number"),
        ({"num_batches": -1}, "num_batches=-1 of"),
        ({"num_batches": 2.5}, "num_batches=2.5 of"),
        ({"max_length": "8"}, "max_length='8' of"),
        ({"max_length": 0}, "max_length=0 of"),
        ({"max_length": True}, "max_length=True of"),
        ({"min_length": 0}, "min_length=0 of"),
        ({"min_length": 8}, "min_length=8 is above the longest batch's 7"),
        ({"dynamic": {"hidden": 1}}, "does not give tensors their dimensions"),
        ({"dynamic": {"hidden": "1"}}, "does not give tensors their dimensions"),
        ({"pad_with": {"hiden": 1}}, "pad_with of WorkloadFromModel names 'hiden', and batches have hidden, kind"),
        ({"dynamic": ["hidden"]}, "does not give tensors their dimensions"),
        ({"batch_fn": lambda number: {"x": torch.ones(3 - number % 2, 2)}}, "2 and 3 samples"),
        (
            {"batch_fn": lambda number: {"x": torch.ones(3 + number, 2), "y": torch.ones(3 + number, 2)}},
            "put it first in the batch",
        ),
        ({"batch_fn": lambda number: {"x": torch.ones(3 + number, 2), "y": torch.ones(3 + number)}}, "leave odd ones out$"),
        ({"batch_fn": lambda number: {"x": torch.ones(())}}, "no tensor with a dimension"),
        ({"batch_fn": lambda number: {f"x{number}": torch.ones(2)}}, "differ in their tensors"),
        ({"dynamic": {"hidden": (5,)}}, "dynamic dimension 5 of hidden"),
        ({"max_length": 5}, "above 5"),
        ({"regions": ["stages.7"]}, "no module 'stages.7'"),
    ],
)
def test_what_cannot_work_is_one_sentence(told: dict[str, Any], named: str) -> None:
    def use() -> None:
        workload = made(**told)
        workload.pool(PadToMax(max_length=workload.max_length), rank=0, device=CPU)
        workload.regions(workload.build_model())

    with pytest.raises(WorkloadError, match=named) as caught:
        use()
    assert "\n" not in str(caught.value)


def test_what_a_users_function_raises_is_one_sentence_with_its_cause() -> None:
    missing = FileNotFoundError("/data/train.bin")

    def failing(number: int) -> dict[str, Tensor]:
        if number == 2:
            raise missing
        return {"hidden": torch.ones(2, 3, 4)}

    def no_model() -> nn.Module:
        raise missing

    with pytest.raises(
        WorkloadError, match=r"^the batch function failed on batch 2: FileNotFoundError: /data/train\.bin$"
    ) as found:
        made(failing)
    assert found.value.__cause__ is missing
    workload = WorkloadFromModel(no_model, rows_of(3), loss_of)("only", 0)
    with pytest.raises(WorkloadError, match=r"^the model function failed: FileNotFoundError: /data/train\.bin$") as found:
        workload.build_model()
    assert found.value.__cause__ is missing


def test_a_device_without_room_for_a_model_is_said_as_that() -> None:
    def too_large() -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        WorkloadFromModel(too_large, rows_of(3), loss_of)("only", 0).build_model()


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    longest = np.array([7, 3]).max()
    assert made(max_length=longest, dynamic={"hidden": (np.int64(1),)}).max_length == 7


def test_rows_of_whole_batches_are_not_grouped() -> None:
    policy = CompileSettings.parse("scope=eager,padding=longest,pad_multiple=1,group_window=100").shape_policy(7)
    with pytest.raises(WorkloadError, match="leave group_window out"):
        made().pool(policy, rank=0, device=CPU)


def test_equal_seeds_give_equal_weights_and_batches_and_leave_the_callers_random_state() -> None:
    before = torch.get_rng_state()
    one, other = made(), made()
    batches = [workload.pool(PadToMax(max_length=7), rank=0, device=CPU)[1].inputs["hidden"] for workload in (one, other)]
    assert torch.equal(*batches)
    assert all(torch.equal(*pair) for pair in zip(one.build_model().parameters(), other.build_model().parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(batches[0], one.pool(PadToMax(max_length=7), rank=1, device=CPU)[1].inputs["hidden"])


def test_regional_settings_of_a_model_without_blocks_are_refused() -> None:
    workload = WorkloadFromModel(lambda: nn.Linear(4, 4), rows_of(3), loss_of)("only", 0)
    with pytest.raises(SettingsError, match="no repeated blocks"):
        source_for(CompileSettings.parse("scope=regional"), workload, workload.build_model(), CPU)


def test_the_examples_blocks_and_lengths_are_found() -> None:
    reviews, texts = (load_workload(f"{EXAMPLES}:{name}")("only", 0) for name in ("Reviews", "Texts"))
    assert reviews.regions(reviews.build_model()) == [f"model.layers.{i}" for i in range(4)]
    assert reviews.dynamic_dims("") == {"words": (1,)}
    assert texts.dynamic_dims("model.transformer.h.0")["hidden_states"] == (1,)
    assert texts.dynamic_dims("model") == {"input_ids": (1,), "labels": (1,)}


def test_a_training_example_is_measured_compiled() -> None:
    workload = load_workload(f"{EXAMPLES}:Reviews")("only", 0)
    found = measure(workload, CompileSettings.parse("scope=regional,backend=aot_eager"), device=CPU, protocol=SHORT)
    assert (found.numerics["status"], found.graphs, found.fallbacks) == ("ok", 1, [])
    assert found.numerics["outputs"] is None
    assert "optimizer.zero_grad" in found.source


def test_a_model_that_computes_its_loss_is_one_graph_for_batches_with_and_without_padding() -> None:
    workload = load_workload(f"{EXAMPLES}:Texts")("only", 0)
    found = measure(workload, CompileSettings.parse("scope=full,dynamic=mark,backend=aot_eager"), device=CPU, protocol=SHORT)
    assert (found.graphs, found.graph_break_reasons, found.recompile_reasons) == (1, [], [])
    longest = {"input_ids": torch.ones(4, 64, dtype=torch.long)}
    padded = workload.padded({**longest, "labels": longest["input_ids"]}, lambda longest: longest)  # type: ignore[attr-defined]
    assert padded["input_ids"] is not padded["labels"]
    with pytest.raises(WorkloadError, match="length 65, above the longest that the settings were measured with"):
        workload.padded(dict.fromkeys(("input_ids", "labels"), torch.ones(4, 65)), lambda longest: longest)  # type: ignore[attr-defined]


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
    """A block that is handed what its library handed all blocks: a pair, and the rest by name."""

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
    found = measure(workload, settings, device=CPU, protocol=SHORT)
    assert (found.graphs, found.recompile_reasons, found.numerics["status"]) == (1, [], "ok")
    assert '"others.masks.full": (0,)' in source_for(settings, workload, workload.build_model(), CPU)


@lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length)[:, None] / 10


class Positioned(Stack):
    """What it makes of the length alone stays for the next forward of that length."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + positions(hidden.size(1)))


def test_what_a_model_keeps_for_the_next_forward_is_not_spoilt_by_finding_dimensions() -> None:
    workload = WorkloadFromModel(Positioned, rows_of(3, 7, 5), loss_of, num_batches=3)("only", 0)
    assert workload.dynamic_dims("model.stages.0.1") == {"hidden": (1,)}
    assert positions.cache_info().currsize == 2
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


def test_an_installed_package_names_its_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from workloads import base

    point = EntryPoint(name="reviews", value=f"{EXAMPLES}:Reviews", group=base.ENTRY_POINTS)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == "compile_sweep.workloads" else [])
    assert load_workload("reviews") is load_workload(f"{EXAMPLES}:Reviews")
    with pytest.raises(WorkloadError, match="did you mean reviews"):
        load_workload("revews")


def test_options_that_a_workload_does_not_have_are_refused() -> None:
    workload = made()
    with pytest.raises(SettingsError, match="no option 'ema'"):
        workload.under(CompileSettings.parse("workload.ema=on"))
    assert workload.under(CompileSettings.parse("scope=full")) is workload


def test_a_plain_loop_and_a_trainer_apply_exported_settings() -> None:
    workload = load_workload(f"{EXAMPLES}:Texts")("only", 0)
    batch = workload.pool(PadToMax(max_length=workload.max_length), rank=0, device=CPU)[0].inputs
    for scope in ("full", "regional"):
        model = workload.build_model().get_submodule("model").eval()
        expected = model(**batch).loss
        whole = ModelAndLoss(model, own_loss)
        source = source_for(CompileSettings.parse(f"scope={scope},backend=aot_eager"), workload, whole, CPU)
        exported: dict[str, Any] = {"__name__": "best"}
        exec(compile(source, "best.py", "exec"), exported)
        compiled = exported["compile_model"](whole)
        loss = compiled(**batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        if scope == "regional":  # what a trainer is given is the model itself, compiled in place
            assert all("forward" in vars(block) for block in model.transformer.h)
            torch.testing.assert_close(model(**batch).loss, expected)


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
    assert drawn.count(drawn[0]) > 1, "the eager reference draws as the measured run did"


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


@pytest.mark.parametrize(
    "spelled", ["scope=eager", "scope=eager,padding=longest,pad_multiple=4", "scope=full,dynamic=buckets,buckets=4/7"]
)
def test_a_batch_longer_than_any_at_the_time_of_the_sweep_is_refused_and_not_cut(spelled: str) -> None:
    exported: dict[str, Any] = {"__name__": "best"}
    then = made()
    exec(source_for(CompileSettings.parse(spelled), then, then.build_model(), CPU), exported)
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
    with pytest.raises(WorkloadError, match=f"^{where} is compiled already; return the plain model, the sweep compiles it$"):
        WorkloadFromModel(compiled, rows_of(3), loss_of)("only", 0).build_model()


def test_a_loss_that_is_no_tensor_is_one_sentence() -> None:
    workload = WorkloadFromModel(Stack, rows_of(3), lambda model, batch: (loss_of(model, batch), 0), num_batches=3)("only", 0)
    assert isinstance(workload, ModelWorkload)
    with pytest.raises(WorkloadError, match=r"^the loss function returned tuple; return the loss alone, a tensor$"):
        measured(workload, "scope=eager")


def test_an_optimizer_that_wants_a_closure_is_one_sentence() -> None:
    workload = made(optimizer_fn=partial(torch.optim.LBFGS, lr=1.0))
    with pytest.raises(WorkloadError, match=r"^optimizer_fn: LBFGS wants a closure at each step; give one that steps without$"):
        measured(workload, "scope=eager")
