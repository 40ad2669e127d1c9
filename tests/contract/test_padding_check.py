"""Padding that changes the loss is refused with the tensor's name; padding that does not, or that the user chose, is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compile_sweep import WorkloadFromModel
from compile_sweep.contract.padding_check import check_padding, checked_padding
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToMax

CPU = torch.device("cpu")
LENGTHS = (12, 5, 9, 7)


class Causal(nn.Module):
    """A language model in which no position attends to a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.rnn(self.embed(ids))[0])
        return found


def next_tokens(number: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 20, (3, LENGTHS[number] + 1))
    return {"x": ids[:, :-1].clone(), "y": ids[:, 1:].clone()}


def cross_entropy(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = self.head(self.bags(ids, offsets)).squeeze(1)
        return found


def clicks(number: int) -> dict[str, Tensor]:
    offsets = torch.tensor([0, 2, 3])
    return {"ids": torch.randint(50, (LENGTHS[number],)), "offsets": offsets, "clicked": torch.tensor([0.0, 1.0, 1.0])}


def click_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch["ids"], batch["offsets"]), batch["clicked"])


class Pooled(nn.Module):
    """Averages over the positions in its mask."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        self.masks, self.drop, self.head = masks, nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = mask if self.masks else torch.ones_like(mask)
        found: Tensor = self.head(self.drop(x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True))
        return found


def images(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(3, LENGTHS[number], 4), "mask": torch.ones(3, LENGTHS[number])}


def mean_square(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["x"], batch["mask"]).square().mean()


def made(model: Callable[[], nn.Module], batches: Any, loss: Any, **told: Any) -> Any:
    return WorkloadFromModel(model, batches, loss, num_batches=len(LENGTHS), **told)()


def test_targets_are_known_by_the_index_that_their_loss_ignores_whatever_they_are_called() -> None:
    workload = made(Causal, next_tokens, cross_entropy)
    check_padding(workload, CPU)
    assert workload.padding_lines() == ["pads x along dimension 1 with 0", "pads y along dimension 1 with -100"]

    def own_index(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["x"]).mT, batch["y"], ignore_index=-1)

    other = made(Causal, next_tokens, own_index)
    check_padding(other, CPU)
    assert other.padding()["y"] == ((1,), -1)
    with pytest.raises(
        WorkloadError, match=r"batch 1, padded from length 5 to 12, .*lengths='real'.*pad_with=\{'x': 0, 'y': 0\}"
    ):
        check_padding(made(Causal, next_tokens, lambda model, batch: model(batch["x"]).square().mean() + batch["y"].sum()), CPU)


def test_a_padded_batch_that_fails_is_refused_before_a_trial_fails_with_it() -> None:
    def spoken(number: int) -> dict[str, Tensor]:
        durations = torch.full((2, LENGTHS[number]), 2)
        return {"x": torch.randn(2, LENGTHS[number], 4), "durations": durations, "heard": torch.randn(2, 2 * LENGTHS[number], 4)}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        rows = zip(model(batch["x"]), batch["durations"], strict=True)
        return (torch.stack([x.repeat_interleave(times, 0) for x, times in rows]) - batch["heard"]).square().mean()

    with pytest.raises(WorkloadError, match=r"batch 1, .* fails, .* RuntimeError: .*10.*24.* lengths='real'") as refused:
        check_padding(made(lambda: nn.Linear(4, 4), spoken, loss), CPU)
    assert "it pads x (dimension 1) with 0, durations (dimension 1) with 0, heard (dimension 1) with 0" in str(refused.value)
    assert "if the change is meant" not in str(refused.value)
    check_padding(made(lambda: nn.Linear(4, 4), spoken, loss, lengths="real"), CPU)


def test_padding_that_only_batch_statistics_see_is_refused() -> None:
    class Normed(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(4, 8), norm, nn.Linear(8, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = self.norm(self.first(x).flatten(0, 1)).unflatten(0, x.shape[:2])
            found: Tensor = self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
            return found

    with pytest.raises(WorkloadError, match="padding changes what this workload trains on"):
        check_padding(made(lambda: Normed(nn.BatchNorm1d(8)), images, mean_square), CPU)
    check_padding(made(lambda: Normed(nn.LayerNorm(8)), images, mean_square), CPU)


class InTraining(nn.Module):
    """Has an output more in training, so that its loss does not run in evaluation mode; and perhaps noise."""

    def __init__(self, rate: float, noise: float) -> None:
        super().__init__()
        self.layer, self.drop, self.drop_prob, self.noise = nn.Linear(4, 1), nn.Dropout(rate), rate, noise

    def forward(self, x: Tensor) -> Any:
        x = functional.dropout(x, self.drop_prob, self.training)
        y = self.layer(self.drop(x) + self.noise * torch.randn_like(x))
        return (y, y.mean()) if self.training else y


def test_a_model_is_compared_as_it_trains_and_where_chance_prevents_that_it_is_said() -> None:
    def both(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        y, average = model(batch["x"])
        return y.square().mean() + average

    def summed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        y, _ = model(batch["x"])
        return (y * batch["mask"][..., None]).square().sum()

    with pytest.raises(WorkloadError, match="padding changes what this workload trains on"):
        check_padding(made(lambda: InTraining(0.5, 0), images, both), CPU)
    assert check_padding(made(lambda: InTraining(0.5, 0), images, summed), CPU) is None
    said = check_padding(made(lambda: InTraining(0.0, 1), images, summed), CPU)
    assert said == "whether padding changes the loss is not known: the step draws random numbers even without dropout"
    workload = made(lambda: InTraining(0.0, 1), images, summed)
    assert checked_padding(workload, has_gpu=False) == [*workload.padding_lines(), said]


def test_ids_of_bags_are_not_padded_unless_somebody_says_with_what() -> None:
    workload = made(Clicks, clicks, click_loss)
    check_padding(workload, CPU)
    assert workload.unpadded_reason == "the first dimension of ids changes"
    policy = workload.shape_policy(CompileSettings.parse("scope=full,dynamic=auto"))
    assert [batch.inputs["ids"].size(0) for batch in workload.pool(policy, rank=0, device=CPU)] == list(LENGTHS)
    with pytest.raises(SettingsError, match=r"dynamic=static needs batches of few lengths, and batches .* are not padded"):
        workload.validate(CompileSettings.parse("scope=full"))
    told = made(Clicks, clicks, click_loss, pad_with={"ids": 0})
    assert told.pads
    assert told.pool(PadToMax(max_length=12), rank=0, device=CPU)[1].inputs["ids"].shape == (12,)

    def table(number: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(50, (3, LENGTHS[number])), "clicked": torch.ones(3)}

    def of_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch["ids"], None), batch["clicked"])

    assert "ids of an EmbeddingBag" in str(made(Clicks, table, of_rows).unpadded_reason)


@pytest.mark.parametrize("masks", [True, False])
def test_a_mask_decides_whether_padding_is_seen_and_dropout_does_not(masks: bool) -> None:
    workload = made(lambda: Pooled(masks=masks), images, mean_square)
    if masks:
        check_padding(workload, CPU)
        return
    with pytest.raises(WorkloadError, match="padding changes what this workload trains on"):
        check_padding(workload, CPU)


def test_a_batch_whose_mask_is_unlike_the_shortest_ones_is_compared_too() -> None:
    class Net(Pooled):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.masks = bool(mask[0, :5].all())
            return super().forward(x, mask)

    def batches(number: int) -> dict[str, Tensor]:
        mask = torch.ones(3, LENGTHS[number], dtype=torch.long)
        mask[0, 3:5] = int(number != 3)
        return {"x": torch.randn(3, LENGTHS[number], 4), "mask": mask}

    with pytest.raises(WorkloadError, match="changes what this workload trains on: batch 3, padded from length 7 to 12"):
        check_padding(made(lambda: Net(masks=True), batches, mean_square), CPU)


def test_a_batch_of_middle_length_is_compared_where_masks_are_alike() -> None:
    class Net(Pooled):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.masks = int(mask[0].sum()) == LENGTHS[1]
            return super().forward(x, mask)

    with pytest.raises(WorkloadError, match="batch 2, padded from length 9 to 12"):
        check_padding(made(lambda: Net(masks=True), images, mean_square), CPU)


def test_who_says_what_to_pad_with_has_decided() -> None:
    check_padding(made(lambda: Pooled(masks=False), images, mean_square, pad_with={"x": 0, "mask": 0}), CPU)


def test_a_warm_up_batch_is_a_real_one_that_is_padded_so_what_it_says_of_itself_stays_true() -> None:
    def lengths(number: int) -> dict[str, Tensor]:
        rows = LENGTHS[number]
        return {"x": torch.randn(3, rows, 4), "mask": torch.ones(3, rows), "longest": torch.full((3,), rows)}

    workload = made(lambda: Pooled(masks=True), lengths, mean_square)
    for length in range(workload.min_length, workload.max_length + 1):
        batch = workload.batch_of_length(length, rank=0, device=CPU)
        assert batch.inputs["x"].shape == (3, length, 4)
        assert int(batch.inputs["longest"][0]) == max(found for found in LENGTHS if found <= length)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_dimensions_of_blocks_are_found_where_the_loss_takes_a_gradient() -> None:
    def energy_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        positions = batch["pos"].requires_grad_()
        (force,) = torch.autograd.grad(model(positions), positions, create_graph=True)
        return force.square().mean()

    workload = made(Layered, lambda number: {"pos": torch.randn(2, LENGTHS[number], 3)}, energy_loss)
    assert workload.dynamic_dims("model.layers.0") == {"input": (1,)}


def test_an_argument_that_a_full_mask_leaves_out_is_found() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            found: Tensor = self.linear(x if mask is None else x * mask[..., None])
            return found

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            used = None if bool(mask.all()) else mask
            for layer in self.layers:
                x = layer(x, used)
            return x.square().sum()

    def batches(number: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, LENGTHS[number], 3), "mask": torch.ones(2, LENGTHS[number])}

    workload = made(Net, batches, lambda model, batch: model(**batch))
    assert workload.dynamic_dims("model.layers.0") == {"x": (1,), "mask": (1,)}


class Attends(nn.Module):
    """Averages over positions by a softmax of scores, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        weight = (self.score(x)[..., 0] + bias).softmax(-1)
        found: Tensor = self.head((weight[..., None] * x).sum(1))
        return found


