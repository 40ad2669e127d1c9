"""Settings applied to real models that are really compiled, on the CPU."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from faulty_workloads import BreaksItsGraph, NanWhenCompiled, WrongWhenCompiled
from torch._dynamo import eval_frame
from torch._dynamo.utils import get_static_address_type
from toy_workloads import Toy

from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import WorkloadFromModel
from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.apply import applied
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.source_runtime import foreach_map_adam
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.outcome import Label, Status, judge_measurement
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning
from workloads.captioning.model import CAPTIONING_SIZES, CaptioningSize

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FURTHER = pytest.mark.nightly("one more combination of settings that other cases cover")
SHORT = Protocol(compared_steps=3, min_passes=2, max_passes=2, cpu_window_s=0.0)


def measured(workload: Workload, spelled: str) -> Measurement:
    torch._dynamo.reset()
    return measure(prepare(workload, CompileSettings.parse(spelled), CPU), protocol=SHORT)


@pytest.mark.parametrize(
    ("spelled", "graphs"),
    [
        ("scope=eager,padding=longest,pad_multiple=4", 0),
        pytest.param("scope=full", 1, marks=FURTHER),
        ("scope=full,dynamic=auto,pad_multiple=4,backend=eager", 2),
        pytest.param("scope=full,dynamic=buckets,bucket_size=8,backend=aot_eager", 2, marks=FURTHER),
        pytest.param("scope=modular", 2, marks=FURTHER),
        pytest.param("scope=modular,dynamic=mark,pad_multiple=4,backend=aot_eager", 2, marks=FURTHER),
        ("scope=regional,backend=aot_eager", 1),
        ("scope=regional,dynamic=mark,pad_multiple=4,backend=aot_eager", 1),
        ("scope=eager,optimizer=fused", 0),
        pytest.param("scope=full,fullgraph=on,backend=aot_eager", 1, marks=FURTHER),
        ("scope=full,backend=eager,dynamic=true,pad_multiple=4", 1),
        ("scope=full,dynamic=mark,dynamic_min=8,dynamic_max=16,pad_multiple=4,backend=eager", 1),
        pytest.param("scope=full,dynamic=mark,dynamic_min=8,pad_multiple=4,backend=aot_eager", 1, marks=FURTHER),
        pytest.param("scope=full,dynamic=mark,dynamic_max=16,pad_multiple=4,backend=aot_eager", 1, marks=FURTHER),
        ("scope=full,dynamic=buckets,buckets=4/10/16,group_window=2,backend=eager", 3),
        ("scope=full,dynamic=mark,pad_multiple=4,inductor.epilogue_fusion=off,shape_padding=off,matmul_precision=high", 1),
        ("scope=full,autocast=bf16,backend=aot_eager", 1),
        pytest.param("scope=full,autocast=fp16,backend=aot_eager", 1, marks=FURTHER),
        pytest.param("scope=modular,parts.loss.compile=off", 1, marks=FURTHER),
        pytest.param("scope=modular,dynamic=mark,pad_multiple=4,parts.body.mode=max-autotune-no-cudagraphs", 2, marks=FURTHER),
        ("scope=full,static_gradients=on,backend=aot_eager", 1),
        ("scope=eager,optimizer=foreach_map", 1),
        pytest.param(
            "scope=full,dynamic=mark,unbacked=on,pad_multiple=4,backend=aot_eager",
            1,
            marks=pytest.mark.skipif(torch_version() < (2, 12), reason="torch 2.11 breaks the graph at the loss"),
        ),
        ("scope=full,dynamic=auto,pad_multiple=4,backend=eager,compiler.dynamic_sources=L['ids']%2CL['labels']", 1),
        pytest.param("scope=full,mode=lite", 1, marks=FURTHER),
        ("scope=full,accumulate=3,dynamic=mark,pad_multiple=4,backend=aot_eager", 1),
    ],
)
def test_a_setting_compiles_as_many_graphs_as_it_says_and_follows_eager(spelled: str, graphs: int) -> None:
    found = measured(Toy("only", 0), spelled)
    assert found.graphs == graphs
    assert found.graph_break_reasons == []
    assert found.recompile_limit_hits == []
    assert found.numerics["status"] == "ok", found.numerics
    steady = {**found.to_dict(), "stable": True}  # two passes on a shared machine are not
    assert judge_measurement(steady, claims_cudagraphs=False).status is Status.OK


@pytest.mark.parametrize(
    ("dynamic", "graphs"), [pytest.param("mark", 1, marks=FURTHER), ("auto", 2), pytest.param("true", 1, marks=FURTHER)]
)
def test_lengths_that_are_not_rounded_begin_at_two_where_sizes_may_change(dynamic: str, graphs: int) -> None:
    settings = CompileSettings.parse(f"scope=full,dynamic={dynamic},pad_multiple=1,backend=eager")
    policy = settings.shape_policy(16)
    assert (policy.padded(1), policy.lengths()) == (2, tuple(range(2, 17)))
    found = measured(Toy("only", 0), settings.key)
    assert found.graphs == graphs
    assert len(found.recompile_reasons) == graphs - 1
    assert found.numerics["status"] == "ok", found.numerics


def test_eager_steps_take_a_length_of_one_as_it_is() -> None:
    assert CompileSettings.parse("scope=eager,padding=longest,pad_multiple=1").shape_policy(16).padded(1) == 1
    assert CompileSettings.parse("scope=full,dynamic=auto,pad_multiple=1").shape_policy(1).lengths() == (1,)


@pytest.mark.nightly("compiles graphs for 16 lengths; test_source.py covers the raised limit in the source")
def test_more_buckets_than_torchs_limit_run_once_the_limit_is_raised_knowingly() -> None:
    found = measured(Toy("only", 0), "scope=full,dynamic=buckets,bucket_size=1,recompile_limit=16,backend=aot_eager")
    assert found.graphs == 16
    assert found.recompile_limit_hits == []


def test_fullgraph_makes_a_graph_break_an_error() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        measured(BreaksItsGraph("only", 0), "scope=full,fullgraph=on,backend=aot_eager")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has no backward on CPUs")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers 5.17 sets it
def test_captioning_runs_flex_attention_in_its_encoder() -> None:
    settings = CompileSettings.parse("scope=regional,attention=flex")
    found = measure(prepare(Captioning("tiny", 0), settings, "cuda"), protocol=SHORT)
    assert found.numerics["status"] == "ok", found.numerics


def test_a_compiled_optimizer_is_one_more_graph_behind_the_break_torch_puts_before_it() -> None:
    found = measured(Toy("only", 0), "scope=full,optimizer=compiled,backend=aot_eager")
    assert found.graphs == 2
    assert ["torch/optim/optimizer.py" in reason for reason in found.graph_break_reasons] == [True]
    assert found.numerics["status"] == "ok", found.numerics


def test_foreach_map_changes_only_what_stays_where_it_is() -> None:
    changed: list[bool] = []

    def seen(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        before = [(tensor, tensor.clone()) for tensor in inputs]

        def run(*given: torch.Tensor) -> object:
            found = graph(*given)
            moved = [now for (_, old), now in zip(before, given, strict=True) if not torch.equal(old, now)]
            changed.extend(isinstance(now, torch.nn.Parameter) or get_static_address_type(now) is not None for now in moved)
            return found

        return run

    model = torch.nn.Linear(3, 2)
    update = foreach_map_adam(torch.optim.Adam(model.parameters()), backend=seen)
    model(torch.ones(1, 3)).sum().backward()
    update()
    assert changed == [True] * 8  # weight and bias, and each one's step and moments


OTHER_FORMULAS = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.0),
    "AdamW with weight_decay": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adam with weight_decay": partial(torch.optim.Adam, weight_decay=0.1),
    "Adam with amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "Adam with maximize": partial(torch.optim.Adam, maximize=True),
}


@pytest.mark.parametrize("own", OTHER_FORMULAS)
def test_foreach_map_is_refused_for_an_optimizer_with_another_formula(own: str) -> None:
    model = torch.nn.Linear(3, 2)
    frozen, decayed = [{"params": [model.bias], "weight_decay": 0.0}], {"params": [model.weight]}
    optimizer = OTHER_FORMULAS[own]([*frozen, decayed], lr=1e-3)
    with pytest.raises(TypeError, match=f"plain Adam's update, and this optimizer is {own}; use optimizer=compiled"):
        foreach_map_adam(optimizer)
    workload = WorkloadFromModel(
        partial(torch.nn.Linear, 3, 2), lambda number: {"x": torch.ones(1, 3)}, lambda model, batch: model(batch["x"]).sum(),
        optimizer_fn=lambda weights, **options: OTHER_FORMULAS[own](weights, lr=1e-3, **options),
    )  # fmt: skip
    with pytest.raises(SettingsError, match=f"this optimizer is {own}; use"):
        measured(workload(), "scope=eager,optimizer=foreach_map")


def test_foreach_map_takes_adam_with_several_groups() -> None:
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    update = foreach_map_adam(torch.optim.Adam(groups, lr=0.01), backend="eager")
    before = [model.weight.clone(), model.bias.clone()]
    model(torch.ones(1, 3)).sum().backward()
    update()
    torch.testing.assert_close(
        [before[0] - model.weight, before[1] - model.bias], [torch.full((2, 3), 0.1), torch.full((2,), 0.01)]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["compiled", "foreach_map"])
def test_an_optimizers_update_is_a_cuda_graph(optimizer: str) -> None:
    settings = CompileSettings.parse(f"scope=full,mode=reduce-overhead,optimizer={optimizer}")
    found = measure(prepare(Toy("only", 0), settings, "cuda"), protocol=SHORT)
    assert (found.cudagraph_skips, found.cudagraph_skip_reasons) == (0, [])
    assert found.numerics["status"] == "ok", found.numerics


@pytest.fixture
def few_captions(monkeypatch: pytest.MonkeyPatch) -> CaptioningSize:
    """Captioning's smallest size with a fifth of the batches."""
    size = replace(CAPTIONING_SIZES["tiny"], pool_batches=4)
    monkeypatch.setitem(CAPTIONING_SIZES, "tiny", size)
    return size


