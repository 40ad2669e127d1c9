"""A workload made of a model, a batch function and a loss: what is discovered, what can be specified, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stacks import CPU, SHORT, Layer, Scale, Stack, loss_of, made, measured, rows_of
from torch import Tensor, nn

from compile_sweep import WorkloadFromModel, load_workload, measure
from compile_sweep.contract.inspect_model import (
    are_time_first,
    kinds_of_blocks,
    model_facts,
    operators_of,
    regional_share,
    repeated_blocks,
    size_of,
)
from compile_sweep.contract.model_and_loss import ModelAndLoss, model_loss
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToLongest, PadToMax
from compile_sweep.script.discover import Target

EXAMPLES = "examples.bring_your_own"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch, repository: Any, one_thread: None) -> None:
    monkeypatch.syspath_prepend(str(repository))


def test_blocks_are_members_of_lists_of_one_class_and_no_lone_layers() -> None:
    assert repeated_blocks(Stack()) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert repeated_blocks(nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Linear(4, 4))) == ["0.0", "0.1"]
    assert repeated_blocks(nn.Sequential(nn.Embedding(9, 4), Layer(), Layer(), Layer(), nn.Linear(4, 9))) == ["1", "2", "3"]
    embedding = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4))
    assert repeated_blocks(nn.Sequential(embedding, *(Layer() for _ in range(4)), nn.Linear(4, 9))) == ["1", "2", "3", "4"]
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert repeated_blocks(nn.Linear(4, 4)) == []
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):  # the latter from torch 2.15 on
        assert repeated_blocks(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == []
    numbered = nn.ModuleDict({str(number): nn.Sequential(nn.Linear(4, 4)) for number in range(2)})
    assert repeated_blocks(nn.ModuleDict({"layers": numbered})) == ["layers.0", "layers.1"]
    heads = nn.ModuleDict({str(classes): nn.Sequential(nn.Linear(4, classes)) for classes in (3, 5)})
    assert repeated_blocks(nn.ModuleDict({"heads": heads})) == []


def test_equal_layers_of_an_own_class_are_blocks_where_there_are_no_others() -> None:
    def layers(*widths: int) -> nn.ModuleList:
        return nn.ModuleList(Scale(width) for width in widths)

    assert repeated_blocks(nn.ModuleDict({"layers": layers(4, 4, 4)})) == ["layers.0", "layers.1", "layers.2"]
    assert repeated_blocks(nn.ModuleDict({"layers": layers(2, 4, 4, 4, 9)})) == ["layers.1", "layers.2", "layers.3"]
    assert repeated_blocks(nn.Sequential(Scale(4), nn.ReLU(), Scale(4), nn.ReLU(), Scale(4), nn.Linear(4, 2))) == ["0", "2", "4"]
    assert repeated_blocks(nn.ModuleDict({"layers": layers(4, 4)})) == [], "an input and an output layer"
    assert repeated_blocks(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})) == [], "torch's own"
    blocks = nn.ModuleList(Layer() for _ in range(2))
    assert repeated_blocks(nn.ModuleDict({"blocks": blocks, "scales": layers(4, 4, 4)})) == ["blocks.0", "blocks.1"]
    assert Target(called=blocks, module=nn.Sequential(*layers(4, 4, 4))).blocks == ["0", "1", "2"], "in a script"


def test_equal_blocks_need_no_list_and_equal_layers_of_one_block_are_none() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = Scale(4), Scale(4), Scale(4)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.value(self.query(hidden) + self.key(hidden))

    class Named(nn.Module):
        def __init__(self, block: Callable[[], nn.Module], count: int) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 4)
            for number in range(count):
                setattr(self, f"block{number}", block())

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    assert repeated_blocks(Named(Layer, 3)) == ["block0", "block1", "block2"]
    assert repeated_blocks(Named(Layer, 2)) == []
    assert repeated_blocks(Named(lambda: nn.Sequential(nn.Linear(4, 4)), 3)) == []
    assert repeated_blocks(Named(Attention, 1)) == []
    assert repeated_blocks(nn.ModuleDict({"body": Named(lambda: Named(Layer, 3), 3)})) == [f"body.block{n}" for n in range(3)]


class Recurrent(nn.Module):
    """Calls one layer of an own class again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Scale(4)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = self.cell(hidden)
        return hidden


