"""Two models of your own in a sweep: `compile-sweep sweep --workload examples.bring_your_own:Reviews`.

`compile-sweep check examples.bring_your_own:Reviews` says beforehand what a sweep would find and cost. docs/workloads.md
says how to use the winner in a training script.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from compile_sweep import WorkloadFromModel

WORDS, CLASSES = 1000, 5


class ReviewModel(nn.Module):
    """A plain module: the mean of a few transformer layers over a review's words, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(4))
        self.classifier = nn.Linear(64, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Returns scores, (batch, classes), for words, (batch, length). Word 0 is padding, which must not change them."""
        is_word = words != 0
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~is_word)
        total = (hidden * is_word[..., None]).sum(dim=1)
        return self.classifier(total / is_word.sum(dim=1, keepdim=True))


def reviews(number: int) -> dict[str, Tensor]:
    """Returns a batch like a data loader's: 8 reviews, padded to the longest of them."""
    length = int(torch.randint(10, 65, ()))
    return {"words": torch.randint(1, WORDS, (8, length)), "stars": torch.randint(CLASSES, (8,))}


def review_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Computes the training loop's loss of a batch."""
    return cross_entropy(model(batch["words"]), batch["stars"])


Reviews = WorkloadFromModel(ReviewModel, reviews, review_loss)


def gpt2() -> GPT2LMHeadModel:
    """Returns a Hugging Face model; `from_pretrained` would work as well."""
    size = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
    drops_nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **drops_nothing, use_cache=False, bos_token_id=0, eos_token_id=0))


def texts(number: int) -> dict[str, Tensor]:
    """Returns a batch like a collator's; since it contains labels, the model computes its loss itself."""
    ids = torch.randint(WORDS, (4, int(torch.randint(16, 65, ()))))
    return {"input_ids": ids, "labels": ids}


Texts = WorkloadFromModel(gpt2, texts, max_length=64)

TextScores = WorkloadFromModel(gpt2, lambda number: {"input_ids": texts(number)["input_ids"]}, trains=False)
"""Inference only: no loss and no optimizer."""
