"""A Llama trained as people write it: bf16 autocast, AdamW, gradients accumulated over two batches, clipping.

`python llama_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: transformers' Llama of 134 million parameters on
2 × 8 × 1,024 tokens a step. The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--keep-gradients", action="store_true", help="zero gradients in place, which CUDA graphs need here")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"

config = LlamaConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    intermediate_size=args.width * 8 // 3,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    num_key_value_heads=args.heads,
    max_position_embeddings=args.length,
    use_cache=False,
)
model = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=args.fused or None)
if args.keep_gradients:
    for weights in model.parameters():
        weights.grad = torch.zeros_like(weights)
if args.compile:
    model = torch.compile(model, mode=args.mode)
batches = [torch.randint(args.vocabulary, (args.batch, args.length), device=device) for _ in range(8)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
number = 0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    for _ in range(args.accumulate):
        ids = batches[number % len(batches)]
        number += 1
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=not args.keep_gradients)
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
