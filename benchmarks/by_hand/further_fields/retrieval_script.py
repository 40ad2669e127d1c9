"""Retrieval by two towers of transformers' BERT: texts of many lengths, in-batch negatives, bf16 autocast, AdamW.

`python retrieval_script.py [--compile] [--mode M] [--fused] [--steps N]`; `--compile` marks lengths as dynamic. The last line is
the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--longest", type=int, default=256)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 30522


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=max(1, args.width // 32),
            intermediate_size=4 * args.width,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


questions, passages = Tower().to(device), Tower().to(device)
parameters = [*questions.parameters(), *passages.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=2e-5, fused=args.fused or None)
schedule = get_linear_schedule_with_warmup(optimizer, 10, args.steps)
calls = [torch.compile(one, mode=args.mode, dynamic=True) if args.compile else one for one in (questions, passages)]


def texts(least, most):
    lengths = torch.randint(least, most + 1, (args.batch,))
    ids = torch.randint(1, WORDS, (args.batch, int(lengths.max())))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids * mask, mask


def train_step(question, passage):
    ids, mask = (one.to(device, non_blocking=True) for one in question)
    others, their_mask = (one.to(device, non_blocking=True) for one in passage)
    with torch.autocast(device, torch.bfloat16):
        scores = calls[0](ids, mask) @ calls[1](others, their_mask).T
    loss = F.cross_entropy(scores.float() / 0.05, torch.arange(len(scores), device=device))
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    loss = train_step(texts(5, 32), texts(args.longest // 4, args.longest))
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
