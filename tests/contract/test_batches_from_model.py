"""Batches of every form that people train on: how they reach the loss, what changes in them, and what is never padded."""

from __future__ import annotations

import enum
from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stacks import CPU, SHORT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from compile_sweep import WorkloadFromModel, measure
from compile_sweep.contract.batch_changes import find_batch_changes
from compile_sweep.contract.batches import flatten, rebuild
from compile_sweep.contract.first_step import check_first_step
from compile_sweep.contract.padding_check import checked_padding
from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.harness.measure import Protocol, warm_up_batches
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToLongest, PadToMax

pytestmark = pytest.mark.usefixtures("one_thread")

Pair = namedtuple("Pair", "x y")


@dataclass
class Labeled:
    x: Tensor
    y: Tensor
    name: str = "train"


class Graph(SimpleNamespace):
    """Like PyTorch Geometric's `Data`, as far as a loader and a step see it."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randint(3, (4,))


def error_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def made(batch_fn: Any, loss_fn: Callable[..., Any], model_fn: Callable[[], nn.Module] | None = None, **told: Any) -> Any:
    return WorkloadFromModel(model_fn or (lambda: nn.Linear(8, 3)), batch_fn, loss_fn, **{"num_batches": 4, **told})()


FORMS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module, Any], Tensor], set[str]]] = {
    "pair": (lambda: tuple(rows()), lambda model, batch: error_of(model, *batch), {"0", "1"}),
    "list": (lambda: list(rows()), lambda model, batch: error_of(model, *batch), {"0", "1"}),
    "named": (lambda: Pair(*rows()), lambda model, batch: error_of(model, batch.x, batch.y), {"x", "y"}),
    "dataclass": (lambda: Labeled(*rows()), lambda model, batch: error_of(model, batch.x, batch.y), {"x", "y"}),
    "mapping": (lambda: UserDict(zip("xy", rows(), strict=True)), lambda model, batch: error_of(model, **batch), {"x", "y"}),
    "nested": (
        lambda: {"inputs": {"x": rows()[0]}, "targets": [{"y": rows()[1]}], "epoch": 3},
        lambda model, batch: error_of(model, batch["inputs"]["x"], batch["targets"][0]["y"]) * batch["epoch"],
        {"inputs.x", "targets.0.y"},
    ),
    "graph": (lambda: Graph(x=rows()[0], y=rows()[1]), lambda model, batch: error_of(model, batch.x, batch.y), {"x", "y"}),
}


@pytest.mark.parametrize("form", [name for name in FORMS if name != "named"])
def test_a_batch_comes_to_the_loss_in_the_form_that_its_loader_gives(form: str) -> None:
    make, loss_fn, names = FORMS[form]
    tensors, structure = flatten(batch := make())
    assert set(tensors) == names
    assert structure is not None
    assert type(rebuild(structure, tensors)) is type(batch)
    workload = made(lambda number: make(), loss_fn)
    batch = workload.pool(PadToMax(max_length=1), rank=0, device=CPU)[0]
    assert batch.samples == 4
    loss = workload.build_model()(**batch.inputs)
    assert torch.equal(loss, loss_fn(workload.build_model().model, rebuild(structure, batch.inputs)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pair", "nested", "dataclass"])
def test_a_batch_of_another_form_is_one_graph(form: str) -> None:
    make, loss_fn, _ = FORMS[form]
    prepared = prepare(
        made(lambda number: make(), loss_fn), CompileSettings.parse("scope=full,backend=aot_eager,dynamic=auto"), CPU
    )
    found = measure(prepared, protocol=SHORT)
    assert (found.numerics["status"], found.graphs, found.graph_break_reasons) == ("ok", 1, [])


def test_a_loader_stands_in_the_place_of_the_batch_function_and_its_smaller_last_batch_is_left_out() -> None:
    data = TensorDataset(torch.randn(14, 8), torch.randint(3, (14,)))
    for told in ({"batches": DataLoader(data, 4, shuffle=True)}, {"batch_fn": DataLoader(data, 4)}):
        workload = made(**{"batch_fn": None, **told}, loss_fn=lambda model, batch: error_of(model, *batch), num_batches=9)
        assert workload.remarks() == [
            "4 batches in place of num_batches=9: there are no more",
            "batch 3 has 2 samples in place of 4 and is left out, as with drop_last=True",
        ]
        assert (workload.batch_size, workload.pool_batches, workload.max_length) == (4, 3, 1)


def graphs(number: int) -> dict[str, Tensor]:
    nodes, edges = (7, 9, 12, 8)[number], (20, 31, 25, 28)[number]
    graph = torch.arange(nodes) * 3 // nodes
    return {
        "x": torch.randn(nodes, 8),
        "edge_index": torch.randint(nodes, (2, edges)),
        "graph": graph,
        "y": torch.randint(3, (3,)),
    }


def test_a_number_of_a_graph_that_changes_is_not_taken_from_the_first_batch() -> None:
    def counted(number: int) -> Graph:
        return Graph(**(found := graphs(number)), num_graphs=3, num_nodes=len(found["x"]))

    with pytest.raises(
        WorkloadError, match="'num_nodes' as int, once 7 and once 9; make it a tensor if the step computes with it"
    ):
        made(counted, lambda model, batch: model(batch.x).mean()).remarks()
    tensors, structure = flatten(counted(0))
    assert structure is not None
    assert rebuild(structure, tensors).num_graphs == 3


def test_the_two_rows_of_edges_are_no_samples() -> None:
    def nodes(number: int) -> dict[str, Tensor]:
        return {"x": torch.randn(9 + number, 4), "edge_index": torch.zeros(2, 20 - number, dtype=torch.long)}

    assert find_batch_changes([nodes(number) for number in range(3)]).samples == 1


def test_texts_that_differ_are_left_out_and_that_is_said_unless_the_step_reads_them() -> None:
    def files(number: int) -> dict[str, Any]:
        samples = 2 if number == 2 else 4
        return {"x": torch.randn(samples, 3), "path": [f"{number}-{one}.png" for one in range(samples)], "split": "train"}

    def plain(model: nn.Module, batch: Any) -> Tensor:
        assert (batch["path"], batch["split"]) == (None, "train")
        return model(batch["x"]).square().mean()

    workload = WorkloadFromModel(lambda: nn.Linear(3, 1), files, plain, num_batches=3)()
    check_first_step(workload, has_gpu=False)
    assert workload.remarks() == [
        "path is a text that differs from batch to batch: the step gets None there",
        "batch 2 has 2 samples in place of 4 and is left out, as with drop_last=True",
    ]

    def read(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean() * len(batch["path"][0])

    with pytest.raises(WorkloadError, match=r"loss_fn.* failed at .*NoneType.*path is a text that differs"):
        check_first_step(WorkloadFromModel(lambda: nn.Linear(3, 1), files, read, num_batches=3)(), has_gpu=False)

    def chosen(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean() * {"0-0.png": 1, "1-0.png": 2}[batch["path"] and batch["path"][0]]

    with pytest.raises(WorkloadError, match=r"KeyError: None; .*path is a text .*make a workload of each kind of batch"):
        check_first_step(WorkloadFromModel(lambda: nn.Linear(3, 1), files, chosen, num_batches=3)(), has_gpu=False)


def test_bounds_of_samples_are_one_more_than_samples() -> None:
    def packed(number: int) -> dict[str, Tensor]:
        lengths = torch.tensor([2, 3 + number, 4])
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return {"cu_seqlens": bounds, "x": torch.randn(int(lengths.sum()), 8), "y": torch.randint(3, (3,))}

    assert made(packed, lambda model, batch: model(batch["x"]).mean()).batch_size == 3

    def with_targets_in_rows(number: int) -> dict[str, Tensor]:
        batch = packed(number)
        return {"cu_seqlens": batch["cu_seqlens"], "x": batch["x"], "labels": torch.randint(3, batch["x"].shape[:1])}

    assert made(with_targets_in_rows, lambda model, batch: model(batch["x"]).mean()).batch_size == 3


def test_why_places_in_a_tuple_are_not_padded_does_not_read_as_numbers() -> None:
    def images(number: int) -> tuple[Tensor, Tensor]:
        height, width = ((4, 6), (6, 4), (5, 5))[number]
        return torch.randn(2, 3, height, width), torch.randint(3, (2, height, width))

    workload = WorkloadFromModel(lambda: nn.Conv2d(3, 3, 1), images, lambda model, batch: model(batch[0]).mean(), num_batches=3)()
    assert workload.unpadded_reason == "two dimensions of '0' and '1' change apart"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])) + x).relu()
        found: Tensor = self.head(x.new_zeros(3, 8).index_add(0, graph, x))
        return found


def of_graphs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"], batch["edge_index"], batch["graph"]), batch["y"])


@pytest.mark.slow
@pytest.mark.parametrize("told", [{}, {"dynamic": {"x": (0,), "edge_index": (1,), "graph": (0,)}}])
def test_graphs_have_two_lengths_that_vary_apart_and_are_never_padded(told: dict[str, Any]) -> None:
    workload = made(graphs, of_graphs, Convolutions, **told)
    assert (workload.batch_size, workload.pads) == (3, False)
    assert workload.dynamic_dims("") == {"x": (0,), "graph": (0,), "edge_index": (1,)}
    assert workload.dynamic_dims("model.layers.0") == {"input": (0,)}
    found = measure(prepare(workload, CompileSettings.parse("scope=full,backend=aot_eager,dynamic=mark"), CPU), protocol=SHORT)
    assert (found.numerics["status"], found.graphs) == ("ok", 1)


def test_images_of_two_sizes_are_not_padded_unless_somebody_says_so() -> None:
    def images(number: int) -> dict[str, Tensor]:
        return {"image": torch.randn(2, 3, (8, 16, 8, 24)[number], (8, 8, 16, 16)[number]), "kind": torch.tensor([0, 1])}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["image"]).mean((2, 3)), batch["kind"])

    workload = made(images, loss, lambda: nn.Conv2d(3, 3, 3))
    assert workload.unpadded_reason == "two dimensions of image change apart"
    assert workload.dynamic_dims("") == {"image": (2, 3)}
    assert made(images, loss, lambda: nn.Conv2d(3, 3, 3), pad_with={"image": 0}).pads
    assert made(images, loss, lambda: nn.Conv2d(3, 3, 3), dynamic={"image": (2, 3)}).pads


def test_boxes_in_lists_keep_their_numbers() -> None:
    def scenes(number: int) -> Any:
        return torch.randn(2, 3, 8, 8), [{"boxes": torch.rand(1 + (number + one) % 3, 4)} for one in range(2)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, targets = batch
        return (model(images).mean() - torch.cat([target["boxes"] for target in targets])).square().mean()

    workload = made(scenes, loss, lambda: nn.Conv2d(3, 3, 3))
    assert (workload.batch_size, workload.pads) == (2, False)
    assert workload.dynamic_dims("") == {"1.0.boxes": (0,), "1.1.boxes": (0,)}


def test_jagged_tensors_are_put_together_again() -> None:
    def texts(number: int) -> dict[str, Tensor]:
        parts = [torch.randint(9, (2 + (number + one) % 4,)) for one in range(3)]
        return {"ids": torch.nested.nested_tensor(parts, layout=torch.jagged), "kind": torch.tensor([0, 1, 0])}

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.head(torch.nested.to_padded_tensor(self.words(ids), 0.0).sum(1))
            return found

    workload = made(texts, lambda model, batch: functional.cross_entropy(model(batch["ids"]), batch["kind"]), Words)
    assert (workload.batch_size, workload.dynamic_dims("")) == (3, {"ids.values": (0,)})
    batch = workload.pool(workload.shape_policy(CompileSettings.parse("scope=full,dynamic=auto")), rank=0, device=CPU)[1]
    assert bool(workload.build_model()(**batch.inputs).isfinite())


def pairs(number: int) -> dict[str, Tensor]:
    source, target = (9, 6, 12, 7)[number], (3, 6, 4, 2)[number]
    return {
        "source": torch.randint(1, 9, (2, source)),
        "mask": torch.ones(2, source),
        "target": torch.randint(1, 9, (2, target)),
    }


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        read = (self.words(source) * mask[..., None]).sum(1, keepdim=True)
        found: Tensor = self.head(read + self.words(target.clamp(min=0)))
        return found


def of_pairs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(**batch).mT, batch["target"], ignore_index=-7)


def test_source_and_target_have_lengths_of_their_own_and_buckets_are_of_pairs() -> None:
    workload = made(pairs, of_pairs, Translator)
    assert workload.dynamic_dims("") == {"source": (1,), "mask": (1,), "target": (1,)}
    assert workload.padding()["target"] == ((1,), -7)

    def shapes(spelled: str) -> list[tuple[int, int]]:
        batches = workload.pool(workload.shape_policy(CompileSettings.parse(spelled)), rank=0, device=CPU)
        return [(batch.inputs["source"].size(1), batch.inputs["target"].size(1)) for batch in batches]

    assert shapes("scope=full") == [(12, 6)] * 4
    # A target of 6 out of 6 needs the largest bucket, however short its source is.
    assert shapes("scope=full,dynamic=buckets,buckets=8/12") == [(12, 6), (12, 6), (12, 6), (8, 4)]
    longest = workload.pool(PadToLongest(max_length=12, multiple=2), rank=0, device=CPU)
    assert [(one.inputs["source"].size(1), one.inputs["target"].size(1)) for one in longest] == [(10, 4), (6, 6), (12, 4), (8, 2)]


def test_a_batch_function_that_takes_a_length_makes_the_batches_that_warm_one_up() -> None:
    def speech(number: int, length: int | None = None) -> dict[str, Tensor]:
        frames = length or (9, 5, 12, 7)[number]
        return {"x": torch.randn(2, frames, 8), "frames": torch.full((2,), frames)}

    workload = made(speech, lambda model, batch: model(batch["x"]).square().mean())
    batch = workload.batch_of_length(8, rank=0, device=CPU)
    assert (batch.inputs["x"].size(1), batch.inputs["frames"].tolist()) == (8, [8, 8])
    without = made(lambda number: speech(number), lambda model, batch: model(batch["x"]).square().mean())
    batch = without.batch_of_length(8, rank=0, device=CPU)  # the longest batch that fits, padded
    assert (batch.inputs["x"].size(1), batch.inputs["frames"].tolist()) == (8, [7, 7])
    shortest = without.batch_of_length(3, rank=0, device=CPU)  # none is cut
    assert (shortest.length, shortest.inputs["frames"].tolist()) == (5, [5, 5])


def test_time_comes_first_where_somebody_says_so() -> None:
    def series(number: int) -> dict[str, Tensor]:
        return {name: torch.randn((6, 9, 7, 5)[number], 3, 8) for name in ("x", "y")}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).mean() - batch["y"].mean()).square()

    with pytest.raises(WorkloadError, match=r"say so with dynamic=\{'x': \(0,\), 'y': \(0,\)\}$"):
        made(series, loss)
    workload = made(series, loss, dynamic={"x": (0,), "y": (0,)})
    assert (workload.batch_size, workload.max_length, workload.pads) == (3, 9, False)
    batch = workload.pool(workload.shape_policy(CompileSettings.parse("scope=eager,padding=longest")), rank=0, device=CPU)[1]
    assert (batch.tokens, batch.length) == (27, 9)


def test_time_comes_first_where_samples_can_change_places_along_the_second_dimension() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, dropout=0.5, num_layers=2), nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.head(self.rnn(self.embed(ids))[0])
            return found

    def series(number: int) -> dict[str, Tensor]:
        return {name: torch.randint(20, ((6, 9, 7, 5)[number], 3)) for name in ("ids", "tags")}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["tags"].flatten())

    workload = WorkloadFromModel(Tagger, series, loss, num_batches=4)()
    assert (workload.batch_size, workload.max_length, workload.batch_changes.length) == (3, 9, {"ids": (0,), "tags": (0,)})
    assert workload.remarks() == ["the first dimension is the length: samples can change places along the second"]
    with pytest.raises(WorkloadError, match="samples cannot be timed together; leave odd ones out"):
        WorkloadFromModel(lambda: nn.Linear(3, 3), lambda n: {"x": torch.randn(5 + n, 3)}, lambda m, b: m(b["x"]).mean())()


def test_rows_of_several_lengths_in_a_plain_list_are_the_samples() -> None:
    rows = [flatten([torch.zeros(2 + row % 3 + number) for row in range(8)])[0] for number in range(3)]
    pair = [flatten((torch.zeros(6 + number), torch.zeros(4 + number)))[0] for number in range(3)]
    columns = flatten([torch.zeros(6)] * 3)[0]
    assert [find_batch_changes(batches).samples for batches in (rows, pair, [columns, columns])] == [8, 1, 6]
    assert find_batch_changes([columns, flatten([torch.zeros(5), torch.zeros(6), torch.zeros(6)])[0]]).samples == 3


def test_equal_rows_in_a_plain_list_are_the_samples_and_columns_are_not() -> None:
    def of_rows(model: nn.Module, batch: list[Tensor]) -> Tensor:
        scale = torch.arange(batch[0].size(0))
        return (model(torch.stack(batch)[..., None])[..., 0] * scale).square().mean()

    def of_columns(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(torch.stack(batch, 1)[..., None])[..., 0] * torch.arange(len(batch))).square().mean()

    def found(loss: Any, size: Callable[[int], int]) -> Any:
        workload = WorkloadFromModel(
            lambda: nn.Linear(1, 1), lambda number: [torch.randn(size(number)) for _ in range(4)], loss
        )()
        return workload.batch_size, workload.min_length, workload.max_length, workload.unpadded_reason is None

    assert found(of_rows, lambda number: 5) == (4, 1, 1, True)
    assert found(of_rows, lambda number: 5 + number % 3) == (4, 5, 7, False)
    assert found(of_columns, lambda number: 6) == (6, 1, 1, True)


def test_a_first_dimension_that_is_told_to_be_the_length_does_not_count_samples_even_if_it_is_always_the_same() -> None:
    batches = [{"ids": torch.zeros(16, 4, dtype=torch.long), "targets": torch.zeros(16, 4, dtype=torch.long)}] * 2
    told = find_batch_changes(batches, {"ids": (0,), "targets": (0,)})
    assert (find_batch_changes(batches).samples, told.samples, told.lengths) == (16, 4, [16, 16])


def test_batches_of_as_many_tokens_are_used_as_they_come_once_that_is_told() -> None:
    def tokens(number: int) -> dict[str, Tensor]:
        samples = (4, 8, 2)[number]
        return {"x": torch.randn(samples, 32 // samples, 8), "y": torch.randint(3, (samples, 32 // samples))}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return error_of(model, batch["x"].flatten(0, 1), batch["y"].flatten())

    with pytest.raises(WorkloadError, match=r"as many tokens instead, say so with dynamic=\{'x': \(0,\), 'y': \(0,\)\}"):
        made(tokens, loss, num_batches=3)
    workload = made(tokens, loss, num_batches=3, dynamic={"x": (0,), "y": (0,)})
    assert not workload.pads
    assert workload.batch_changes.dims == {"x": (0, 1), "y": (0, 1)}


def test_samples_of_a_batch_of_lists_are_their_members() -> None:
    def pictures(number: int) -> dict[str, Tensor]:
        boxes = [{"boxes": torch.zeros(1 + number, 4), "label": torch.tensor(1)} for _ in range(2)]
        return flatten(([torch.zeros(3, 8, 8 + number) for _ in range(2)], boxes))[0]

    pairs = flatten(((torch.zeros(4, 8), torch.zeros(4, 8)), (torch.zeros(4), torch.zeros(4))))[0]
    assert find_batch_changes([pictures(number) for number in range(3)]).samples == 2
    assert find_batch_changes([pairs, pairs]).samples == 4


def test_samples_of_lists_of_tokens_and_tags_of_several_lengths_are_their_members() -> None:
    def texts(number: int) -> dict[str, Tensor]:
        rows = [torch.zeros(5 + (number + one) % 3) for one in range(4)]
        return flatten({"tokens": rows, "tags": list(rows), "names": ["a", "b", "c", "d"]})[0]

    assert find_batch_changes([texts(number) for number in range(3)]).samples == 4


class Split(enum.Enum):
    TRAIN = enum.auto()
    TEST = enum.auto()


def test_enums_and_equal_lists_of_numbers_stay_what_they_are() -> None:
    def batch(number: int) -> dict[str, Any]:
        return {"x": torch.randn(2, 3), "split": Split.TRAIN, "info": {"size": (32, 16)}, "number": [number]}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        assert batch["split"] is Split.TRAIN
        assert batch["info"]["size"] == (32, 16)
        return model(batch["x"]).mean()

    with pytest.raises(WorkloadError, match=r"'number' as a list of numbers, which differ from batch to batch; use torch.tensor"):
        check_first_step(made(batch, loss, lambda: nn.Linear(3, 1)), has_gpu=False)
    check_first_step(made(lambda number: {**batch(number), "number": [1]}, loss, lambda: nn.Linear(3, 1)), has_gpu=False)


class Masked(nn.Module):
    """Sums embeddings where a mask says so, or all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        words = self.words(ids)
        return self.head(words.mean(1) if mask is None else (words * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))


