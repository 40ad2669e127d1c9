"""Base classes of the built-in workloads: random batches of one length, weights drawn once, and shared image training.

The options of image workloads turn the pitfalls of "PyTorch 2.0: how to speed up model training" into settings: EMA, SyncBN,
batch size, and AMP (the setting `autocast`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.inspect_model import repeated_blocks
from compile_sweep.contract.options import Option, gpu_requirement
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import Autocast, CompileSettings
from compile_sweep.schema.shapes import ShapePolicy

HALF, FROZEN = "bf16", "frozen"
"""Values of an option `weights`: cast once, so that no autocast is needed; or constants of the compiled code, cast at compile
time.
"""

KEPT = "kept"  # value of an option `cast_cache` that keeps autocast's casts of the weights from step to step

INFERENCE_OPTIONS: Mapping[str, Option] = {
    "grad_mode": ("inference_mode", "no_grad"),
    "weights": ("float32", HALF, FROZEN),
    "cast_cache": ("step", KEPT),
}
"""Options of inference workloads, for how often weights are cast and how autograd is disabled."""


class Synthetic(Workload):
    """Random batches, all of `max_length`; shorter ones only to warm up lengths that a policy could produce."""

    pool_batches = 20
    max_length = 1

    def __init__(self, size: str, seed: int) -> None:
        super().__init__(size, seed)
        self._untrained: nn.Module | None = None

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Returns the model with random weights."""

    @abstractmethod
    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Returns a batch's inputs, on the CPU."""

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        super().take(chosen)
        if "grad_mode" in chosen:
            self.grad_mode = str(chosen["grad_mode"])

    def build_model(self) -> nn.Module:
        if self._untrained is None:  # drawing 1.5 billion weights takes long, and a trial needs several such models
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                made = self.make_model()
            dtype = torch.bfloat16 if self.chosen.get("weights") == HALF else torch.float32
            self._untrained = made.to(dtype).train(self.trains)
        return deepcopy(self._untrained)

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        if device.type == "cpu" and (reason := gpu_requirement(self.needs_gpu, self.chosen)):
            raise SettingsError(reason)
        length = policy.padded(self.max_length)
        return [self._batch(length, number, rank, device) for number in range(self.pool_batches)]

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        return self._batch(length, self.pool_batches, rank, device)

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        return {}

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.chosen.get("weights") == FROZEN:
                import torch._inductor.config as inductor  # loads the compiler, which a plan does not need

                # As an option of torch.compile it has no effect: Dynamo reads the process's configuration (torch 2.11 to 2.13).
                stack.enter_context(inductor.patch(freezing=True))
            if self.chosen.get("cast_cache") == KEPT:
                stack.enter_context(casts_kept())
            yield

    def process_statements(self) -> Sequence[str]:
        found = []
        if self.chosen.get("weights") == FROZEN:
            found.append("torch._inductor.config.freezing = True  # as an option of torch.compile it does nothing")
        if self.chosen.get("cast_cache") == KEPT:
            found.append("torch.autocast_increment_nesting()  # autocast's casts of the weights last from step to step")
        return found

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        return None if self.chosen.get("weights") == HALF else super().autocast_dtype(device)

    def validate(self, settings: CompileSettings) -> None:
        super().validate(settings)
        chosen = {**self.chosen, **dict(settings.workload or ())}
        if chosen.get("weights") == HALF and chosen.get("cast_cache") == KEPT:
            raise SettingsError(f"workload.weights={HALF} leaves autocast nothing to cast; leave workload.cast_cache={KEPT} out")
        if chosen.get("cast_cache") == KEPT and chosen.get("grad_mode") != "no_grad":
            said = f"workload.cast_cache={KEPT} needs workload.grad_mode=no_grad"
            raise SettingsError(f"{said}: under inference_mode autocast keeps no casts at all")
        if chosen.get("weights") == HALF and settings.autocast not in (None, Autocast.OFF):
            raise SettingsError(f"workload.weights={HALF} needs no autocast; leave autocast={settings.autocast} out")

    def _batch(self, length: int, number: int, rank: int, device: torch.device) -> Batch:
        generator = torch.Generator().manual_seed((self.seed << 24) + (rank << 16) + number)
        inputs = {name: tensor.to(device) for name, tensor in self.tensors(length, generator).items()}
        if self.chosen.get("weights") == HALF:
            inputs = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        return Batch(inputs=inputs, length=length, samples=self.batch_size, tokens=self.batch_size * length)


@contextmanager
def casts_kept() -> Iterator[None]:
    """Keeps autocast's casts of the weights in the block, like one `with torch.autocast` around a whole loop.

    Compiled code does not use them: its graph casts in each call. Changes of the weights after the first step go unnoticed.
    """
    depth = torch.autocast_increment_nesting()
    try:
        yield
    finally:
        while (left := torch.autocast_decrement_nesting()) >= depth:  # an executed export inside entered further levels
            pass
        if left == 0:
            torch.clear_autocast_cache()


DECAY = 0.9998  # decay of the moving average, as in vision recipes


class ImageTraining(Synthetic):
    """A model of images with its loss; images are all of one size."""

    options: ClassVar[Mapping[str, Option]] = {"batch_size": int, "ema": (False, True)}

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        super().take(chosen)
        self.average_decay = DECAY if chosen["ema"] else None

    def regions(self, model: nn.Module) -> Sequence[str]:
        return repeated_blocks(model)

    def parts(self) -> Sequence[str]:
        return ["model", "loss"]
