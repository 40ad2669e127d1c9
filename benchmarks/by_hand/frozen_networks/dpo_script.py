"""Direct preference optimization as people write it: a policy, its frozen reference, pairs of answers of different lengths.

`python dpo_script.py [--compile [--mode MODE] [--dynamic]] [--fused] [--multiple N] [--no-cudnn] [--steps N]`: a Llama of 134
million parameters, 8 pairs a step of up to 512 tokens, padded to the longest of a batch, bf16 autocast. `--multiple` pads to
multiples of N, `--no-cudnn` leaves out cuDNN's attention, which is planned for each shape. The last line is the mean step after
the first third of the steps, by this script's own clock.
"""

import argparse
import copy
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=180)
parser.add_argument("--multiple", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--no-cudnn", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Preferences(Dataset):
    """Prompts of a chosen and a rejected answer, each of its own length."""

    def __len__(self):
        return args.batch * args.steps

    def __getitem__(self, place):
        drawn = torch.Generator().manual_seed(place)
        prompt = torch.randint(
            3, args.vocabulary, (int(torch.randint(args.length // 16, args.length // 4, (), generator=drawn)),), generator=drawn
        )
        answers = [
            torch.randint(
                3,
                args.vocabulary,
                (int(torch.randint(args.length // 16, 3 * args.length // 4, (), generator=drawn)),),
                generator=drawn,
            )
            for _ in range(2)
        ]
        return [(torch.cat([prompt, answer]), len(prompt)) for answer in answers]


def collate(rows):
    texts = [row[0] for row in rows] + [row[1] for row in rows]  # chosen, then rejected
    longest = -(-max(len(ids) for ids, _ in texts) // args.multiple) * args.multiple
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    labels = torch.full((len(texts), longest), -100)
    for row, (text, asked) in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
        labels[row, asked : len(text)] = text[asked:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


config = LlamaConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    intermediate_size=8 * args.width // 3 // 8 * 8,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    max_position_embeddings=1024,
)
policy = LlamaForCausalLM(config).to(device).train()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-7, fused=args.fused or None)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)
if args.compile:
    policy.compile(mode=args.mode, dynamic=args.dynamic or None)
    reference.compile(mode=args.mode, dynamic=args.dynamic or None)
loader = DataLoader(
    Preferences(), args.batch, shuffle=True, collate_fn=collate, drop_last=True, num_workers=4 if device == "cuda" else 0
)


def log_probabilities(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    each = torch.gather(logits.float().log_softmax(-1), 2, labels.masked_fill(~kept, 0)[..., None]).squeeze(-1)
    return (each * kept).sum(-1)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step, batch in enumerate(loader):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        chosen, rejected = log_probabilities(policy, batch).chunk(2)
        with torch.no_grad():
            chosen_before, rejected_before = log_probabilities(reference, batch).chunk(2)
        margins = 0.1 * ((chosen - chosen_before) - (rejected - rejected_before))
        loss = -F.logsigmoid(margins).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}, accuracy {(margins > 0).float().mean().item():.2f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
