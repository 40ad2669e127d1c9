"""GPT-2 from Hugging Face with random weights, from a few blocks to 1.5 billion parameters, for training and inference.

Source: "torch.compile Benchmarked", which times one step of the largest. All rows have full length. Attention has no dropout
in inference, so FlexAttention is offered only there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from compile_sweep.contract.options import Option
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import Attention
from workloads.synthetic import INFERENCE_OPTIONS, Synthetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Size:
    """Dimensions of one size; those above `tiny` are OpenAI's."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    length: int = 256
    batch_size: int = 4
    pool_batches: int = 20


GPT2_SIZES = {
    "xl": Gpt2Size(layers=48, width=1600, heads=25),
    "large": Gpt2Size(layers=36, width=1280, heads=20),
    "medium": Gpt2Size(layers=24, width=1024, heads=16),
    "small": Gpt2Size(layers=12, width=768, heads=12),
    "tiny": Gpt2Size(layers=2, width=64, heads=2, vocabulary=128, length=32, batch_size=2, pool_batches=6),
}


class NextTokenLoss(nn.Module):
    """Cross entropy of each token given those before it, in float32."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar mean.

        Args:
            logits: (batch, length, vocabulary).
            labels: (batch, length), each row already shifted by one.
        """
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class TrainedGpt2(nn.Module):
    """Model and loss."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model
        self.loss = NextTokenLoss()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar loss of ids and labels, both (batch, length)."""
        loss: Tensor = self.loss(self.model(input_ids=ids, use_cache=False).logits, labels)
        return loss


class InferringGpt2(nn.Module):
    """The model alone."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits, (batch, length, vocabulary), for ids, (batch, length)."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


_OWN_CHOICES = {Attention.SDPA: "sdpa", Attention.EAGER: "eager"}


class Gpt2(Synthetic):
    """GPT-2 trained on random tokens, tiny to 1.5 billion parameters."""

    sizes = tuple(GPT2_SIZES)
    convolutional = False
    options: ClassVar[Mapping[str, Option]] = {"batch_size": int}
    attentions: ClassVar[Mapping[Attention, str]] = _OWN_CHOICES

    def __init__(self, size: str = "xl", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = GPT2_SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.max_length = self.dimensions.length
        self.pool_batches = self.dimensions.pool_batches

    def make_model(self) -> nn.Module:
        size = self.dimensions
        config = GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=1024,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return (TrainedGpt2 if self.trains else InferringGpt2)(GPT2LMHeadModel(config))

    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        ids = torch.randint(self.dimensions.vocabulary, (self.batch_size, length + 1), generator=generator)
        inputs = {"ids": ids[:, :-1].contiguous()}
        return {**inputs, "labels": ids[:, 1:].contiguous()} if self.trains else inputs

    def regions(self, model: nn.Module) -> Sequence[str]:
        return [name for name, module in model.named_modules() if isinstance(module, GPT2Block)]

    def parts(self) -> Sequence[str]:
        return ["model", "loss"] if self.trains else ["model.transformer", "model.lm_head"]

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        if module.startswith("model.transformer.h."):
            return {"hidden_states": (1,), "attention_mask": (2, 3)}
        return {
            "": {"ids": (1,), "labels": (1,)} if self.trains else {"ids": (1,)},
            "model": {"input_ids": (1,)},
            "model.transformer": {"input_ids": (1,)},
            "model.lm_head": {"input": (1,)},
            "loss": {"logits": (1,), "labels": (1,)},
        }[module]

    def attention_statement(self, attention: Attention) -> str:
        if attention not in self.attentions:
            able = ", ".join(self.attentions)
            raise SettingsError(f"{type(self).__name__} cannot run attention={attention}; it can run {able}")
        return f'inner.model.set_attn_implementation("{self.attentions[attention]}")'


class Gpt2Inference(Gpt2):
    """GPT-2's forward on whole rows, tiny to 1.5 billion parameters; when weights are cast may vary."""

    trains = False
    attentions: ClassVar[Mapping[Attention, str]] = {**_OWN_CHOICES, Attention.FLEX: "flex_attention"}
    options: ClassVar[Mapping[str, Option]] = {
        "batch_size": int,
        **INFERENCE_OPTIONS,
    }