@pytest.mark.parametrize(
    ("model_fn", "blocks"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), *(Scale(4) for _ in range(3))), ["model.1", "model.2", "model.3"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), Recurrent()), ["model.1.cell"]),
    ],
)
def test_layers_of_an_own_class_are_compiled_once(model_fn: Callable[[], nn.Module], blocks: list[str]) -> None:
    workload = WorkloadFromModel(model_fn, rows_of(3), loss_of, num_batches=2)("only", 0)
    assert workload.regions(workload.build_model()) == blocks
    found = measured(workload, "scope=regional,backend=eager")
    assert (found.graphs, found.recompile_reasons) == (1, [])


class StepByStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        states = [hidden.new_zeros(hidden.size(0), 4)]
        for now in hidden.unbind(1):
            states.append(self.cell(now.contiguous(), states[-1]))
        return torch.stack(states[1:], 1)


def test_a_loop_over_positions_whose_length_the_code_fixes_has_its_cell_compiled_once_for_all_lengths() -> None:
    workload = WorkloadFromModel(StepByStep, rows_of(3, 7, 5, 4, 6), loss_of, num_batches=5)("only", 0)
    assert workload.regions(workload.build_model()) == ["model.cell"]
    found = measured(workload, "scope=regional,dynamic=mark,backend=eager,pad_multiple=1")
    (once,) = found.recompile_reasons  # the first state has no gradient
    assert "requires_grad mismatch" in once
    assert (found.graphs, found.fallbacks) == (2, [])


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


def test_blocks_that_are_alike_are_compiled_once() -> None:
    alike = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)))
    unlike = nn.Sequential(*(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in range(1, 9)))
    names = [str(number) for number in range(8)]
    assert regional_share(alike, names) == pytest.approx(1 / 8 + 1 / 8), "one block's layers, and one graph"
    single = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert regional_share(single, ["0", "1", "2", "3"]) == pytest.approx(1 / 4), "a graph of one layer takes hardly any time"
    assert regional_share(unlike, names) == pytest.approx(2), "all of the layers, and eight graphs"
    assert [kinds_of_blocks(model, names) for model in (alike, unlike)] == [1, 8]


class Dropping(nn.Module):
    """A block of stochastic depth, which shows neither its rate nor its number when it is printed."""

    def __init__(self, number: int, rate: float) -> None:
        super().__init__()
        self.layer, self.number, self.rate = nn.Linear(4, 4), number, rate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return x + (nn.functional.dropout1d(y, self.rate) if self.rate > 0.0 else y)


@pytest.mark.parametrize(("rate", "kinds"), [(0.0, 1), (0.01, 5)])
def test_blocks_that_differ_in_a_rate_are_of_several_kinds_and_those_in_a_number_of_one(rate: float, kinds: int) -> None:
    model = nn.Sequential(*(Dropping(number, rate * number) for number in range(5)))
    names = [str(number) for number in range(5)]
    assert kinds_of_blocks(model, names) == kinds
    assert regional_share(model, names) == pytest.approx(1 if kinds == 5 else 1 / 5)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    for block in model:
        block.compile(backend=graphs)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert graphs.frame_count == kinds


def test_the_length_is_what_changes_and_batches_are_padded_by_the_policy() -> None:
    workload = made()
    assert (workload.batch_size, workload.max_length, workload.batch_changes.length) == (2, 7, {"hidden": (1,)})
    pool = workload.pool(PadToLongest(max_length=7, multiple=4), rank=0, device=CPU)
    assert [batch.length for batch in pool] == [4, 7, 7]
    assert [tuple(batch.inputs["hidden"].shape) for batch in pool] == [(2, 4, 4), (2, 7, 4), (2, 7, 4)]
    assert [batch.tokens for batch in pool] == [6, 14, 10]
    assert not pool[0].inputs["hidden"][:, 3:].any()
    assert pool[0].inputs["hidden"][:, :3].all()
    assert workload.batch_of_length(2, rank=0, device=CPU).inputs["hidden"].shape == (2, 3, 4)  # nothing is cut
    assert workload.dynamic_dims("model.stages.0.1") == {"hidden": (1,)}