@pytest.mark.usefixtures("few_captions")
@pytest.mark.parametrize("attention", [pytest.param("eager", marks=FURTHER), "unmasked"])
def test_regional_captioning_compiles_each_kind_of_block_once_for_all_depths_and_lengths(attention: str) -> None:
    found = measured(Captioning("tiny", 0), f"scope=regional,dynamic=mark,backend=eager,attention={attention}")
    assert found.graphs == 2  # the encoder's block and the decoder's
    assert (found.recompile_reasons, found.fallbacks, found.graph_break_reasons) == ([], [], [])
    assert found.numerics["status"] == "ok", found.numerics
    assert f'set_attn_implementation("{attention.replace("unmasked", "sdpa_unmasked")}")' in found.source


def test_full_captioning_is_one_graph_without_breaks(few_captions: CaptioningSize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPTIONING_SIZES, "tiny", replace(few_captions, layers=1))  # of two, the second is traced as the first
    found = measured(Captioning("tiny", 0), "scope=full,backend=aot_eager")
    assert found.graphs == 1
    assert (found.recompile_reasons, found.fallbacks, found.graph_break_reasons) == ([], [], [])
    assert found.numerics["status"] == "ok", found.numerics


def test_a_stance_holds_while_the_settings_are_applied() -> None:
    settings = CompileSettings.parse("scope=full,dynamic=auto,stance=eager_then_compile,backend=aot_eager")
    prepared = prepare(Toy("only", 0), settings, CPU)
    model = prepared.workload.build_model()
    with applied(prepared, model, prepared.optimizer(model)):
        assert eval_frame._stance.stance == "eager_then_compile"
    assert eval_frame._stance.stance == "default"


