"""What disabling cuDNN attention costs the captioning workload, and whether the numerics check catches the fault that it avoids.

Background: the workload runs without cuDNN attention because its backward gives NaN (docs/log.md).
Output of `python benchmarks/numerics/cudnn_attention.py`: steps/s of eager training with cuDNN attention off and on, in turn,
ABAB, in one process. `CaptioningWithCudnn` is the workload as it would be without that guard, at Adam's default learning rate; a
sweep of it must label what goes wrong:

    python -m orchestrator.sweep quickstart --workload benchmarks.numerics.cudnn_attention:CaptioningWithCudnn --output DIR
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from compile_sweep import command_line
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning

ROUNDS = 2


class CaptioningWithCudnn(Captioning):
    """Captioning with torch's own choice of attention and Adam's default learning rate."""

    learning_rate = 1e-3

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        """Keeps torch's defaults."""
        yield

    def process_statements(self) -> Sequence[str]:
        """Returns no statements."""
        return ()


class CaptioningCudnnOnly(CaptioningWithCudnn):
    """Only the attention differs from the workload."""

    learning_rate = Captioning.learning_rate


def main() -> int:
    """Prints both rates and their ratio; returns the command's exit code."""
    return command_line.run(_compare)


def _compare() -> int:
    if not torch.cuda.is_available():
        raise ConfigError("cuDNN's attention needs a CUDA device, and this machine has none")
    settings = CompileSettings.parse("scope=eager,padding=max")
    protocol = Protocol(compared_steps=1, max_passes=3)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for name, workload in (("off", Captioning), ("on", CaptioningCudnnOnly)):
            found = measure(prepare(workload("base", 0), settings, "cuda"), protocol=protocol)
            rates[name].append(1e3 / found.step_ms_median)
    off, on = (statistics.fmean(rates[name]) for name in ("off", "on"))
    print(f"{settings.label}, steps/s: cuDNN attention off {rates['off']}, on {rates['on']}; off/on {off / on:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
