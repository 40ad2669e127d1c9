"""Captions as tensors, and the input pipeline that a training job would have: worker processes make images and batches."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compile_sweep.contract.base import Batch
from compile_sweep.schema.shapes import ShapePolicy
from workloads.captioning.captions import PAD, START
from workloads.captioning.model import IGNORED_TOKEN

MAX_LOADER_WORKERS = 12  # as many as the source's loader has; fewer if the process may use fewer cores


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionTensors:
    """The padded captions of a batch."""

    decoder_input_ids: Tensor  # (batch, length), the labels shifted right by the start token
    labels: Tensor  # (batch, length), `IGNORED` where padded
    length: int
    tokens: int

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward, except the pixels."""
        return {
            "decoder_input_ids": self.decoder_input_ids,
            "decoder_attention_mask": self.decoder_input_ids != PAD,
            "labels": self.labels,
        }


def caption_tensors(captions: Sequence[Sequence[int]], length: int) -> CaptionTensors:
    """Returns the captions padded to `length` tokens, on the CPU."""
    labels = torch.full((len(captions), length), IGNORED_TOKEN, dtype=torch.long)
    inputs = torch.full((len(captions), length), PAD, dtype=torch.long)
    for row, caption in enumerate(captions):
        ids = torch.tensor(caption)
        labels[row, : len(ids)] = ids
        inputs[row, : len(ids)] = torch.cat([torch.tensor([START]), ids[:-1]])
    return CaptionTensors(decoder_input_ids=inputs, labels=labels, length=length, tokens=sum(map(len, captions)))


class _Captions(Dataset[tuple[Tensor, list[int]]]):
    """Noise images, made on demand, with their captions."""

    def __init__(self, captions: Sequence[list[int]], image_pixels: int) -> None:
        self._captions, self._shape = captions, (3, image_pixels, image_pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, list[int]]:
        return torch.randn(self._shape), self._captions[index]


@dataclass(frozen=True, slots=True)
class _Endless:
    """Repeats the batches of a pass endlessly."""

    batches: list[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.batches


@dataclass(frozen=True, slots=True)
class _Collate:
    policy: ShapePolicy

    def __call__(self, samples: list[tuple[Tensor, list[int]]]) -> Batch:
        images, captions = zip(*samples, strict=True)
        text = caption_tensors(captions, self.policy.padded(max(map(len, captions))))
        inputs = {"pixel_values": torch.stack(images), **text.inputs()}
        return Batch(inputs=inputs, length=text.length, samples=len(samples), tokens=text.tokens)


def caption_loader(captions: Sequence[list[int]], image_pixels: int, batch_size: int, policy: ShapePolicy) -> Iterable[Batch]:
    """Returns an endless DataLoader over the captions, batched and padded by the policy, pinned if there is a GPU."""
    workers = max(1, min(MAX_LOADER_WORKERS, len(os.sched_getaffinity(0)) - 1))
    return DataLoader(
        _Captions(captions, image_pixels),
        batch_sampler=_Endless(policy.batches(list(map(len, captions)), batch_size)),
        collate_fn=_Collate(policy),
        num_workers=workers,
        prefetch_factor=4,
        pin_memory=torch.cuda.is_available(),
    )
