"""Texts of a script's batches that are padded to multiples of a length: the same training with fewer shapes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_sweep
from compile_sweep.script import session_results
from compile_sweep.script.apply.padding import Padder, why_not_padded
from compile_sweep.script.discover import Target
from tests.scripts.conftest import Run

AS_WRITTEN = "scope=eager,as_written=on"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "written", "outside"])
def test_a_script_trains_the_same_on_texts_of_few_lengths(run: Run, kind: str) -> None:
    losses, shapes = [], []
    for settings in (AS_WRITTEN, "scope=eager,pad_to_multiple_of=16", "scope=full,backend=aot_eager,pad_to_multiple_of=16"):
        session, error = run("texts.py", settings, kind)
        assert error is session.error is None
        assert session_results.model_facts(session)["can_pad"] is True
        script = vars(sys.modules["__main__"])
        if "scope=eager" in settings:  # compiled code calls no hooks
            watched = len(session.found.primary.shapes) + 2 * ("pad" in settings)  # two calls look at what padding changes
            widths = set(script["widths"][watched:])
            most = 48 if kind == "written" else 40  # at most as many as the model has positions
            assert (widths <= {16, 32, most}) is ("pad" in settings)
        shapes.append(len({shape for (_, shape) in session.times_met}))
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
        assert session.step_size()[1] % 16, "tokens are counted as the script has them"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert shapes[1] == shapes[2] < shapes[0] / 2


@pytest.mark.slow
def test_texts_of_one_length_are_not_padded(run: Run) -> None:
    session, error = run("texts.py", AS_WRITTEN, "frozen-shape")
    assert error is None
    assert session_results.model_facts(session)["can_pad"] is False
    session, error = run("texts.py", "scope=eager,pad_to_multiple_of=16", "frozen-shape")
    assert "input_ids that change in length" in str(session.error)


@pytest.mark.slow
def test_a_module_that_computes_something_else_for_padded_texts_is_refused(run: Run) -> None:
    session, error = run("texts.py", "scope=eager,pad_to_multiple_of=16", "averaged")
    assert error is None
    assert "pad_to_multiple_of changes what model computes, by " in str(session.error)


def called_with(*calls: dict[str, tuple[int, ...]]) -> Target:
    return Target(called=nn.Identity(), module=nn.Identity(), name="model", shapes=list(calls))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"input_ids": (4, 9), "attention_mask": (4, 9)}, {"input_ids": (4, 12), "attention_mask": (4, 12)}, None),
        ({"kwargs.input_ids": (4, 9), "kwargs.attention_mask": (4, 9)}, {"kwargs.input_ids": (2, 8)}, None),
        ({"input_ids": (4, 9)}, {"input_ids": (4, 12)}, "needs an attention_mask"),
        ({"x": (4, 9)}, {"x": (4, 12)}, "is not called with any"),
        (
            {"input_ids": (4, 9), "attention_mask": (4, 9), "start_positions": (4,)},
            {"input_ids": (4, 8), "attention_mask": (4, 8), "start_positions": (4,)},
            "looks for answers in padding too",
        ),
        (
            {"input_ids": (4, 9), "attention_mask": (4, 9), "bias": (4, 9, 9)},
            {"input_ids": (4, 8), "attention_mask": (4, 8), "bias": (4, 8, 8)},
            "cannot pad bias of model",
        ),
    ],
)
def test_what_cannot_be_padded_is_told_apart(
    first: dict[str, tuple[int, ...]], second: dict[str, tuple[int, ...]], reason: str | None
) -> None:
    found = why_not_padded(called_with(first, second))
    assert found is None if reason is None else reason in str(found)


class Model(nn.Module):
    """Returns what it is called with."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None, **others: Any) -> Any:
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **others}


IDS, MASK = torch.full((2, 5), 7), torch.ones(2, 5)


def padded(*args: Any, **kwargs: Any) -> Any:
    model = Model()
    return Padder(model, 8).around(model, applies=lambda: True)(*args, **kwargs)


def test_labels_get_what_losses_ignore_and_masks_get_zeros() -> None:
    found = padded(IDS, MASK, labels=IDS, token_type_ids=IDS)
    assert found["input_ids"].tolist() == found["token_type_ids"].tolist() == [[7] * 5 + [0] * 3] * 2
    assert found["attention_mask"].tolist() == [[1] * 5 + [0] * 3] * 2
    assert found["labels"].tolist() == [[7] * 5 + [-100] * 3] * 2


