"""Settings besides torch.compile's own that decide speed: the memory format and the attention kernel."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from compile_sweep import WorkloadFromModel, load_workload
from compile_sweep.contract.inspect_model import preferred_memory_format
from compile_sweep.harness.apply import applied
from compile_sweep.harness.numerics.references import precision_of
from compile_sweep.harness.numerics.tolerance import FLOAT8_ROUNDING
from compile_sweep.harness.prepare import prepare, refuse_float8
from compile_sweep.harness.source import sdpa_backends
from compile_sweep.harness.source_runtime import use_float8
from compile_sweep.schema.choices import Float8Recipe, MemoryFormat, SdpaKernel
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.recipes import candidates, find_recipe
from orchestrator.plan.space import Target, choose, unsupported
from workloads.layers import Layers
from workloads.resnet import ResNet

CPU = torch.device("cpu")


def one_step(workload: Any, text: str, model: nn.Module) -> torch.Tensor:
    prepared = prepare(workload, CompileSettings.parse(text), CPU)
    with applied(prepared, model, prepared.optimizer(model)) as step:
        batch = prepared.workload.pool(prepared.policy, rank=0, device=CPU)[0]
        return step(batch)


def strides_seen(model: nn.Module) -> list[bool]:
    """Returns a list to which each convolution that runs adds whether its weight and input are channels-last."""
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
    """One attention over rows, which records the allowed kernels while it ran."""

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


@pytest.mark.parametrize(
    ("kernel", "backends"),
    [
        (SdpaKernel.EFFICIENT, ["EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"]),
        (SdpaKernel.CUDNN, ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        (SdpaKernel.MATH, ["MATH"]),
    ],
)
def test_faster_kernels_than_math_handle_what_the_chosen_one_cannot(kernel: SdpaKernel, backends: list[str]) -> None:
    assert sdpa_backends(kernel) == backends
    assert all(hasattr(SDPBackend, name) for name in backends)


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


def test_batches_of_one_shape_are_compiled_as_torch_compile_comes_and_have_one_eager_setting() -> None:
    target = Target(max_length=1, has_gpu=False, memory_format=MemoryFormat.CHANNELS_LAST)
    chosen = choose(candidates("quickstart", target), target)
    assert chosen.excluded == ()
    assert [setting.label for setting in chosen.settings] == [
        "eager",
        "eager, memory format channels_last",
        "full, default, auto, memory format channels_last",
        "regional, default, auto",
        "full, default, auto",
    ]
    assert {setting.num_graphs(1) for setting in chosen.settings} == {0, 1}


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


class Residual(nn.Module):
    """A block with dropout, which counts the runs of its forward."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            Residual.runs += 1
        update = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + nn.functional.dropout(update, 0.1, self.training)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def token_batch(number: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(20, (4, 16 - 8 * (number % 2)))}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["ids"])
    return loss


def gradients_of(text: str) -> dict[str, torch.Tensor]:
    """Returns the gradients of one step of the stack, by parameter."""
    torch._dynamo.reset()
    workload = WorkloadFromModel(Stack, token_batch, loss_of, num_batches=2)()
    prepared = prepare(workload, CompileSettings.parse(text), CPU)
    model = workload.build_model()
    found: dict[str, torch.Tensor] = {}

    def look() -> None:
        found.update({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})

    with applied(prepared, model, prepared.optimizer(model)) as step:
        torch.manual_seed(1)
        Residual.runs = 0  # the model was run to inspect it
        step(prepared.workload.pool(prepared.policy, rank=0, device=CPU)[0], before_update=look)
    assert not any("forward" in vars(module) for module in model.modules())
    return found


@pytest.fixture(scope="module")
def eager_gradients() -> dict[str, torch.Tensor]:
    return gradients_of("scope=eager")


EAGER_BACKEND = "backend=aot_eager"
"""Draws the same random numbers as eager, so that gradients can be compared."""

