"""The captioning model's variations: queries, keys and values from one product, and the residual stream in autocast's dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

from compile_sweep.contract.base import Batch
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning

CPU = torch.device("cpu")


def step(setting: str, *, autocast: bool, backend: str | None = None) -> tuple[float, dict[str, Tensor], set[torch.dtype]]:
    """Returns loss, gradients, and the dtypes that blocks are given, of one step on the same weights and batch."""
    settings = CompileSettings.parse(setting)
    workload = Captioning("tiny", 0).under(settings)
    batch: Batch = workload.batch_of_length(16, rank=0, device=CPU)
    model = workload.build_model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    dtypes: set[torch.dtype] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: dtypes.add(inputs[0].dtype))
        for module in model.modules()
        if isinstance(module, ViTLayer | GPT2Block)
    ]
    if backend is not None:
        for hook in hooks:
            hook.remove()
    forward = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = forward(**batch.inputs)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss.detach()), gradients, dtypes


def test_queries_keys_and_values_from_one_product_give_the_same_loss_and_gradients() -> None:
    loss, gradients, _ = step("scope=eager", autocast=False)
    merged_loss, merged_gradients, _ = step("scope=eager,workload.qkv=merged", autocast=False)
    assert merged_loss == pytest.approx(loss, rel=1e-6)
    assert merged_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(merged_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_residual_stream_has_autocasts_dtype_only_where_it_is_asked_for() -> None:
    loss, gradients, dtypes = step("scope=eager", autocast=True)
    cast_loss, cast_gradients, cast_dtypes = step("scope=eager,workload.residual=autocast", autocast=True)
    assert (dtypes, cast_dtypes) == ({torch.float32}, {torch.bfloat16})
    assert cast_loss == pytest.approx(loss, rel=5e-3)
    assert cast_gradients.keys() == gradients.keys()
    norm, cast_norm = (sum(float(one.square().sum()) for one in found.values()) for found in (gradients, cast_gradients))
    assert cast_norm == pytest.approx(norm, rel=2e-2)
    assert step("scope=eager,workload.residual=autocast", autocast=False)[0] == step("scope=eager", autocast=False)[0]


@pytest.mark.slow
def test_both_are_one_graph_with_the_loss_of_eager() -> None:
    setting = "scope=eager,workload.qkv=merged,workload.residual=autocast"
    assert step(setting, autocast=True, backend="eager")[0] == pytest.approx(step(setting, autocast=True)[0], rel=5e-3)