def some_masked(*lengths: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(number: int) -> dict[str, Tensor]:
        ids = torch.randint(9, (4, lengths[number % len(lengths)]))
        mask = {"mask": (torch.rand(ids.shape) < 0.7).float().index_fill(1, torch.tensor([0]), 1)} if number % 2 else {}
        return {"ids": ids, **mask, "y": torch.randint(3, (4,))}

    return batch


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return error_of_masked(model, batch["ids"], batch.get("mask"), batch["y"])


def error_of_masked(model: nn.Module, ids: Tensor, mask: Tensor | None, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids, mask), y)


def triple_of(number: int) -> tuple[Tensor, Tensor | None, Tensor]:
    batch = some_masked(5)(number)
    return batch["ids"], batch.get("mask"), batch["y"]


FORMS_OF_KINDS: dict[str, tuple[Any, Any]] = {
    "left out": (some_masked(5), masked_loss),
    "None": (lambda number: {"mask": None, **some_masked(5)(number)}, masked_loss),
    "None in a tuple": (triple_of, lambda model, batch: error_of_masked(model, *batch)),
    "in a dictionary of its own": (
        lambda number: {"inputs": {"ids": (made := some_masked(5)(number)).pop("ids")}, **made},
        lambda model, batch: error_of_masked(model, batch["inputs"]["ids"], batch.get("mask"), batch["y"]),
    ),
}


