"""A ViT trained by Hugging Face's Trainer: bf16, AdamW, a linear schedule, label smoothing, batches from a dataset.

`python trainer_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: ViT-Base on batches of 64 images of 224 pixels. The
last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--pixels", type=int, default=224)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()


class Pictures(Dataset):
    """64 random images, with labels of their own each time."""

    def __init__(self, number):
        self.images = torch.randn(64, 3, args.pixels, args.pixels)
        self.labels = torch.randint(args.classes, (number,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return {"pixel_values": self.images[number % 64], "labels": self.labels[number]}


class Clock(TrainerCallback):
    """Times the steps after the first third."""

    began = ended = 0.0

    def on_step_end(self, arguments, state, control, **kwargs):
        if state.global_step in (args.steps // 3, args.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.began, self.ended = self.ended, time.perf_counter()


torch.manual_seed(1)
model = ViTForImageClassification(
    ViTConfig(
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        image_size=args.pixels,
        num_labels=args.classes,
    )
)
clock = Clock()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=args.batch,
        max_steps=args.steps,
        learning_rate=1e-4,
        weight_decay=0.05,
        warmup_steps=10,
        label_smoothing_factor=0.1,
        bf16=torch.cuda.is_available(),
        dataloader_num_workers=6 if torch.cuda.is_available() else 0,
        optim="adamw_torch_fused" if args.fused else "adamw_torch",
        torch_compile=args.compile,
        torch_compile_mode=args.mode if args.compile else None,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Pictures(48 * args.batch), callbacks=[clock]).train()
print(f"{1e3 * (clock.ended - clock.began) / (args.steps - args.steps // 3):.4f} ms a step")
