"""Texts padded to the longest of their batch: `texts.py masked|written|outside|averaged|frozen-shape`."""

import sys

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, T5Config, T5ForConditionalGeneration

kind = sys.argv[1]
torch.manual_seed(3)
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
bert = BertConfig(**small, **no_dropout, max_position_embeddings=200 if kind == "averaged" else 40, pad_token_id=1)


class Tagger(nn.Module):
    """Gives logits for each token, whose loss the script computes, and one number for each text."""

    def __init__(self):
        super().__init__()
        self.encoder = BertModel(bert, add_pooling_layer=False)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        averages = self.head.bias[0] * input_ids.float().mean(dim=1)  # over padding too
        return self.head(hidden), averages if kind == "averaged" else hidden[:, 0, 0]


if kind == "written":
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 40, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**t5, decoder_start_token_id=0, use_cache=False))
else:
    model = Tagger() if kind in ("outside", "averaged") else BertForMaskedLM(bert)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
widths, seen = [], []
inner = model.bert if kind in ("masked", "frozen-shape") else model.encoder


def note(module, args, kwargs):
    if torch.compiler.is_compiling():
        return
    widths.append((args[0] if args else kwargs["input_ids"]).size(1))


inner.register_forward_pre_hook(note, with_kwargs=True)


def batch_of(length, columns):
    generator = torch.Generator().manual_seed(1000 * length + columns)
    lengths = torch.tensor([length, *torch.randint(1, length + 1, (3,), generator=generator).tolist()])
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.where(mask > 0, torch.randint(2, 40, (4, length), generator=generator), 1)
    labels = torch.randint(2, 40, (4, columns), generator=generator)
    return ids, mask, labels if columns != length else torch.where(mask > 0, labels, -100)


for step in range(4000):
    length = 16 if kind == "frozen-shape" else 9 + 7 * step % 25
    ids, mask, labels = batch_of(length, 3 + step % 5 if kind == "written" else length)
    if kind in ("outside", "averaged"):
        logits, firsts = model(ids, attention_mask=mask)
        assert logits.shape[:2] == ids.shape
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1), (labels % 5).where(labels >= 0, -100).flatten())
            + firsts.square().mean()
        )
    else:
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        assert outputs.logits.shape[:2] == labels.shape
        loss = outputs.loss
    seen.append(length)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