@pytest.mark.parametrize("form", FORMS_OF_KINDS)
def test_a_mask_in_some_batches_only_makes_two_kinds_with_a_graph_each(form: str) -> None:
    batch_fn, loss_fn = FORMS_OF_KINDS[form]
    check_first_step(workload := made(batch_fn, loss_fn, Masked), has_gpu=False)
    assert (workload.batch_size, workload.has_one_shape) == (4, True)
    name = "1" if form == "None in a tuple" else "mask"
    said = f"batches are of 2 kinds, 2 with '{name}', 2 without: each kind has graphs of its own and is warmed up"
    assert workload.remarks() == [said]
    found = measure(prepare(workload, CompileSettings.parse("scope=full,backend=eager"), CPU), protocol=SHORT)
    assert (found.graphs, found.graph_break_reasons, found.numerics["status"]) == (2, [], "ok")
    assert "put the tensor into all of them" in list(short_findings(found.to_dict()))[-1]


def test_both_kinds_are_padded_and_warmed_up_at_each_length() -> None:
    workload = made(some_masked(3, 4, 9, 3), masked_loss, Masked)
    assert workload.batch_changes.length == {"ids": (1,), "mask": (1,)}
    assert workload.dynamic_dims("model") == {"ids": (1,), "mask": (1,)}
    batches = workload.batches_of_length(9, rank=0, device=CPU)
    assert [{name: tuple(one.shape) for name, one in batch.inputs.items()} for batch in batches] == [
        {"ids": (4, 9), "y": (4,)},
        {"ids": (4, 9), "mask": (4, 9), "y": (4,)},
    ]
    prepared = prepare(workload, CompileSettings.parse("scope=full,dynamic=buckets,buckets=5/9,backend=eager"), CPU)
    pool = workload.pool(prepared.policy, rank=0, device=CPU)
    warm = warm_up_batches(prepared, pool, rank=0, protocol=Protocol(compared_steps=0, visits=1))
    assert [(batch.length, "mask" in batch.inputs) for batch in warm] == [(5, False), (5, True), (9, False), (9, True)]
    assert warm[-1].inputs["mask"][:, 4:].eq(0).all()
    with pytest.raises(WorkloadError, match="or put 'mask', which this batch lacks, into all of them, a mask of ones"):
        checked_padding(workload, has_gpu=False)


def test_a_kind_whose_loss_fails_is_named() -> None:
    some = lambda number: {"x": rows()[0]} if number else dict(zip("xy", rows(), strict=True))  # noqa: E731
    workload = made(some, lambda model, batch: error_of(model, **batch))
    with pytest.raises(WorkloadError, match=r"missing 1 required positional argument: 'y'; the batch has x \(4, 8\) float32"):
        check_first_step(workload, has_gpu=False)
