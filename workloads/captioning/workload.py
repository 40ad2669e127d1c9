"""The captioning workload: batches under a shape policy, and the parts of the model that are worth compiling separately."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.options import Option
from compile_sweep.schema.settings import Attention
from compile_sweep.schema.shapes import ShapePolicy
from workloads.captioning.captions import draw_captions, draw_lengths
from workloads.captioning.loader import CaptionTensors, caption_loader, caption_tensors
from workloads.captioning.model import CAPTIONING_SIZES, build_captioning_model

DISTINCT_IMAGES = 8
"""Number of distinct pixel batches on the device, which captions share in turn. Pixels do not change the cost of a step."""

SAMPLED_BATCHES = 1000
"""Number of batches whose lengths represent the data when buckets are optimized; their captions differ from the timed ones."""

UNMASKED = """\
from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Under a name of its own transformers makes no mask for it. Captions are padded on the right: the causal order hides the
    # padding from every token, and the loss ignores what padding attends to. While compiling, transformers would make all-true
    # masks for the images too, with which attention leaves the fused kernels.
    AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    inner.model.set_attn_implementation("sdpa_unmasked")"""
"""Statements in the body of a function."""


class Captioning(Workload):
    """ViT + GPT-2 on synthetic images and captions; how q, k and v are computed and the residual stream's dtype may vary."""

    sizes = tuple(CAPTIONING_SIZES)
    convolutional = False
    options: ClassVar[Mapping[str, Option]] = {
        "batch_size": int,
        "qkv": ("separate", "merged"),
        "residual": ("float32", "autocast"),
    }

    def __init__(self, size: str = "base", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = CAPTIONING_SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.max_length = self.dimensions.lengths.max_length
        self.pool_batches = self.dimensions.pool_batches
        self._images: dict[torch.device, list[Tensor]] = {}
        self._untrained: nn.Module | None = None

    def build_model(self) -> nn.Module:
        if self._untrained is None:  # a trial needs six models, and drawing 200 million weights takes seconds each time
            variations = {
                "merges_qkv": self.chosen["qkv"] == "merged",
                "casts_residual": self.chosen["residual"] == "autocast",
            }
            self._untrained = build_captioning_model(self.dimensions, self.seed, **variations)
        return deepcopy(self._untrained)

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        captions = self._captions(self.pool_batches, rank)
        batches = []
        for index, rows in enumerate(policy.batches(list(map(len, captions)), self.batch_size)):
            chosen = [captions[row] for row in rows]
            text = caption_tensors(chosen, policy.padded(max(map(len, chosen))))
            batches.append(self._batch(text, self._pixels(index, device), device))
        return batches

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        text = caption_tensors([caption[:length] for caption in self._captions(1, rank)], length)
        return self._batch(text, self._pixels(0, device), device)

    def row_lengths(self) -> Sequence[int]:
        return draw_lengths(self.dimensions.lengths, SAMPLED_BATCHES * self.batch_size, f"{self.seed}:sample")

    def loader(self, policy: ShapePolicy, *, rank: int) -> Iterable[Batch]:
        return caption_loader(self._captions(self.pool_batches, rank), self.dimensions.image_pixels, self.batch_size, policy)

    def attention_statement(self, attention: Attention) -> str:
        if attention is Attention.FLEX:  # GPT-2's attention has dropout, which FlexAttention does not support
            return 'inner.model.encoder.set_attn_implementation("flex_attention")'
        if attention is Attention.UNMASKED:
            return UNMASKED
        return f'inner.model.set_attn_implementation("{attention}")'

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        """Disables cuDNN attention: on Hopper its backward gives NaN for masked lengths of 64 and 192 (pytorch issue 196678).

        It does so in eager mode too, as soon as a row's log-sum-exp falls below about -88; `docs/log.md` has the reproduction
        and the cost. This can go when torch no longer selects it there.
        """
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)

    def process_statements(self) -> Sequence[str]:
        return ["torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gives NaN on Hopper (pytorch/pytorch#196678)"]

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
        return {}  # the encoder's images have one size

    def _captions(self, batches: int, rank: int) -> list[list[int]]:
        count = batches * self.batch_size
        return draw_captions(self.dimensions.lengths, self.dimensions.vocabulary, count, f"{self.seed}:{rank}")

    def _batch(self, text: CaptionTensors, pixels: Tensor, device: torch.device) -> Batch:
        inputs = {name: tensor.to(device) for name, tensor in text.inputs().items()}
        return Batch(inputs={"pixel_values": pixels, **inputs}, length=text.length, samples=len(pixels), tokens=text.tokens)

    def _pixels(self, index: int, device: torch.device) -> Tensor:
        if device not in self._images:
            generator = torch.Generator(device=device).manual_seed(self.seed)
            side = self.dimensions.image_pixels
            shape = (self.batch_size, 3, side, side)
            count = min(DISTINCT_IMAGES, self.pool_batches)
            self._images[device] = [torch.randn(shape, generator=generator, device=device) for _ in range(count)]
        images = self._images[device]
        return images[index % len(images)]