def masked(number: int) -> dict[str, Tensor]:
    left_out = torch.arange(LENGTHS[number]) >= torch.tensor([[LENGTHS[number]], [3], [2]])
    return {"x": torch.randn(3, LENGTHS[number], 4), "left_out": left_out, "y": torch.tensor([0, 1, 1])}


def attention_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    bias = batch["bias"] if "bias" in batch else torch.where(batch["left_out"].bool(), float("-inf"), 0.0)
    return functional.cross_entropy(model(batch["x"], bias), batch["y"])


def added(number: int) -> dict[str, Tensor]:
    batch = masked(number)
    return {"x": batch["x"], "bias": torch.where(batch["left_out"], float("-inf"), 0.0), "y": batch["y"]}


def added_in_the_last(number: int) -> dict[str, Tensor]:
    batch = added(number)
    return batch if number == 0 else batch | {"bias": torch.zeros(3, LENGTHS[number])}


def added_in_none(number: int) -> dict[str, Tensor]:
    return added(number) | {"bias": torch.zeros(3, LENGTHS[number])}


class MeanOfKnownIds(nn.Module):
    """Leaves out the ID that its table of embeddings names as padding, which is not 0."""

    def __init__(self, *, pad_id: int, told: bool) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.embed, self.head = nn.Embedding(20, 8, padding_idx=pad_id if told else None), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        known = (ids != self.pad_id).unsqueeze(-1)
        found: Tensor = self.head((self.embed(ids) * known).sum(1) / known.sum(1))
        return found