def test_a_compiled_nan_is_labelled_and_infeasible() -> None:
    nan = measured(NanWhenCompiled("only", 0), "scope=full,backend=aot_eager")
    verdict = judge_measurement(nan.to_dict(), claims_cudagraphs=False)
    assert (verdict.status, verdict.label) == (Status.INFEASIBLE, Label.NAN)


def test_a_silently_wrong_loss_is_labelled_and_infeasible() -> None:
    wrong = measured(WrongWhenCompiled("only", 0), "scope=full,backend=aot_eager")
    verdict = judge_measurement(wrong.to_dict(), claims_cudagraphs=False)
    assert (verdict.status, verdict.label) == (Status.INFEASIBLE, Label.DIVERGES)


def test_a_hit_recompile_limit_is_noticed_and_infeasible() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        found = measured(Toy("only", 0), "scope=full,dynamic=buckets,bucket_size=4,backend=eager")
    verdict = judge_measurement(found.to_dict(), claims_cudagraphs=False)
    assert (verdict.status, verdict.label) == (Status.INFEASIBLE, Label.RECOMPILE_LIMIT)
    assert verdict.reason is not None
    assert "forward" in verdict.reason


@pytest.mark.parametrize(("limit", "is_reported"), [(2, False), (64, True)])
def test_what_runs_eagerly_reports_no_early_figures_by_which_it_would_be_stopped(limit: int, is_reported: bool) -> None:
    """Stopped as dominated, it would not say why it is slow, nor what helps."""
    settings, reported = CompileSettings.parse("scope=full,dynamic=buckets,bucket_size=4,backend=eager"), []
    with torch._dynamo.config.patch(recompile_limit=limit):
        found = measure(prepare(Toy("only", 0), settings, CPU), protocol=SHORT, on_early=reported.append)
    assert (len(reported), found.recompile_limit_hits == []) == (int(is_reported), is_reported)


