"""A mixture of experts trained as people do: Mixtral, 4 × 1,024 tokens, bf16 autocast, AdamW, clipping, a cosine schedule.

`python moe_script.py [--compile [--mode MODE] [--blocks]] [--fused] [--experts-by eager|cast] [--steps N]`: 8 layers with 8
experts, of which each token takes 2; 215 million parameters. With --experts-by cast, their weights are cast as autocast casts
those of linear layers; eager is transformers' loop over the experts. The last line is the mean step after the first third of
the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, get_cosine_schedule_with_warmup
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--blocks", action="store_true")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--experts-by", default="grouped_mm", choices=["grouped_mm", "eager", "cast"])
args = parser.parse_args()


def cast_experts(self, hidden, index, weights):
    """Sorts the tokens by expert, multiplies them by groups in bfloat16 and adds up each token's results."""
    order = index.flatten().argsort()
    ends = nn.functional.one_hot(index.flatten(), self.num_experts).sum(0).cumsum(0).int()
    picked = hidden[order // index.size(1)].bfloat16()
    gate, up = nn.functional.grouped_mm(picked, self.gate_up_proj.bfloat16().mT, offs=ends).chunk(2, dim=-1)
    done = nn.functional.grouped_mm(self.act_fn(gate) * up, self.down_proj.bfloat16().mT, offs=ends)
    done = done * weights.flatten()[order, None]
    return done[order.argsort()].view(*index.shape, -1).sum(1).to(hidden.dtype)


torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = MixtralConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    intermediate_size=int(3.5 * args.width),
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    num_key_value_heads=args.heads // 2,
    num_local_experts=args.experts,
    max_position_embeddings=args.length,
    output_router_logits=True,
    use_cache=False,
)
model = MixtralForCausalLM(config).to(device).train()
ALL_EXPERTS_FUNCTIONS.register("cast", cast_experts)
model.set_experts_implementation(args.experts_by)
decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=args.fused or None)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)
if args.compile:
    for part in model.model.layers if args.blocks else [model]:
        part.compile(mode=args.mode)
texts = torch.randint(args.vocabulary, (64 * args.batch, args.length))


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    tokens = texts[torch.randint(len(texts), (args.batch,))].to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
