"""The captioning workload: batches under a shape policy, and the parts of the model worth compiling apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

from workloads.base import Batch, Workload
from workloads.captioning.captions import PAD, START, draw_captions
from workloads.captioning.model import IGNORED, SIZES, build
from workloads.shapes import ShapePolicy

DISTINCT_IMAGES = 8
"""Batches of pixels kept on the device; captions take turns with them. Pixels do not change what a step costs."""


class Captioning(Workload):
    """ViT + GPT-2 on synthetic images and captions."""

    sizes = tuple(SIZES)

    def __init__(self, size: str = "base", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.max_length = self.dimensions.lengths.max_length
        self.pool_batches = self.dimensions.pool_batches
        self._images: dict[torch.device, list[Tensor]] = {}

    def build_model(self) -> nn.Module:
        return build(self.dimensions, self.seed)

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        captions = self._captions(self.pool_batches, rank)
        rows = [captions[i : i + self.batch_size] for i in range(0, len(captions), self.batch_size)]
        lengths = [policy.padded(max(map(len, row))) for row in rows]
        return [self._batch(row, length, i, device) for i, (row, length) in enumerate(zip(rows, lengths, strict=True))]

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        return self._batch([caption[:length] for caption in self._captions(1, rank)], length, 0, device)

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        """No cuDNN attention: on Hopper its backward gives NaN for masked lengths of 64 and 192 (pytorch issue 196678).

        It does so in eager mode too, as soon as a row's log-sum-exp falls below about -88; `docs/log.md` has the reproduction
        and the cost. Can go when torch no longer chooses it there.
        """
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)

    def regions(self, model: nn.Module) -> Sequence[str]:
        return [name for name, module in model.named_modules() if isinstance(module, ViTLayer | GPT2Block)]

    def parts(self) -> Sequence[str]:
        return ["model.encoder", "model.decoder", "loss"]

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        if module == "":
            return {"decoder_input_ids": (1,), "decoder_attention_mask": (1,), "labels": (1,)}
        if module == "model.decoder":
            return {"input_ids": (1,), "attention_mask": (1,)}
        if module == "loss":
            return {"logits": (1,), "labels": (1,)}
        if module.startswith("model.decoder.transformer.h."):
            return {"hidden_states": (1,), "attention_mask": (2, 3)}
        return {}  # the encoder sees images of one size

    def _captions(self, batches: int, rank: int) -> list[list[int]]:
        count = batches * self.batch_size
        return draw_captions(self.dimensions.lengths, self.dimensions.vocabulary, count, f"{self.seed}:{rank}")

    def _batch(self, captions: Sequence[Sequence[int]], length: int, index: int, device: torch.device) -> Batch:
        labels = torch.full((len(captions), length), IGNORED, dtype=torch.long)
        inputs = torch.full((len(captions), length), PAD, dtype=torch.long)
        for row, caption in enumerate(captions):
            ids = torch.tensor(caption)
            labels[row, : len(ids)] = ids
            inputs[row, : len(ids)] = torch.cat([torch.tensor([START]), ids[:-1]])
        tensors = {
            "pixel_values": self._pixels(index, device),
            "decoder_input_ids": inputs.to(device),
            "decoder_attention_mask": (inputs != PAD).to(device),
            "labels": labels.to(device),
        }
        tokens = sum(map(len, captions))
        return Batch(inputs=tensors, length=length, samples=len(captions), tokens=tokens)

    def _pixels(self, index: int, device: torch.device) -> Tensor:
        if device not in self._images:
            generator = torch.Generator(device=device).manual_seed(self.seed)
            side = self.dimensions.image_pixels
            shape = (self.batch_size, 3, side, side)
            count = min(DISTINCT_IMAGES, self.pool_batches)
            self._images[device] = [torch.randn(shape, generator=generator, device=device) for _ in range(count)]
        images = self._images[device]
        return images[index % len(images)]
