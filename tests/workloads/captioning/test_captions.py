"""Captions and the batches made from them."""

from __future__ import annotations

import pytest
import torch

from compile_sweep.contract.base import Batch
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.shapes import PadToBuckets, PadToLongest, PadToMax, ShapePolicy
from workloads.captioning import Captioning
from workloads.captioning.captions import (
    END,
    FIRST_WORD,
    PAD,
    SOURCE_LENGTHS,
    START,
    TINY_LENGTHS,
    LengthDistribution,
    draw_captions,
)
from workloads.captioning.model import CAPTIONING_SIZES, IGNORED_TOKEN

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> Captioning:
    return Captioning("tiny", 0)


def captions_of(batch: Batch) -> list[list[int]]:
    """Returns the rows of a batch without their padding."""
    return [[token for token in row if token != IGNORED_TOKEN] for row in batch.inputs["labels"].tolist()]


def test_the_real_size_has_the_sources_lengths() -> None:
    assert CAPTIONING_SIZES["base"].lengths is SOURCE_LENGTHS
    assert SOURCE_LENGTHS.mean == pytest.approx(23.12)
    assert SOURCE_LENGTHS.max_length == 256


def test_drawn_lengths_follow_the_distribution() -> None:
    words = [len(caption) - 1 for caption in draw_captions(SOURCE_LENGTHS, 1024, 20_000, "0:0")]
    shares = [sum(low <= count <= high for count in words) / len(words) for low, high in SOURCE_LENGTHS.ranges]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(SOURCE_LENGTHS.weights, abs=0.01)
    assert 1 + sum(words) / len(words) == pytest.approx(SOURCE_LENGTHS.mean, abs=0.5)


@pytest.mark.parametrize("lengths", [SOURCE_LENGTHS, TINY_LENGTHS])
def test_captions_are_words_with_one_end(lengths: LengthDistribution) -> None:
    captions = draw_captions(lengths, 128, 2_000, "0:0")
    assert len(captions) == 2_000
    assert max(map(len, captions)) <= lengths.max_length
    for caption in captions:
        assert caption[-1] == END
        assert all(FIRST_WORD <= word < 128 for word in caption[:-1])


def test_a_seed_decides_the_captions() -> None:
    assert draw_captions(TINY_LENGTHS, 128, 50, "0:0") == draw_captions(TINY_LENGTHS, 128, 50, "0:0")
    assert draw_captions(TINY_LENGTHS, 128, 50, "0:0") != draw_captions(TINY_LENGTHS, 128, 50, "1:0")


@pytest.mark.parametrize(
    "policy",
    [PadToLongest(max_length=64), PadToLongest(max_length=64, multiple=8), PadToBuckets(buckets=(16, 32, 64))],
)
def test_every_policy_sees_the_same_captions_in_the_same_order(tiny: Captioning, policy: ShapePolicy) -> None:
    padded_to_max = tiny.pool(PadToMax(max_length=64), rank=0, device=CPU)
    padded_less = tiny.pool(policy, rank=0, device=CPU)
    assert list(map(captions_of, padded_less)) == list(map(captions_of, padded_to_max))
    assert sum(batch.length for batch in padded_less) < sum(batch.length for batch in padded_to_max)
    assert len(padded_less) == tiny.pool_batches
    for less, most in zip(padded_less, padded_to_max, strict=True):
        assert torch.equal(less.inputs["pixel_values"], most.inputs["pixel_values"])
        assert (less.samples, less.tokens) == (most.samples, most.tokens)


def test_another_workload_of_the_same_seed_has_the_same_batches(tiny: Captioning) -> None:
    policy = PadToLongest(max_length=64)
    again = Captioning("tiny", 0).pool(policy, rank=0, device=CPU)
    for one, other in zip(tiny.pool(policy, rank=0, device=CPU), again, strict=True):
        assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)


def test_workers_and_seeds_have_their_own_captions(tiny: Captioning) -> None:
    policy = PadToMax(max_length=64)
    mine = list(map(captions_of, tiny.pool(policy, rank=0, device=CPU)))
    assert mine != list(map(captions_of, tiny.pool(policy, rank=1, device=CPU)))
    assert mine != list(map(captions_of, Captioning("tiny", 1).pool(policy, rank=0, device=CPU)))


def test_a_batch_feeds_the_decoder_the_caption_one_step_late_and_hides_the_padding(tiny: Captioning) -> None:
    for batch in tiny.pool(PadToLongest(max_length=64, multiple=8), rank=0, device=CPU):
        inputs, mask, labels = (batch.inputs[name] for name in ("decoder_input_ids", "decoder_attention_mask", "labels"))
        assert inputs.shape == mask.shape == labels.shape == (batch.samples, batch.length)
        assert batch.samples == tiny.batch_size
        assert torch.equal(mask, labels != IGNORED_TOKEN)
        assert torch.equal(mask, inputs != PAD)
        assert batch.tokens == int(mask.sum())
        assert inputs[:, 0].eq(START).all()
        late = mask[:, 1:]
        assert torch.equal(inputs[:, 1:][late], labels[:, :-1][late])


@pytest.mark.parametrize("length", [1, 7, 8, 33, 64])
def test_a_batch_can_be_made_of_any_length(tiny: Captioning, length: int) -> None:
    batch = tiny.batch_of_length(length, rank=0, device=CPU)
    assert batch.length == length
    assert batch.inputs["labels"].shape == batch.inputs["decoder_input_ids"].shape == (tiny.batch_size, length)
    assert batch.inputs["labels"].ne(IGNORED_TOKEN).any(dim=1).all()
    assert batch.tokens == int(batch.inputs["labels"].ne(IGNORED_TOKEN).sum())


def test_every_length_of_a_policy_fits_the_workload(tiny: Captioning) -> None:
    for batch in tiny.pool(policy := PadToBuckets(buckets=(16, 32, 64)), rank=0, device=CPU):
        assert batch.length in policy.lengths()


def test_an_unknown_size_is_refused_with_the_sizes_there_are() -> None:
    with pytest.raises(WorkloadError, match=r"Captioning has no size 'huge'; use one of base, tiny"):
        Captioning("huge", 0)
