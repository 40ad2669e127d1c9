"""The captioning model: Hugging Face's `VisionEncoderDecoderModel` from configurations, with random weights.

Source: "Maximizing AI/ML Model Performance with PyTorch Compilation": ViT-base without its pooler and GPT-2 small with
cross-attention, vocabulary 1024, about 201 M parameters.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import ViTAttention, eager_attention_forward

from workloads.captioning.captions import END, PAD, SOURCE_LENGTHS, START, TINY_LENGTHS, LengthDistribution

IGNORED_TOKEN = -100  # label of a padded position, which has no loss


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


class AutocastDropout(nn.Dropout):
    """Dropout whose output has the dtype of autocast."""

    def forward(self, input: Tensor) -> Tensor:
        return _in_autocast_dtype(super().forward(input))


class AutocastLayerNorm(nn.LayerNorm):
    """Layer normalization whose output has the dtype of autocast, in which torch itself leaves it in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return _in_autocast_dtype(super().forward(input))


def _in_autocast_dtype(values: Tensor) -> Tensor:
    device = values.device.type
    return values.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else values


class MergedAttention(ViTAttention):
    """ViT's attention with queries, keys and values from one matrix product; the parameters stay apart."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Maps (batch, length, width) to the same shape."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight, bias = (torch.cat([getattr(one, name) for one in projections]) for name in ("weight", "bias"))
        merged = linear(hidden_states, weight, bias).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in merged.unbind(2))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(mixed.flatten(2)), weights


class CaptioningModel(nn.Module):
    """Encoder, decoder and loss as one module whose forward returns the loss.

    Args:
        size: Dimensions.
        merges_qkv: Whether ViT's attention computes queries, keys and values in one matrix product.
        casts_residual: Whether the sums that blocks add to, the residual stream, have the dtype of autocast instead of float32.
    """

    def __init__(self, size: CaptioningSize, *, merges_qkv: bool = False, casts_residual: bool = False) -> None:
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
        if merges_qkv:
            for module in encoder.modules():
                if isinstance(module, ViTAttention):
                    module.__class__ = MergedAttention
        if casts_residual:
            encoder.embeddings.dropout = AutocastDropout(encoder.embeddings.dropout.p)
            encoder.layernorm = AutocastLayerNorm(list(encoder.layernorm.normalized_shape), eps=encoder.layernorm.eps)
            decoder.transformer.drop = AutocastDropout(decoder.transformer.drop.p)

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


def build_captioning_model(size: CaptioningSize, seed: int, **variations: bool) -> CaptioningModel:
    """Builds the model on the CPU in training mode; equal seeds give equal weights, and the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CaptioningModel(size, **variations).train()
