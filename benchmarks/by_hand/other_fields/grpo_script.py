"""Group-relative policy optimization of a Llama of 134 million: answers are sampled, rewarded, and trained on for two steps.

`python grpo_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: 8 questions of 64 tokens with 8 answers of 64 each, a
frozen copy as reference, bfloat16 weights' autocast. The last line is the mean step after the first third of the steps, by this
script's own clock.
"""

import argparse
import copy
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--questions", type=int, default=8)
parser.add_argument("--answers", type=int, default=8)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=args.vocabulary, hidden_size=args.width, intermediate_size=8 * args.width // 3, num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)  # fmt: skip
policy = LlamaForCausalLM(config).to(device)
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=args.fused or None)
if args.compile:
    policy.compile(mode=args.mode)
    reference.compile(mode=args.mode)
questions = [torch.randint(3, args.vocabulary, (args.questions, args.length), device=device) for _ in range(4)]


def log_probabilities(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, args.length - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, args.length :, None])[..., 0]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    with torch.autocast(device, dtype=torch.bfloat16):
        if step % 2 == 0:
            policy.eval()
            asked = questions[step // 2 % 4].repeat_interleave(args.answers, 0)
            with torch.no_grad():
                ids = policy.generate(
                    asked, attention_mask=torch.ones_like(asked), max_new_tokens=args.length, do_sample=True, top_k=0
                )
                reward = (ids[:, args.length :] % 7 == 0).float().mean(1).view(args.questions, args.answers)
                advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
                fixed = log_probabilities(reference, ids)
                before = log_probabilities(policy, ids)
            policy.train()
        now = log_probabilities(policy, ids)
        ratio = torch.exp(now - before)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        apart = torch.exp(fixed - now) - (fixed - now) - 1
        loss = -(gain - 0.04 * apart).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.questions * args.answers / took:.1f} answers/s, {1e3 * took:.3f} ms a step")
