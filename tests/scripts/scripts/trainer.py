"""Hugging Face's Trainer on a small GPT-2 from a configuration."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=2000,
    logging_steps=50,
    save_steps=100,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
