"""The captioning model: Hugging Face's `VisionEncoderDecoderModel` from configurations, with random weights.

Source: "Maximizing AI/ML Model Performance with PyTorch Compilation": ViT-base without its pooler and GPT-2 small with
cross-attention, vocabulary 1024, about 201 M parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

from workloads.captioning.captions import END, PAD, SOURCE_LENGTHS, START, TINY_LENGTHS, LengthDistribution

IGNORED_TOKEN = -100
"""Label of a padded position, which has no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptioningSize:
    """Dimensions of one size; those of `base` are the defaults of the two models in transformers."""

    layers: int
    width: int
    heads: int
    image_pixels: int
    patch_pixels: int
    vocabulary: int
    batch_size: int
    pool_batches: int
    lengths: LengthDistribution


CAPTIONING_SIZES = {
    "base": CaptioningSize(
        layers=12, width=768, heads=12, image_pixels=224, patch_pixels=16, vocabulary=1024,
        batch_size=64, pool_batches=100, lengths=SOURCE_LENGTHS,
    ),
    "tiny": CaptioningSize(
        layers=2, width=64, heads=2, image_pixels=32, patch_pixels=16, vocabulary=128,
        batch_size=8, pool_batches=20, lengths=TINY_LENGTHS,
    ),
}  # fmt: skip


class CaptionLoss(nn.Module):
    """Cross entropy in float32 over the positions with a token.

    It is written out here because transformers chooses its own with Python code that the compiler cannot trace in some versions,
    which breaks the graph.
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar mean loss.

        Args:
            logits: (batch, length, vocabulary).
            labels: (batch, length) token ids, `IGNORED` where padded.
        """
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_TOKEN)


class CaptioningModel(nn.Module):
    """Encoder, decoder and loss as one module whose forward returns the loss."""

    def __init__(self, size: CaptioningSize) -> None:
        super().__init__()
        encoder = ViTModel(
            ViTConfig(
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=4 * size.width,
                image_size=size.image_pixels,
                patch_size=size.patch_pixels,
            ),
            add_pooling_layer=False,
        )
        decoder = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=size.vocabulary,
                n_positions=max(1024, size.lengths.max_length),
                n_embd=size.width,
                n_layer=size.layers,
                n_head=size.heads,
                add_cross_attention=True,
                use_cache=False,
                bos_token_id=START,
                eos_token_id=END,
                pad_token_id=PAD,
            )
        )
        decoder.config.is_decoder = True
        self.model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
        self.model.config.decoder_start_token_id = START
        self.model.config.pad_token_id = PAD
        self.model.config.use_cache = False
        # The joint model copies their configurations; layers keep the old ones.
        for half in (self.model.encoder, self.model.decoder):
            for module in half.modules():
                if hasattr(module, "config"):
                    module.config = half.config
        self.loss = CaptionLoss()

    def forward(self, pixel_values: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar mean loss.

        Args:
            pixel_values: (batch, 3, height, width).
            decoder_input_ids: (batch, length), the labels shifted right by the start token.
            decoder_attention_mask: (batch, length), 0 where padded.
            labels: (batch, length), `IGNORED` where padded.
        """
        outputs = self.model(
            pixel_values=pixel_values,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            use_cache=False,
        )
        loss: Tensor = self.loss(outputs.logits, labels)
        return loss


def build_captioning_model(size: CaptioningSize, seed: int) -> CaptioningModel:
    """Builds the model on the CPU in training mode; equal seeds give equal weights, and the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CaptioningModel(size).train()
