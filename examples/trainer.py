"""Hugging Face's `Trainer` with the winner of a sweep of `examples.bring_your_own:Texts`.

Run it in the folder of that sweep's `best.py`: `python -m examples.trainer`. It needs accelerate, which the extra `trainer`
installs. docs/workloads.md says which settings reach a `Trainer`, and which do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import best  # written by the sweep
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from compile_sweep.contract.from_model import IGNORE_INDEX
from compile_sweep.contract.model_and_loss import ModelAndLoss, model_loss
from examples.bring_your_own import WORDS, Texts, gpt2


class SweptTrainer(Trainer):
    """A `Trainer` whose training loss comes from what the sweep compiled."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        whole = ModelAndLoss(self.model, model_loss)
        self.compiled = best.compile_model(whole)
        self.in_place = self.compiled is whole  # scope regional or modular: the model itself is compiled
        if not self.in_place and self.args.world_size > 1:  # its gradients would not be averaged
            raise ValueError("scope=full compiles past what a Trainer puts around the model for several workers; use regional")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        if self.in_place or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if hasattr(best, "DIMS"):
            best.mark(inputs, best.DIMS)
        if num_items_in_batch is not None:  # a `Trainer` divides by it, so that accumulated gradients have one mean
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled(**inputs)

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        rate: Any = self.args.learning_rate
        options = dict(best.OPTIMIZER_OPTIONS)
        compiled = "optimizer=compiled" in (best.__doc__ or "")
        if compiled:  # a schedule changes the rate, and a number would be a constant of the graph, which recompiles at each step
            rate, options["capturable"] = torch.tensor(rate), True
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, **options)
        if compiled:  # as a method, which schedulers wrap
            self.optimizer.step = MethodType(torch.compile(type(self.optimizer).step, dynamic=False), self.optimizer)
        return self.optimizer


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the rows as one batch, padded to the lengths that were measured."""
    ids = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=IGNORE_INDEX),
    }
    return Texts().padded(batch, best.padded_length)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Returns a data set with texts of many lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 65, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(WORDS, (length,), generator=generator)} for length in lengths]


def main(kind: type[Trainer] = SweptTrainer, steps: int = 20) -> list[float]:
    """Trains and returns the losses."""
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        bf16=on_gpu,  # like the workload
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_drop_last=True,  # a smaller last batch would compile again
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    trainer = kind(model=gpt2(), args=arguments, train_dataset=rows(4 * steps), data_collator=collate)
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(", ".join(f"{loss:.3f}" for loss in main()))
