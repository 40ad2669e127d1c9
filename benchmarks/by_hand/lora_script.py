"""A language model fine-tuned with low-rank adapters as people do it: frozen bf16 weights, checkpointing, accumulation, clipping.

`python lora_script.py [--compile [--mode MODE] [--blocks]] [--fused] [--keep-gradients] [--no-checkpointing]`: transformers'
Qwen2 of half a billion parameters, adapters of rank 16 in its attention, 4 × 4 conversations of 512 tokens a step. The last line
is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import math
import time

import torch
import torch.nn as nn
from transformers import Qwen2Config, Qwen2ForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--heads", type=int, default=14)
parser.add_argument("--width", type=int, default=896)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=151936)
parser.add_argument("--steps", type=int, default=45)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--blocks", action="store_true")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--keep-gradients", action="store_true")
parser.add_argument("--no-checkpointing", action="store_true")
args = parser.parse_args()


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 16, alpha: int = 32, dropout: float = 0.05):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        update = self.dropout(x).to(self.A.dtype) @ self.A.t() @ self.B.t()
        return self.base(x) + (self.scaling * update).to(x.dtype)


def add_lora(model, names=("q_proj", "k_proj", "v_proj", "o_proj")):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, LoRALinear(child))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


torch.manual_seed(3407)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = Qwen2Config(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    intermediate_size=int(args.width * 5.4286) // 64 * 64,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    use_cache=False,
)
with torch.device(device):
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
trainable = add_lora(model)
if not args.no_checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
model.train()
print(
    f"{sum(p.numel() for p in trainable) / 1e6:.2f} of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters train"
)

optimizer = torch.optim.AdamW(trainable, lr=2e-4, weight_decay=0.0, fused=args.fused or None)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
step_model = model
if args.compile and args.blocks:
    for block in model.model.layers:
        block.compile(mode=args.mode)
elif args.compile:
    model.get_input_embeddings()._forward_hooks.clear()
    step_model = torch.compile(model, mode=args.mode)


def conversations(number):
    lengths = torch.randint(args.length // 2, args.length + 1, (args.batch,))
    ids = torch.randint(args.vocabulary, (args.batch, args.length))
    mask = torch.arange(args.length)[None] < lengths[:, None]
    labels = ids.masked_fill(~mask, -100)
    labels[:, : args.length // 4] = -100
    return {name: value.to(device) for name, value in (("input_ids", ids), ("attention_mask", mask.long()), ("labels", labels))}


data = [conversations(number) for number in range(8)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    for micro in range(args.accumulate):
        batch = data[(step * args.accumulate + micro) % len(data)]
        loss = step_model(**batch).loss / args.accumulate
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=not args.keep_gradients)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item() * args.accumulate:.4f}, norm {norm.item():.3f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
