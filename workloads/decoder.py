"""Captions written token by token: the captioning model as inference, with a static cache of keys and values.

A step encodes a batch of images once and runs the decoder once per token, so scope=modular compiles the encoder and the decoder
separately and leaves the loop to Python. `workload.new_tokens=1` times the latency of the first token, in a sweep of its own.
The next token is given, not picked from the scores: otherwise rounding would make two runs diverge; picking costs one argmax.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, StaticCache, VisionEncoderDecoderModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

from compile_sweep.contract.base import Batch
from compile_sweep.contract.options import Option
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import Attention, CompileSettings
from workloads.captioning.captions import FIRST_WORD, START
from workloads.captioning.model import CAPTIONING_SIZES, build_captioning_model
from workloads.synthetic import INFERENCE_OPTIONS, Synthetic

NEW_TOKENS = {"base": 64, "tiny": 6}  # number of new tokens per caption, by size
LONGEST_CACHE = 256  # maximum number of tokens in the cache


class Generation(nn.Module):
    """Writes captions of a set length."""

    positions: Tensor

    def __init__(self, model: VisionEncoderDecoderModel, new_tokens: int) -> None:
        super().__init__()
        self.encoder, self.decoder = model.encoder, model.decoder
        self.new_tokens = new_tokens
        self.register_buffer("positions", torch.arange(new_tokens).unsqueeze(0), persistent=False)
        self._cache: EncoderDecoderCache | None = None

    def forward(self, pixel_values: Tensor, ids: Tensor) -> Tensor:
        """Returns the scores of each next token, (batch, tokens, vocabulary).

        Args:
            pixel_values: (batch, 3, height, width).
            ids: (batch, tokens), the decoder's input at each position.
        """
        begin_step()
        images = self.encoder(pixel_values=pixel_values).last_hidden_state.clone()  # later graphs reuse the memory
        cache = self._emptied(images)
        scores = []
        for position in range(self.new_tokens):
            begin_step()
            out = self.decoder(
                input_ids=ids[:, position : position + 1],
                position_ids=self.positions[:, position : position + 1],
                encoder_hidden_states=images,
                past_key_values=cache,
                use_cache=True,
            )
            scores.append(out.logits.clone())
        return torch.cat(scores, dim=1)

    def _emptied(self, images: Tensor) -> EncoderDecoderCache:
        """Returns the emptied cache, which keeps its address from caption to caption, as CUDA graphs need.

        If one graph contains the whole loop, the cache belongs to that graph. Otherwise it is allocated here: if a compiled
        decoder's first call allocated it, it would be in that call's CUDA graph, and the next one would overwrite it.
        """
        if torch.compiler.is_compiling():
            return self._new_cache(images)
        if self._cache is None:
            self._cache = self._new_cache(images)
        else:
            self._cache.reset()
        return self._cache

    def _new_cache(self, images: Tensor) -> EncoderDecoderCache:
        config, kind = self.decoder.config, images.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else self.decoder.dtype
        parts = [StaticCache(config=config, max_cache_len=length) for length in (self.new_tokens, images.size(1))]
        cache = EncoderDecoderCache(*parts)
        for part in parts:
            part.early_initialization(images.size(0), config.n_head, config.n_embd // config.n_head, dtype, images.device)
        return cache


def begin_step() -> None:
    """Declares earlier outputs of CUDA graphs as no longer needed; does nothing inside a graph."""
    if not torch.compiler.is_compiling():
        torch.compiler.cudagraph_mark_step_begin()


class Decoder(Synthetic):
    """Captions generated token by token from a static cache of keys and values; tokens/s and first-token latency."""

    sizes = tuple(NEW_TOKENS)
    convolutional = False
    trains = False
    pool_batches = 4
    options: ClassVar[Mapping[str, Option]] = {
        "batch_size": int,
        "new_tokens": int,
        **INFERENCE_OPTIONS,
    }
    job_options = frozenset({"new_tokens"})

    def __init__(self, size: str = "base", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = CAPTIONING_SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.new_tokens = NEW_TOKENS[size]

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        super().take(chosen)
        self.new_tokens = int(chosen.get("new_tokens", self.new_tokens))

    def validate(self, settings: CompileSettings) -> None:
        super().validate(settings)
        asked = int(dict(settings.workload or ()).get("new_tokens", 1))
        if asked > LONGEST_CACHE:
            raise SettingsError(
                f"workload.new_tokens={asked} is above the {LONGEST_CACHE} that the model has positions for; use less"
            )

    def make_model(self) -> nn.Module:
        return Generation(build_captioning_model(self.dimensions, self.seed).model, self.new_tokens)

    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        side = self.dimensions.image_pixels
        ids = torch.randint(FIRST_WORD, self.dimensions.vocabulary, (self.batch_size, self.new_tokens), generator=generator)
        ids[:, 0] = START
        return {"pixel_values": torch.randn(self.batch_size, 3, side, side, generator=generator), "ids": ids}

    def regions(self, model: nn.Module) -> Sequence[str]:
        return [name for name, module in model.named_modules() if isinstance(module, ViTLayer | GPT2Block)]

    def parts(self) -> Sequence[str]:
        return ["encoder", "decoder"]

    def _batch(self, length: int, number: int, rank: int, device: torch.device) -> Batch:
        made = super()._batch(length, number, rank, device)
        return Batch(inputs=made.inputs, length=length, samples=made.samples, tokens=made.samples * self.new_tokens)

    def attention_statement(self, attention: Attention) -> str:
        if attention not in (Attention.SDPA, Attention.EAGER):
            raise SettingsError(f"Decoder cannot run attention={attention}; it can run sdpa, eager")
        return f'[half.set_attn_implementation("{attention}") for half in (inner.encoder, inner.decoder)]'