def texts(number: int, *, pad_id: int, shorter: bool) -> dict[str, Tensor]:
    ids = torch.randint(4, 20, (3, LENGTHS[number]))
    if shorter:
        ids[1, 3:] = pad_id
    return {"ids": ids, "y": torch.tensor([0, 1, 1])}


def text_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["ids"]), batch["y"])


def whole(number: int) -> dict[str, Tensor]:
    batch = masked(number)
    return batch | {"left_out": batch["left_out"].long()}


def missing(number: int) -> dict[str, Tensor]:
    x = torch.randn(3, LENGTHS[number], 4)
    return {"x": x, "y": torch.where(torch.rand(3, LENGTHS[number]) < 0.3, float("nan"), x[..., 0])}


def loss_of_known(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    known = ~batch["y"].isnan()
    found = model(batch["x"])[..., 0]
    return (found[known] - batch["y"][known]).square().mean()


class MeanOfOwnText(nn.Module):
    """Averages over the positions of each text of a row that holds several."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        same = (text[:, :, None] == text[:, None, :]).float()
        found: Tensor = self.head(same @ x / same.sum(-1, keepdim=True))
        return found


def packed(number: int) -> dict[str, Tensor]:
    text = (torch.arange(LENGTHS[number]) > 2).long().expand(3, -1).clone()
    return {"x": torch.randn(3, LENGTHS[number], 4), "text": text, "y": torch.randint(0, 2, text.shape)}


def packed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"], batch["text"]).flatten(0, 1), batch["y"].flatten())


def marked_as_unknown(number: int) -> dict[str, Tensor]:
    batch = missing(number)
    return batch | {"y": batch["y"].nan_to_num(-1)}


def loss_of_marked(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    known = batch["y"] != -1
    return functional.mse_loss(model(batch["x"])[..., 0][known], batch["y"][known])


@pytest.mark.parametrize(
    ("model", "batches", "loss", "written"),
    [
        (Attends, masked, attention_loss, {"left_out": 1}),
        (Attends, whole, attention_loss, {"left_out": 1}),
        (Attends, added, attention_loss, {"bias": float("-inf")}),
        (Attends, added_in_the_last, attention_loss, {"bias": float("-inf")}),
        (Attends, added_in_none, attention_loss, {"bias": float("-inf")}),
        (lambda: nn.Linear(4, 1), missing, loss_of_known, {"y": float("nan")}),
        (lambda: nn.Linear(4, 1), marked_as_unknown, loss_of_marked, {"y": -1}),
        (MeanOfOwnText, packed, packed_loss, {"text": -100}),
        (partial(MeanOfKnownIds, pad_id=1, told=True), partial(texts, pad_id=1, shorter=False), text_loss, {"ids": 1}),
        (partial(MeanOfKnownIds, pad_id=3, told=False), partial(texts, pad_id=3, shorter=True), text_loss, {"ids": 3}),
    ],
    ids=[
        "True is left out",
        "1 is left out",
        "added to scores",
        "added to scores of one batch only",
        "zeros added to scores of every batch",
        "nan is unknown",
        "-1 is unknown",
        "a text of its own",
        "the embedding's padding_idx",
        "what rows of the batches end with",
    ],
)
def test_a_value_that_leaves_the_loss_as_it_is_is_what_to_write(model: Any, batches: Any, loss: Any, written: Any) -> None:
    with pytest.raises(WorkloadError, match=r"write pad_with=(\{.*?\}), which leaves loss and gradients as they are") as caught:
        check_padding(made(model, batches, loss), CPU)
    assert str(written).replace(": -inf", ": float('-inf')").replace(": nan", ": float('nan')") in str(caught.value)
    check_padding(made(model, batches, loss, pad_with=written), CPU)


class SeesPaddingFaintly(nn.Module):
    """Has a loss, and a norm of its gradients, that padding changes by less than a thousandth."""

    def __init__(self, *, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.sums, self.mean = nn.Linear(4, 1), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.sums(x.sum(1)).sum() + self.weight * (x.mean(1) @ self.mean).sum()
        return found


def test_padding_that_changes_few_of_the_gradients_is_refused() -> None:
    def batches(number: int) -> dict[str, Tensor]:
        return {"x": 1 + torch.rand(2, LENGTHS[number], 4)}

    assert check_padding(made(lambda: SeesPaddingFaintly(weight=0), batches, lambda model, batch: model(**batch)), CPU) is None
    with pytest.raises(WorkloadError, match=r"has gradients that are 0\.\d+% off; it pads x"):
        check_padding(made(lambda: SeesPaddingFaintly(weight=0.02), batches, lambda model, batch: model(**batch)), CPU)


def test_a_model_that_takes_a_mask_which_batches_lack_is_given_one() -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

        def forward(self, input_ids: Tensor, y: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            known = (self.embed(input_ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return functional.cross_entropy(self.head(known), y)

    def batches(number: int, *, masked: bool) -> dict[str, Tensor]:
        ids = torch.randint(1, 20, (3, LENGTHS[number]))
        mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
        return {"input_ids": ids, "y": torch.tensor([0, 1, 1]), **mask}

    with pytest.raises(WorkloadError, match="or put 'attention_mask' into the batches, 1 where a row has a token"):
        check_padding(made(Averages, partial(batches, masked=False), None), CPU)
    assert check_padding(made(Averages, partial(batches, masked=True), None), CPU) is None


def test_labels_that_are_the_tensor_of_the_ids_are_labels_all_the_same() -> None:
    def tokens(number: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 20, (3, LENGTHS[number]))
        return {"x": ids, "y": ids}

    workload = made(Causal, tokens, cross_entropy)
    check_padding(workload, CPU)
    assert workload.padding() == {"x": ((1,), 0), "y": ((1,), -100)}


def pair_of_answers(number: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = {}
    for name, length in (("chosen", LENGTHS[number]), ("rejected", LENGTHS[-number - 1])):
        ids = torch.randint(1, 20, (3, length))
        batch |= {f"{name}_ids": ids, f"{name}_answer": torch.where(torch.arange(length) < 3, -100, ids)}
    return batch


def preference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compares the log-probabilities of two answers, as in direct preference optimization."""

    def log_probability(name: str) -> Tensor:
        targets = batch[f"{name}_answer"][:, 1:].clone()
        counts = targets != -100
        targets[targets == -100] = 0
        logits = model(batch[f"{name}_ids"])[:, :-1]
        return (logits.log_softmax(-1).gather(2, targets[:, :, None]).squeeze(2) * counts).sum(1)

    return -functional.logsigmoid(log_probability("chosen") - log_probability("rejected")).mean()


def test_targets_that_a_loss_gathers_are_padded_with_the_index_that_they_hold() -> None:
    workload = made(Causal, pair_of_answers, preference_loss)
    assert workload.pads
    check_padding(workload, CPU)
    assert {name: value for name, (_, value) in workload.padding().items()} == {
        "chosen_ids": 0,
        "chosen_answer": -100,
        "rejected_ids": 0,
        "rejected_answer": -100,
    }


class Transducer(nn.Module):
    """Reads its targets after a first token, as transducers and decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, targets: Tensor) -> Tensor:
        return self.words(functional.pad(targets, (1, 0)))


def test_targets_that_a_model_reads_are_padded_with_ids_and_0_is_tried_where_another_value_fails() -> None:
    def words(number: int) -> dict[str, Tensor]:
        return {"targets": torch.randint(1, 9, (3, 4 + number)), "lengths": torch.full((3,), 4 + number)}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        known = torch.arange(batch["targets"].size(1) + 1) < batch["lengths"][:, None]
        return (model(batch["targets"]).square().mean(-1) * known).sum() / known.sum()

    assert made(Transducer, words, loss).padding() == {"targets": ((1,), 0)}

    def read_otherwise(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return loss(model, {**batch, "targets": batch["targets"] * 1})

    with pytest.raises(WorkloadError, match=r"write pad_with=\{'targets': 0\}, which leaves loss and gradients as they are"):
        check_padding(made(Transducer, words, read_otherwise), CPU)


def test_places_in_a_tuple_are_quoted_so_that_they_do_not_read_as_dimensions() -> None:
    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model, dict(zip("xy", pair, strict=True)))

    workload = made(Causal, lambda number: tuple(next_tokens(number).values()), loss)
    assert workload.padding_lines() == ["pads '0' along dimension 1 with 0", "pads '1' along dimension 1 with -100"]


def marked_frames(number: int) -> dict[str, Tensor]:
    x = torch.rand(3, LENGTHS[number], 4)
    return {"x": x, "y": x.masked_fill(torch.arange(LENGTHS[number])[:, None] > 4, -100)}


class DrawsInEvaluationToo(nn.Linear):
    """Has a rate of dropout in its configuration alone, and draws in evaluation mode, too."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(4, 4)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, self.config.input_dropout, training=True))


def loss_of_frames(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    known = batch["y"] != -100
    return ((model(batch["x"]) - batch["y"]) * known).abs().sum() / known.sum()


def test_targets_that_are_not_integers_are_padded_with_the_mark_that_they_hold_too() -> None:
    workload = made(lambda: nn.Linear(4, 4), marked_frames, loss_of_frames)
    assert check_padding(workload, CPU) is None
    assert workload.padding() == {"x": ((1,), 0), "y": ((1,), -100)}


def test_rates_of_dropout_in_a_shared_configuration_are_set_to_0_for_the_check_alone() -> None:
    config = SimpleNamespace(input_dropout=0.5)
    assert check_padding(made(lambda: DrawsInEvaluationToo(config), marked_frames, loss_of_frames), CPU) is None
    assert config.input_dropout == 0.5


def test_values_to_write_suit_each_batch_that_is_compared() -> None:
    def pairs(number: int) -> dict[str, Tensor]:  # the shortest first text comes with the longest second one
        first, second = (texts(at % 4, pad_id=3, shorter=True) for at in (number, number + 3))
        return {"first": first["ids"], "second": second["ids"], "y": first["y"]}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["first"]) + model(batch["second"]), batch["y"])

    with pytest.raises(WorkloadError, match=r"write pad_with=\{'first': 3, 'second': 3\}, which leaves loss"):
        check_padding(made(partial(MeanOfKnownIds, pad_id=3, told=False), pairs, loss), CPU)