FURTHER = pytest.mark.nightly("one more combination of settings that other cases cover")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "scope=eager,activation_checkpointing=blocks",
        pytest.param(f"scope=full,activation_checkpointing=blocks,{EAGER_BACKEND}", marks=FURTHER),
        f"scope=regional,activation_checkpointing=blocks,{EAGER_BACKEND}",
        pytest.param(f"scope=regional,dynamic=mark,activation_checkpointing=blocks,{EAGER_BACKEND}", marks=FURTHER),
        f"scope=nested,{EAGER_BACKEND}",
        pytest.param(f"scope=nested,dynamic=mark,{EAGER_BACKEND}", marks=FURTHER),
        f"scope=nested,activation_checkpointing=blocks,{EAGER_BACKEND}",
    ],
)
def test_recomputed_and_nested_blocks_have_eagers_gradients(text: str, eager_gradients: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(gradients_of(text), eager_gradients)


def test_checkpointed_blocks_run_their_forward_twice() -> None:
    for text, runs in (("scope=eager", 3), ("scope=eager,activation_checkpointing=blocks", 6)):
        gradients_of(text)
        assert Residual.runs == runs


@pytest.mark.slow
def test_nested_blocks_are_one_region_of_one_graph() -> None:
    workload = WorkloadFromModel(Stack, token_batch, loss_of, num_batches=2)()
    prepared = prepare(workload, CompileSettings.parse("scope=nested,backend=aot_eager"), CPU)
    model = workload.build_model()
    regions: list[list[str]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        regions.append([str(node.args[0].target) for node in graph.graph.nodes if "invoke_subgraph" in str(node.target)])
        return aot_eager(graph, inputs)

    torch._dynamo.register_backend(look, name="toy_look_at_regions")
    settings = CompileSettings.parse("scope=nested,backend=toy_look_at_regions")
    with applied(prepared.with_settings(settings), model, prepared.optimizer(model)) as step:
        step(prepared.workload.pool(prepared.policy, rank=0, device=CPU)[0])
    assert [len(calls) for calls in regions] == [3]
    assert len(set(regions[0])) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scope=nested", "scope=nested: the model of .* has no repeated blocks; use scope=full"),
        ("scope=eager,activation_checkpointing=blocks", "activation_checkpointing=blocks: .* no repeated blocks; leave it out"),
    ],
)
def test_blocks_that_are_not_there_are_said_to_be_missing(text: str, message: str) -> None:
    workload = WorkloadFromModel(lambda: nn.Linear(4, 4), lambda number: {"x": torch.ones(2, 4)}, square, num_batches=2)()
    with pytest.raises(SettingsError, match=message):
        one_step(workload, text, workload.build_model())


def square(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().mean()
    return loss


def test_torchs_configuration_is_set_while_settings_are_applied_and_put_back() -> None:
    workload = WorkloadFromModel(lambda: nn.Linear(4, 4), lambda number: {"x": torch.ones(2, 4)}, square, num_batches=2)()
    text = (
        "scope=full,backend=eager,dynamo.specialize_float=on,functorch.treat_parameters_as_free_to_save=off,"
        "compiler.force_disable_caches=on"
    )
    prepared = prepare(workload, CompileSettings.parse(text), CPU)
    before = configuration()
    model = workload.build_model()
    with applied(prepared, model, prepared.optimizer(model)) as step:
        assert configuration() == (True, False, True)
        assert "torch._dynamo.config.specialize_float = True" in step.source
    assert configuration() == before != (True, False, True)


def configuration() -> tuple[bool, bool, bool]:
    return (
        torch._dynamo.config.specialize_float,
        torch._functorch.config.treat_parameters_as_free_to_save,
        torch.compiler.config.force_disable_caches,
    )


def test_a_memory_budget_is_torchs_own_setting() -> None:
    workload = WorkloadFromModel(Stack, token_batch, loss_of, num_batches=2)()
    prepared = prepare(workload, CompileSettings.parse("scope=full,activation_memory_budget=0.5"), CPU)
    assert "torch._functorch.config.activation_memory_budget = 0.5\n" in prepared.source(workload.build_model())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dynamo.specialise_float=on",
            r"torch\._dynamo\.config has no setting 'specialise_float'; did you mean specialize_float",
        ),
        ("functorch.nothing_like_it=1", r"torch\._functorch\.config has no setting 'nothing_like_it'"),
        ("dynamo.specialize_float=3", "dynamo.specialize_float=3 is not a value that torch takes there; use on or off"),
        ("inductor.triton.cudagraph_trees=1/2", "inductor.triton.cudagraph_trees=1/2 is not a value that torch takes there"),
    ],
)
def test_configuration_that_the_installed_torch_lacks_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        prepare(Layers("tiny", 0), CompileSettings.parse(text), CPU)


