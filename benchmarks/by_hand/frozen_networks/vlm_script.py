"""A vision-language model trained as people do it: a frozen SigLIP in a Qwen2, image tokens before texts of different lengths.

`python vlm_script.py [--compile [--mode MODE]] [--fused] [--multiple N] [--no-cudnn] [--steps N]`: 249 million parameters of
which the projector and the language model train, 16 images and texts of up to 256 tokens, bf16 autocast. `--multiple` pads
texts to multiples of N, `--no-cudnn` leaves out cuDNN's attention, which is planned for each shape. The last line is the mean
step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--pixels", type=int, default=224)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--multiple", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--no-cudnn", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Conversations(Dataset):
    def __len__(self):
        return args.batch * args.steps

    def __getitem__(self, place):
        drawn = torch.Generator().manual_seed(place)
        words = int(torch.randint(args.length // 8, args.length, (), generator=drawn))
        return torch.randn(3, args.pixels, args.pixels, generator=drawn), torch.randint(
            3, args.vocabulary, (words,), generator=drawn
        )


def collate(rows):
    images, texts = zip(*rows, strict=True)
    longest = -(-max(map(len, texts)) // args.multiple) * args.multiple
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return torch.stack(images), ids, mask


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=args.width,
                num_hidden_layers=args.layers,
                num_attention_heads=args.heads,
                intermediate_size=4 * args.width,
                image_size=args.pixels,
                patch_size=16,
            )
        ).requires_grad_(False)
        self.projector = nn.Sequential(nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width))
        self.language = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=args.vocabulary,
                hidden_size=args.width,
                intermediate_size=4 * args.width,
                num_hidden_layers=args.layers,
                num_attention_heads=args.heads,
                num_key_value_heads=args.heads // 2,
            )
        )

    def forward(self, images, ids, mask):
        with torch.no_grad():
            seen = self.vision(pixel_values=images).last_hidden_state
        seen = self.projector(seen)
        words = self.language.get_input_embeddings()(ids)
        embedded = torch.cat([seen.to(words.dtype), words], 1)
        attended = torch.cat([mask.new_ones(seen.shape[:2]), mask], 1)
        labels = torch.cat([ids.new_full(seen.shape[:2], -100), ids.masked_fill(mask == 0, -100)], 1)
        return self.language(inputs_embeds=embedded, attention_mask=attended, labels=labels).loss


model = VisionLanguage().to(device).train()
model.vision.eval()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5, fused=args.fused or None)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)
if args.compile:
    model.compile(mode=args.mode)
loader = DataLoader(
    Conversations(),
    args.batch,
    shuffle=True,
    collate_fn=collate,
    drop_last=True,
    num_workers=8 if device == "cuda" else 0,
    pin_memory=True,
)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step, batch in enumerate(loader):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    images, ids, mask = [tensor.to(device, non_blocking=True) for tensor in batch]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(images, ids, mask)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