@pytest.mark.parametrize("labels", [torch.zeros(2, dtype=torch.long), torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.long)])
def test_labels_of_whole_texts_stay(labels: Tensor) -> None:
    assert padded(input_ids=IDS, attention_mask=MASK, labels=labels)["labels"] is labels


def test_calls_without_a_mask_stay() -> None:
    assert padded(IDS)["input_ids"] is IDS
    assert padded(IDS, MASK[:, :3])["input_ids"] is IDS


class Pairs(nn.Module):
    """Returns what it is called with, like a loss around a model that takes each text as a mapping."""

    def forward(self, features: Any, scores: Any = None) -> Any:
        return features, scores


def test_texts_in_mappings_and_lists_are_padded_and_those_of_the_script_stay() -> None:
    short, long = ({"input_ids": torch.ones(2, length).long(), "attention_mask": torch.ones(2, length)} for length in (5, 9))
    scores, model = torch.ones(2), Pairs()
    pads = Padder(model, 8)
    features, same = pads.around(model, applies=lambda: True)([short, long], scores=scores)
    assert [one["input_ids"].shape[1] for one in features] == [one["attention_mask"].shape[1] for one in features] == [8, 16]
    assert short["input_ids"].shape[1] == 5
    assert same is scores
    assert [one["input_ids"].shape for one in pads.without_values([[short, long]], {})[0][0]] == [(2, 8), (2, 16)]
    places = {f"features.{at}.{name}": (2, length) for at, length in ((0, 5), (1, 9)) for name in ("input_ids", "attention_mask")}
    assert why_not_padded(called_with(places, {name: (2, width + 1) for name, (_, width) in places.items()})) is None


def test_a_written_text_has_a_length_of_its_own() -> None:
    class Writer(nn.Module):
        config = SimpleNamespace(is_encoder_decoder=True, pad_token_id=3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
            rows = len(input_ids)
            encoded, written = torch.zeros(rows, input_ids.size(1), 2), torch.zeros(rows, labels.size(1), 2)
            return {"encoder_last_hidden_state": encoded, "logits": written, "ids": input_ids, "labels": labels}

    model = Writer()
    found = Padder(model, 8).around(model, applies=lambda: True)(IDS, MASK, labels=IDS[:, :3])
    assert found["ids"].tolist() == [[7] * 5 + [3] * 3] * 2
    assert found["labels"].tolist() == [[7] * 3 + [-100] * 5] * 2
    assert (found["encoder_last_hidden_state"].size(1), found["logits"].size(1)) == (5, 3)


def test_outputs_of_each_token_are_cut_and_others_stay() -> None:
    class Outputs(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            rows, columns = input_ids.shape
            hidden = torch.zeros(rows, columns, 3)
            whole = torch.zeros(rows, columns)  # as wide by chance
            heads = torch.zeros(rows, columns, 2, 2)
            found: dict[str, Any] = {"hidden_states": (hidden, hidden), "start_logits": whole, "pooler_output": whole}
            return {**found, "attentions": (heads,), "all": [hidden, whole]}

    model = Outputs()
    found = Padder(model, 8).around(model, applies=lambda: True)(IDS, attention_mask=MASK)
    assert [tuple(one.shape) for one in found["hidden_states"]] == [(2, 5, 3)] * 2
    assert found["start_logits"].shape == (2, 5)
    assert found["pooler_output"].shape == (2, 8)
    assert found["attentions"][0].shape == (2, 8, 2, 2)
    assert [tuple(one.shape) for one in found["all"]] == [(2, 5, 3), (2, 8)]


def test_a_winner_pads_in_training_only() -> None:
    model = nn.ModuleList([Model()])[0]
    model.weights = nn.Parameter(torch.ones(1))
    compile_sweep.apply(model, None, "scope=eager,pad_to_multiple_of=8")
    assert model(IDS, attention_mask=MASK)["input_ids"].shape == (2, 8)
    with torch.no_grad():
        assert model.eval()(IDS, attention_mask=MASK)["input_ids"].shape == (2, 5)
