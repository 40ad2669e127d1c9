"""Settings that decide speed beside torch.compile's own: the memory format and the attention kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from compile_sweep import WorkloadFromModel, load_workload
from compile_sweep.harness.apply import applied
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.choices import MemoryFormat
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.recipes import find_recipe
from orchestrator.plan.space import Target
from workloads.layers import Layers
from workloads.resnet import ResNet

CPU = torch.device("cpu")


def one_step(workload: Any, text: str, model: nn.Module) -> torch.Tensor:
    prepared = prepare(workload, CompileSettings.parse(text), CPU)
    with applied(prepared, model, prepared.optimizer(model)) as step:
        batch = prepared.workload.pool(prepared.policy, rank=0, device=CPU)[0]
        return step(batch)


def strides_seen(model: nn.Module) -> list[bool]:
    """Filled by each convolution that runs: whether its weight and input are in channels-last order."""
    seen: list[bool] = []

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        tensors = (module.weight, inputs[0])
        seen.append(all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors))

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(look)
    return seen


def test_channels_last_reaches_every_convolution() -> None:
    workload = ResNet("tiny", 0)
    model = workload.build_model()
    seen = strides_seen(model)
    one_step(workload, "scope=eager,memory_format=channels_last", model)
    assert seen
    assert all(seen)


def test_channels_last_leaves_the_loss_and_the_pool_as_they_were() -> None:
    workload = ResNet("tiny", 0)
    plain = one_step(workload, "scope=eager", workload.build_model())
    reordered = one_step(workload, "scope=eager,memory_format=channels_last", workload.build_model())
    torch.testing.assert_close(reordered, plain)
    prepared = prepare(workload, CompileSettings.parse("scope=eager"), CPU)
    pixels = workload.pool(prepared.policy, rank=0, device=CPU)[0].inputs["pixel_values"]
    assert pixels.is_contiguous()


def test_a_memory_format_is_refused_where_no_convolution_would_change() -> None:
    workload = Layers("tiny", 0)
    with pytest.raises(SettingsError, match="memory_format=channels_last reorders convolutions with 4-D weights"):
        one_step(workload, "scope=eager,memory_format=channels_last", workload.build_model())
    with pytest.raises(SettingsError, match="5-D weights"):
        one_step(ResNet("tiny", 0), "scope=eager,memory_format=channels_last_3d", ResNet("tiny", 0).build_model())


class Attention(Layers):
    """One attention over rows, which notes the kernels that were allowed while it ran."""

    def make_model(self) -> nn.Module:
        return AttentionModel()


class AttentionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(10, 10)
        self.flash_allowed: list[bool] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.flash_allowed.append(torch.backends.cuda.flash_sdp_enabled())
        heads = self.project(hidden)[None, None]
        return scaled_dot_product_attention(heads, heads, heads).square().mean()


def test_a_kernel_is_chosen_while_the_forward_runs_and_not_beyond() -> None:
    workload = Attention("tiny", 0)
    model = workload.build_model()
    assert torch.backends.cuda.flash_sdp_enabled()
    one_step(workload, "scope=eager,sdpa_kernel=math", model)
    one_step(workload, "scope=eager,sdpa_kernel=flash", model)
    assert model.flash_allowed == [False, True]
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_kernels_of_gpus_are_refused_on_a_cpu(kernel: str) -> None:
    with pytest.raises(SettingsError, match=f"sdpa_kernel={kernel} is a kernel for GPUs"):
        prepare(Layers("tiny", 0), CompileSettings.parse(f"scope=eager,sdpa_kernel={kernel}"), CPU)


@pytest.mark.parametrize(
    ("name", "expected"), [("resnet", "channels_last"), ("layers", None), ("captioning", None), ("gpt2", None)]
)
def test_a_memory_format_is_proposed_where_convolutions_hold_the_weights(name: str, expected: str | None) -> None:
    workload = load_workload(name)(size="tiny", seed=0)
    assert workload.memory_format() == expected


def test_looking_for_convolutions_leaves_the_models_weights_real() -> None:
    workload = ResNet("tiny", 0)
    workload.memory_format()
    assert {parameter.device.type for parameter in workload.build_model().parameters()} == {"cpu"}


def test_an_own_model_of_convolutions_is_found() -> None:
    images = WorkloadFromModel(
        model_fn=lambda: nn.Sequential(nn.Conv2d(3, 64, 5), nn.Flatten(), nn.Linear(64 * 16, 2)),
        batch_fn=lambda number: {"input": torch.zeros(4, 3, 8, 8), "target": torch.zeros(4, dtype=torch.long)},
        loss_fn=lambda output, batch: nn.functional.cross_entropy(output, batch["target"]),
    )
    assert images("only", 0).memory_format() == "channels_last"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_quickstart_tries_channels_last_eager_and_compiled_for_convolutions_alone(has_gpu: bool) -> None:
    def tried(target: Target) -> list[tuple[object, object]]:
        return [(one["scope"], one.get("mode")) for one in find_recipe("quickstart")(target) if "memory_format" in one]

    graphs = [("full", "reduce-overhead")] if has_gpu else []
    convolutions = Target(max_length=1, has_gpu=has_gpu, memory_format=MemoryFormat.CHANNELS_LAST)
    assert tried(convolutions) == [("eager", None), ("full", None), *graphs]
    assert tried(Target(max_length=1, has_gpu=has_gpu)) == []