class Windowed(nn.Module):
    """Rejects rows of fewer than five."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.first(hidden.mT)


@pytest.mark.slow
def test_lengths_below_the_shortest_batch_are_neither_warmed_up_nor_padded_to() -> None:
    workload = WorkloadFromModel(Windowed, rows_of(6, 9, 7), loss_of, num_batches=3)("only", 0)
    assert (workload.min_length, workload.max_length) == (6, 9)
    for spelled in ("dynamic=mark,pad_multiple=1", "dynamic=buckets,buckets=3/7/9"):
        found = measured(workload, f"scope=full,backend=eager,{spelled}")
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
    assert workload.batch_changes.length == {"hidden": (1,), "mask": (1,)}
    assert {one.inputs["boxes"].size(1) for one in workload.pool(PadToMax(max_length=5), rank=0, device=CPU)} == {9}
    assert made(batch, dynamic={"boxes": (1,)}).max_length == 9


def test_batches_of_one_size_have_one_length() -> None:
    workload = made(rows_of(3))
    assert (workload.max_length, workload.batch_changes.length) == (1, {})
    assert workload.dynamic_dims("model.stages.0.1") == {}
    for text, message in (
        ("scope=full,dynamic=mark", "dynamic=mark is for lengths that change, and every batch of this workload has one shape"),
        ("scope=full,dynamic=buckets", "dynamic=buckets is for lengths that change"),
        ("scope=eager,padding=longest,pad_multiple=16", "pad_multiple=16 pads lengths, and every batch"),
    ):
        with pytest.raises(SettingsError, match=message):
            workload.validate(CompileSettings.parse(text))
    workload.validate(CompileSettings.parse("scope=full,dynamic=auto"))
    assert "padded_length" not in prepare(workload, CompileSettings.parse("scope=full"), CPU).source(workload.build_model())


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"batch_fn": lambda number: [1]}, "a list of numbers; use torch.tensor"),
        ({"batch_fn": lambda number: 1}, "returned int; return tensors in a dictionary, a tuple"),
        ({"batch_fn": lambda number: {"x": torch.ones(2), "n": object()}}, "returned 'n' as object, not a tensor"),
        ({"batch_fn": lambda number: {"x": torch.ones(2), "n": number}}, "'n' as int, once 0 and once 1; make it a tensor"),
        ({"batch_fn": lambda number: {"x": torch.ones(2), "n": number}}, "dynamo.capture_scalar_outputs=on in the settings"),
        ({"batches": [{"hidden": torch.ones(2, 3, 4)}]}, "both batch_fn and batches; leave one of them out"),
        ({"step_fn": loss_of}, "both loss_fn and step_fn; leave one of them out"),
        ({"lengths": "none"}, "lengths='none' of WorkloadFromModel is neither 'real' nor 'padded'"),
        ({"clip_grad_norm": 0}, "clip_grad_norm=0 of WorkloadFromModel is not a number above 0"),
        ({"accumulate": 0}, "accumulate=0 of WorkloadFromModel is not a whole number"),
        ({"num_batches": 0}, "num_batches=0 of WorkloadFromModel is not a whole number"),
        ({"num_batches": -1}, "num_batches=-1 of"),
        ({"num_batches": 2.5}, "num_batches=2.5 of"),
        ({"max_length": "8"}, "max_length='8' of"),
        ({"max_length": 0}, "max_length=0 of"),
        ({"max_length": True}, "max_length=True of"),
        ({"min_length": 0}, "min_length=0 of"),
        ({"min_length": 8}, "min_length=8 is above the longest batch's 7"),
        ({"dynamic": {"hidden": 1}}, "does not give tensors their dimensions"),
        ({"dynamic": {"hidden": "1"}}, "does not give tensors their dimensions"),
        ({"pad_with": {"hiden": 1}}, "pad_with of WorkloadFromModel names 'hiden', but batches have hidden, kind"),
        ({"dynamic": ["hidden"]}, "does not give tensors their dimensions"),
        ({"batch_fn": lambda number: {"x": torch.ones(3 - number % 2, 2)}}, "2 and 3 samples"),
        (
            {"batch_fn": lambda number: {"x": torch.ones(3 + number, 2), "y": torch.ones(3 + number, 2)}},
            "put it first in the batch",
        ),
        (
            {"batch_fn": lambda number: {"x": torch.ones(3 + number, 2), "y": torch.ones(3 + number)}},
            r"leave odd ones out; if the first dimension .* say so with dynamic=\{'x': \(0,\), 'y': \(0,\)\}",
        ),
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
        prepare(workload, CompileSettings.parse("scope=regional"), CPU).source(workload.build_model())


@pytest.mark.slow
def test_the_examples_blocks_and_lengths_are_found() -> None:
    reviews, texts = (load_workload(f"{EXAMPLES}:{name}")("only", 0) for name in ("Reviews", "Texts"))
    assert reviews.regions(reviews.build_model()) == [f"model.layers.{i}" for i in range(4)]
    assert reviews.dynamic_dims("") == {"words": (1,)}
    assert texts.dynamic_dims("model.transformer.h.0")["hidden_states"] == (1,)
    assert texts.dynamic_dims("model") == {"input_ids": (1,), "labels": (1,)}


@pytest.mark.slow
def test_a_training_example_is_measured_compiled() -> None:
    workload = load_workload(f"{EXAMPLES}:Reviews")("only", 0)
    found = measure(prepare(workload, CompileSettings.parse("scope=regional,backend=aot_eager"), CPU), protocol=SHORT)
    assert (found.numerics["status"], found.graphs, found.fallbacks) == ("ok", 1, [])
    assert found.numerics["outputs"] is None
    assert "optimizer.zero_grad" in found.source


@pytest.mark.slow
def test_a_model_that_computes_its_loss_is_one_graph_for_batches_with_and_without_padding() -> None:
    workload = load_workload(f"{EXAMPLES}:Texts")("only", 0)
    found = measure(prepare(workload, CompileSettings.parse("scope=full,dynamic=mark,backend=eager"), CPU), protocol=SHORT)
    assert (found.graphs, found.graph_break_reasons, found.recompile_reasons) == (1, [], [])
    longest = {"input_ids": torch.ones(4, 64, dtype=torch.long)}
    padded = workload.padded({**longest, "labels": longest["input_ids"]}, lambda longest: longest)  # type: ignore[attr-defined]
    assert padded["input_ids"] is not padded["labels"]
    with pytest.raises(WorkloadError, match="length 65, above the longest that the settings were measured with"):
        workload.padded(dict.fromkeys(("input_ids", "labels"), torch.ones(4, 65)), lambda longest: longest)  # type: ignore[attr-defined]


def test_an_installed_package_names_its_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from compile_sweep.contract import workload_names

    point = EntryPoint(name="reviews", value=f"{EXAMPLES}:Reviews", group=workload_names.ENTRY_POINT_GROUP)
    monkeypatch.setattr(workload_names, "entry_points", lambda group: [point] if group == "compile_sweep.workloads" else [])
    assert load_workload("reviews") is load_workload(f"{EXAMPLES}:Reviews")
    with pytest.raises(WorkloadError, match="did you mean reviews"):
        load_workload("revews")


def test_options_that_a_workload_does_not_have_are_refused() -> None:
    workload = made()
    with pytest.raises(SettingsError, match="no option 'ema'"):
        workload.under(CompileSettings.parse("workload.ema=on"))
    assert workload.under(CompileSettings.parse("scope=full")) is workload


def test_a_batch_function_that_takes_a_size_makes_batches_of_the_size_that_settings_choose() -> None:
    def rows(number: int, batch_size: int = 4) -> dict[str, Tensor]:
        return {"x": torch.full((batch_size, 3 + number % 2, 8), float(number))}

    workload = made(rows)
    assert workload.batch_size == 4
    larger = workload.under(CompileSettings.parse("workload.batch_size=6"))
    batch = larger.pool(PadToMax(max_length=4), rank=0, device=CPU)[0]
    assert (larger.batch_size, batch.samples, batch.inputs["x"].shape[0]) == (6, 6, 6)
    assert larger.batch_changes.length == workload.batch_changes.length
    with pytest.raises(SettingsError, match="batch_size"):
        workload.under(CompileSettings.parse("workload.batch_size=0"))
    assert CompileSettings.parse("batch_size=6") == CompileSettings.parse("workload.batch_size=6")

    def deaf(number: int, batch_size: int = 4) -> dict[str, Tensor]:
        return rows(number)

    with pytest.raises(WorkloadError, match="asked for batches of 6 and made some of 4"):
        made(deaf).under(CompileSettings.parse("workload.batch_size=6"))


@pytest.mark.slow
def test_a_plain_loop_and_a_trainer_apply_exported_settings() -> None:
    workload = load_workload(f"{EXAMPLES}:Texts")("only", 0)
    batch = workload.pool(PadToMax(max_length=workload.max_length), rank=0, device=CPU)[0].inputs
    for scope in ("full", "regional"):
        model = workload.build_model().get_submodule("model").eval()
        expected = model(**batch).loss
        whole = ModelAndLoss(model, model_loss)
        source = prepare(workload, CompileSettings.parse(f"scope={scope},backend=aot_eager"), CPU).source(whole)
        exported: dict[str, Any] = {"__name__": "best"}
        exec(compile(source, "best.py", "exec"), exported)
        compiled = exported["compile_model"](whole)
        loss = compiled(**batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        if scope == "regional":  # a trainer is given the model itself, compiled in place
            assert all("forward" in vars(block) for block in model.transformer.h)
            torch.testing.assert_close(model(**batch).loss, expected)


class Reused(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Layer())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(self.inner(self.inner(hidden)))  # type: ignore[no-any-return]


class WithRates(Stack):
    """Reads numbers from a tensor as it is made, as models with stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]