def test_a_graph_break_is_counted_with_its_reason_and_no_path_of_this_machine() -> None:
    found = measured(BreaksItsGraph("only", 0), "scope=full,backend=eager")
    assert found.graphs == 2
    assert len(found.graph_break_reasons) == 1
    assert "faulty_workloads.py" in found.graph_break_reasons[0]
    assert "/tests/" not in found.graph_break_reasons[0]


def test_forwards_are_put_back() -> None:
    workload = Toy("only", 0)
    model = workload.build_model()
    settings = CompileSettings.parse("scope=regional,dynamic=mark,pad_multiple=4")
    optimizer = workload.optimizer(model, settings.optimizer)
    with applied(prepare(workload, settings, CPU), model, optimizer):
        assert all("forward" in model.get_submodule(name).__dict__ for name in workload.regions(model))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_executed_source_is_a_module_only_while_it_is_applied() -> None:
    def known() -> list[str]:
        return [name for name in sys.modules if name.startswith("compile_settings_")]

    workload = Toy("only", 0)
    model = workload.build_model()
    settings = CompileSettings.parse("scope=eager,optimizer=foreach_map")
    names = []
    for _ in range(2):
        optimizer = workload.optimizer(model, settings.optimizer)
        prepared = prepare(workload, settings, CPU)
        with applied(prepared, model, optimizer) as step, applied(prepared, model, optimizer):
            (name,) = known()
            names.append(name)
            assert hashlib.sha256(step.source.encode()).hexdigest().startswith(name.removeprefix("compile_settings_"))
        assert known() == []
    assert names[0] == names[1]


def test_captioning_switches_cudnn_attention_off_only_while_it_runs() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with Captioning("tiny", 0).process_settings():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