def test_a_list_of_sizes_reaches_inductor_as_one() -> None:
    settings = CompileSettings.parse("inductor.triton.cudagraph_capture_sizes=16/32/64")
    prepared = prepare(Layers("tiny", 0), settings, CPU)
    assert '"triton.cudagraph_capture_sizes": (16, 32, 64)' in prepared.source(Layers("tiny", 0).build_model())


def test_convolutions_before_a_large_classifier_count_although_it_holds_the_weights() -> None:
    vgg = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 28 * 28, 64))
    patches = nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), nn.Flatten(2), *(nn.Linear(64, 64) for _ in range(6)))
    assert preferred_memory_format(vgg) is MemoryFormat.CHANNELS_LAST
    assert preferred_memory_format(patches) is None


class Layers48(nn.Module):
    """Two layers whose widths are multiples of 16, one that is not, one with a hook and one of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, 10)
        self.hooked, self.own = nn.Linear(48, 48), Doubled(48, 48)
        self.hooked.register_forward_hook(lambda module, inputs, output: output)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.hooked(self.second(self.first(rows).relu()))
        return torch.as_tensor(self.odd(self.own(rows)).square().mean())


class Doubled(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


@pytest.mark.parametrize("recipe", [str(one) for one in Float8Recipe])
def test_float8_layers_share_the_weights_and_round_as_coarsely_as_they_are_allowed(recipe: str, monkeypatch: Any) -> None:
    float8 = pytest.importorskip("torchao.float8")
    of_name = float8.Float8LinearConfig.from_recipe_name
    emulated = staticmethod(lambda name: replace(of_name(name), emulate=True))  # computes in float32 what a GPU would in float8
    monkeypatch.setattr(float8.Float8LinearConfig, "from_recipe_name", emulated)
    torch.manual_seed(1)
    model, rows = Layers48(), torch.randn(24, 48)
    weights, plain = list(model.parameters()), model(rows)
    plain_gradient = torch.autograd.grad(plain, model.first.weight)[0]
    use_float8(model, recipe)
    assert [name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"] == ["first", "second"]
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    loss = model(rows)
    loss.backward()
    gradient = model.first.weight.grad
    assert gradient is not None
    off = (gradient - plain_gradient).norm() / plain_gradient.norm()
    assert loss != plain
    assert abs(loss / plain - 1) < FLOAT8_ROUNDING
    assert 0.001 < off < 4 * FLOAT8_ROUNDING


def test_float8_is_refused_where_nothing_computes_it(monkeypatch: Any) -> None:
    settings = CompileSettings.parse("scope=full,float8=tensorwise")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if torchao were installed
    with pytest.raises(SettingsError, match=r"needs a GPU that multiplies in float8 .* and this is a CPU"):
        refuse_float8(settings, nn.Linear(16, 16), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refuse_float8(settings, nn.Linear(16, 16), torch.device("cuda"))
    with pytest.raises(SettingsError, match="widths are multiples of 16, and the model has none"):
        refuse_float8(settings, nn.Linear(10, 16), torch.device("cuda"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="needs torchao, which is not installed; run pip install torchao"):
        refuse_float8(settings, nn.Linear(16, 16), torch.device("cuda"))
    assert "needs a GPU, and none is visible" in str(unsupported(settings, Target(max_length=1, has_gpu=False)))


def test_what_float8_may_change_follows_from_its_rounding() -> None:
    plain, coarse = (CompileSettings.parse(text) for text in ("scope=full", "scope=full,float8=rowwise"))
    assert precision_of(plain, torch.bfloat16, torch.float32)[0] < precision_of(coarse, torch.bfloat16, torch.float32)[0] == 2**-4
    assert coarse.eager_counterpart() == plain.eager_counterpart()
    assert "float8 tensorwise" in CompileSettings.parse("scope=eager,float8=tensorwise").label