@pytest.mark.parametrize(("model_fn", "has_blocks"), [(lambda: nn.Linear(4, 4), False), (Reused, True), (WithRates, True)])
def test_whether_there_are_blocks_is_known_where_batches_draw_their_length(
    model_fn: Callable[[], nn.Module], has_blocks: bool
) -> None:
    def drawn(number: int) -> dict[str, Tensor]:
        return {"hidden": torch.randn(2, int(torch.randint(3, 9, ())), 4)}

    facts = model_facts(WorkloadFromModel(model_fn, drawn, loss_of, num_batches=3)())
    assert facts["has_blocks"] is has_blocks


def test_operators_with_gradients_are_counted_once_each() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    hidden = layer(x).relu()
    assert operators_of([("x", x)]).number == 0
    assert operators_of([("one", hidden + hidden.exp())]).number == 5  # with the transposed weight
    assert operators_of([("one", hidden), ("other", hidden.exp())]).number == 4
    assert operators_of([("one", hidden.exp().sin())], [("hidden", hidden)]).number == 2, "not what computed the input"
    assert operators_of([("one", hidden)], [("hidden", hidden)]).number == 0


@pytest.mark.parametrize(
    ("parts", "slices", "elements"),
    [
        (lambda x: [x[:, at] for at in range(20)], 20, 20 * 40),
        (lambda x: [x[:, at : at + 1].squeeze(1) for at in range(20)], 20, 20 * 40),
        (lambda x: [x[:, at] for at in range(5)], 0, 0),
        (lambda x: x.unbind(1), 0, 0),
    ],
)
def test_slices_of_one_tensor_are_counted_where_they_are_many(
    parts: Callable[[Tensor], Sequence[Tensor]], slices: int, elements: int
) -> None:
    weight = torch.ones(2, 20, requires_grad=True)
    found = operators_of([("sum", torch.stack(list(parts(weight.exp()))).sum())])
    assert (found.num_slices, found.sliced_elements) == (slices, elements)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(19, 304), (22, 352), (17, 272)], True),
        ([(16, 304), (16, 352), (16, 272)], False),
        ([(16, 512), (16, 512), (7, 224)], False),  # the last batch is smaller
        ([(16, 16), (12, 12), (7, 7)], False),  # no texts
        ([(30, 300), (20, 400), (10, 500)], False),  # batches of so many words
    ],
)
def test_lengths_come_first_if_they_alone_change(sizes: list[tuple[int, int]], expected: bool) -> None:
    assert are_time_first(sizes) is expected


class WithBags(nn.Module):
    """Takes a recommender's features: numbers, and bags of ids by table."""

    def forward(self, dense: Tensor, offsets: Tensor, ids: list[Tensor]) -> Tensor:
        raise NotImplementedError


class Edges(nn.Module):
    """Takes a graph without features of its nodes."""

    def forward(self, edge_index: Tensor, node_ids: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(slots=True)
class Record:
    weights: Tensor
    input_ids: Tensor


def integers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "expected"),
    [
        (nn.Identity(), (integers(8, 12),), {}, (8, 96)),
        (nn.Identity(), (), {"attention_mask": integers(8, 12), "input_ids": integers(8, 12)}, (8, 96)),
        (nn.Identity(), (torch.zeros(8, 80, 30),), {"labels": integers(8, 5)}, (8, 40)),  # a model that writes texts
        (nn.Identity(), (torch.zeros(8, 3, 4, 4),), {"pixel_mask": integers(8, 4, 4)}, (8, 8)),
        (nn.Identity(), (torch.zeros(8, 3, 4, 4), torch.zeros(8, 16, dtype=torch.bool)), {}, (8, 8)),
        (nn.Identity(), (torch.zeros(50, 16), integers(2, 300)), {}, (50, 50)),  # nodes and edges of a graph
        (nn.Identity(), (torch.zeros(64, 13), integers(26, 64), [integers(64)] * 26), {}, (64, 64)),
        (WithBags(), (torch.zeros(64, 13), integers(64, 64), [integers(64)] * 64), {}, (64, 64)),
        (Edges(), (integers(2, 300), integers(50)), {}, (50, 50)),
        (nn.Identity(), ([torch.zeros(3, 40, 30), torch.zeros(3, 20, 50)], [{"boxes": torch.zeros(7, 4)}] * 2), {}, (2, 2)),
        (nn.Identity(), (nn.utils.rnn.pack_sequence([torch.zeros(5, 9), torch.zeros(3, 9)]),), {}, (2, 8)),
        (nn.Identity(), (integers(8, 12), (torch.zeros(3, 8, 16), torch.zeros(3, 8, 16))), {}, (8, 96)),  # an LSTM's states
        (nn.Identity(), ({"input_ids": integers(2, 40), "pixel_values": torch.zeros(5, 3, 9, 9)},), {}, (2, 80)),
        (nn.Identity(), ([torch.zeros(8, 16, 9), torch.zeros(8, 16, 5)],), {}, (8, 8)),  # views, or levels of a pyramid
        (nn.Identity(), ({"batch_idx": torch.zeros(29), "cls": torch.zeros(29, 1), "img": torch.zeros(8, 3, 9)},), {}, (8, 8)),
        (nn.Identity(), ({"encoder_cont": torch.zeros(16, 24, 9), "decoder_time_idx": integers(16, 6)},), {}, (16, 16)),
        (nn.Identity(), (integers(8).numpy(), integers(8, 12).numpy()), {}, (8, 96)),
        (nn.Identity(), (SimpleNamespace(weights=torch.zeros(10), images=torch.zeros(8, 3, 9, 9), name="a"),), {}, (8, 8)),
        (nn.Identity(), (), {"batch": Record(torch.zeros(10), integers(8, 12))}, (8, 96)),
        (nn.Identity(), (SimpleNamespace(rate=0.1), torch.zeros(8, 3)), {}, (8, 8)),  # options before a batch
    ],
)  # fmt: skip
def test_only_ids_of_texts_are_tokens(module: nn.Module, args: Any, kwargs: Any, expected: tuple[int, int]) -> None:
    assert size_of(args, kwargs, module=module) == expected


def test_tokens_are_counted_where_the_length_comes_first() -> None:
    assert size_of((integers(12, 8),), {}, is_time_first=True) == (8, 96)
