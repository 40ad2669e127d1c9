"""Settings as Python: the text is what a person can paste, and what was measured."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_sweep.harness.apply import applied
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.source import Facts, fixes_sizes, to_source
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning

CPU = torch.device("cpu")

SPELLED = [
    "scope=eager,padding=longest,group_window=10",
    "scope=full",
    "scope=full,mode=max-autotune-no-cudagraphs,fullgraph=on,optimizer=compiled",
    "scope=full,dynamic=mark,dynamic_min=16,dynamic_max=64,shape_padding=off",
    "scope=full,dynamic=buckets,buckets=16/40/64,recompile_limit=12,matmul_precision=high",
    "scope=full,backend=aot_eager,dynamic=true",
    "scope=full,dynamic=auto,pad_multiple=1",
    "scope=eager,padding=longest,pad_multiple=1",
    "scope=regional,dynamic=mark,optimizer=fused,group_window=100",
    "scope=regional,inductor.coordinate_descent_tuning=on,inductor.max_autotune_gemm_backends=ATEN%2CTRITON",
    "scope=modular,dynamic=mark,parts.encoder.mode=max-autotune-no-cudagraphs,parts.loss.compile=off",
    "scope=full,optimizer=foreach_map,static_gradients=on,autocast=fp16",
    "scope=full,mode=reduce-overhead,autocast=off,attention=eager",
    "scope=regional,dynamic=auto,attention=unmasked",
    "scope=full,memory_format=channels_last,sdpa_kernel=flash,mode=reduce-overhead",
    "scope=modular,dynamic=mark,unbacked=on",
    "scope=full,dynamic=mark,accumulate=4,autocast=fp16,mode=reduce-overhead",
]


def source_of(spelled: str, *, torch_version: tuple[int, int] = (2, 13)) -> str:
    workload = Captioning("tiny", 0)
    facts = Facts(
        workload="captioning",
        device_type="cuda",
        torch_version=torch_version,
        max_length=workload.max_length,
        targets={name: workload.dynamic_dims(name) for name in (workload.parts() if "modular" in spelled else [""])},
        autocast="bfloat16",
        attention=None,
    )
    return to_source(CompileSettings.parse(spelled), facts)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return Captioning("tiny", 0).build_model()


@pytest.mark.parametrize("spelled", SPELLED)
def test_what_is_written_is_valid_and_names_the_setting(spelled: str, model: torch.nn.Module) -> None:
    settings = CompileSettings.parse(spelled)
    source = prepare(Captioning("tiny", 0), settings, CPU).source(model)
    tree = ast.parse(source)
    assert settings.key in (ast.get_docstring(tree) or "")
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    allowed = {"__future__", "inspect", "random", "collections", "types", "typing", "torch"}
    if settings.attention == "unmasked":
        allowed.add("transformers")
    assert {str(name).split(".")[0] for name in imported} <= allowed


@pytest.mark.parametrize("spelled", SPELLED)
def test_the_written_padding_is_that_of_the_measured_batches(spelled: str, model: torch.nn.Module) -> None:
    settings = CompileSettings.parse(spelled)
    namespace: dict[str, Any] = {}
    workload = Captioning("tiny", 0)
    source = prepare(workload, settings, CPU).source(model).replace("torch._dynamo.config.recompile_limit", "_")
    with workload.process_settings():  # restores what the source sets for the process
        exec(source, namespace)
    torch.set_float32_matmul_precision("highest")
    policy = settings.shape_policy(64)
    assert [namespace["padded_length"](longest) for longest in range(1, 65)] == [policy.padded(n) for n in range(1, 65)]
    with pytest.raises(ValueError, match=r"^65 tokens are above 64, the most that was measured; sweep again$"):
        namespace["padded_length"](65)
    if settings.group_window:
        lengths = [(7 * i) % 60 + 1 for i in range(200)]
        assert namespace["group_by_length"](lengths, 4, settings.group_window) == policy.batches(lengths, 4)


@pytest.mark.parametrize(
    ("spelled", "line"),
    [
        ("scope=full", "return torch.compile(model, dynamic=False)"),
        ("scope=full,dynamic=auto", "return torch.compile(model)"),
        ("scope=full,mode=reduce-overhead", 'return torch.compile(model, dynamic=False, mode="reduce-overhead")'),
        ("scope=full,fullgraph=on,backend=eager", 'return torch.compile(model, fullgraph=True, backend="eager", dynamic=False)'),
        (
            "scope=full,mode=max-autotune,inductor.max_autotune_gemm_backends=TRITON",
            'options={**list_mode_options("max-autotune"), "max_autotune_gemm_backends": "TRITON"}',
        ),
        ("scope=full,dynamic=mark,dynamic_min=16", "mark(inputs, DIMS, min=16, max=64)"),
        ("scope=full,dynamic=mark,dynamic_max=80", "mark(inputs, DIMS, min=2, max=80)"),
        ("scope=full,matmul_precision=high", 'torch.set_float32_matmul_precision("high")'),
        ("scope=full,recompile_limit=12", "torch._dynamo.config.recompile_limit = 12"),
        ("scope=full,mode=reduce-overhead", "torch.compiler.cudagraph_mark_step_begin()"),
        ("scope=full,optimizer=compiled", "update = torch.compile(optimizer.step, dynamic=False)"),
        ("scope=full,optimizer=fused", 'OPTIMIZER_OPTIONS = {"fused": True}'),
        ("scope=full,optimizer=foreach_map", "update = foreach_map_adam(optimizer, dynamic=False)"),
        ("scope=full,static_gradients=on", "optimizer.zero_grad(set_to_none=False)"),
        ("scope=full,autocast=fp16", 'with torch.autocast("cuda", dtype=torch.float16):'),
        ("scope=full", 'with torch.autocast("cuda", dtype=torch.bfloat16):'),
    ],
)
def test_each_field_is_written_as_what_torch_calls_it(spelled: str, line: str) -> None:
    assert line in source_of(spelled)


@pytest.mark.parametrize(
    "names",
    [
        [f"blocks.{i}" for i in range(12)],
        ["block00", "block01", "block02"],
        [f"layer{i:02d}" for i in range(12)],
        ["stages.0.block01", "stages.1.block01", "stages.0.blocks.0", "stages.0.blocks.1"],
        ["h.0.mlp", "h.1.mlp", "h.2.mlp", "head", "h.10.01", "0", "1", "01"],
    ],
)
def test_blocks_are_written_under_their_own_names(names: list[str]) -> None:
    facts = Facts(
        workload="w", device_type="cpu", torch_version=(2, 13), max_length=64, targets={name: {} for name in names},
        autocast=None, attention=None,
    )  # fmt: skip
    source = to_source(CompileSettings.parse("scope=regional"), facts)
    (written,) = re.findall(r"^BLOCKS = (.*)$", source, re.MULTILINE)
    assert sorted(eval(written)) == sorted(names)


def test_no_autocast_and_no_marks_where_none_are_asked_for() -> None:
    source = source_of("scope=full,autocast=off")
    assert "autocast(" not in source
    assert "mark" not in source


@pytest.mark.parametrize("dynamic", ["mark", "auto", "true"])
def test_dynamic_sizes_before_torch_2_13_go_without_padded_matrix_products(dynamic: str) -> None:
    assert '"shape_padding": False' in source_of(f"scope=full,dynamic={dynamic}", torch_version=(2, 12))
    assert "shape_padding" not in source_of(f"scope=full,dynamic={dynamic}", torch_version=(2, 13))
    assert "shape_padding" not in source_of("scope=full,dynamic=buckets", torch_version=(2, 12))


def test_one_shape_keeps_padded_matrix_products() -> None:
    auto = CompileSettings.parse("scope=full,dynamic=auto")
    assert fixes_sizes(auto, (2, 12), changes=True)
    assert not fixes_sizes(auto, (2, 12), changes=False)


def test_other_back_ends_are_given_no_option_of_inductor() -> None:
    assert "shape_padding" not in source_of("scope=full,dynamic=auto,backend=aot_eager", torch_version=(2, 12))


def test_max_autotune_before_torch_2_13_shares_the_workers_assembler() -> None:
    line = "compile_tasks._set_triton_ptxas_path()"
    assert line in source_of("scope=full,mode=max-autotune", torch_version=(2, 11))
    assert line in source_of("scope=modular,parts.encoder.mode=max-autotune", torch_version=(2, 12))
    assert line not in source_of("scope=full,mode=max-autotune", torch_version=(2, 13))
    assert line not in source_of("scope=full", torch_version=(2, 11))


def test_torch_looks_at_each_weight_where_it_would_overlook_unfrozen_ones() -> None:
    line = "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False"
    assert line in source_of("scope=regional", torch_version=(2, 11))
    assert line not in source_of("scope=regional", torch_version=(2, 12))
    assert line not in source_of("scope=eager", torch_version=(2, 11))


def test_compile_workers_start_with_the_import_where_inductor_compiles_for_a_gpu() -> None:
    assert "maybe_warm_pool()" in source_of("scope=full")
    assert "maybe_warm_pool" not in source_of("scope=eager")
    assert "maybe_warm_pool" not in source_of("scope=full,backend=aot_eager")


def test_unmasked_attention_gives_the_loss_and_gradients_of_the_masked_one(model: torch.nn.Module) -> None:
    workload = Captioning("tiny", 0)
    found = []
    for spelled in ("scope=eager", "scope=eager,attention=unmasked"):
        copy = workload.build_model().eval()
        settings = CompileSettings.parse(spelled)
        batch = workload.pool(settings.shape_policy(64), rank=0, device=CPU)[0]
        gradients: list[torch.Tensor] = []
        with applied(prepare(workload, settings, CPU), copy, workload.optimizer(copy, settings.optimizer)) as step:
            loss = step(batch, before_update=lambda g=gradients, c=copy: g.extend(p.grad.clone() for p in c.parameters()))  # type: ignore[misc]
        found.append((loss, torch.cat([gradient.flatten() for gradient in gradients])))
    (loss, gradients_masked), (loss_unmasked, gradients_unmasked) = found
    torch.testing.assert_close(loss_unmasked, loss)
    assert (gradients_unmasked - gradients_masked).norm() / gradients_masked.norm() < 1e-5


def test_a_part_the_workload_lacks_is_refused_with_those_it_has(model: torch.nn.Module) -> None:
    settings = CompileSettings.parse("scope=modular,parts.encodr.mode=default")
    with pytest.raises(SettingsError, match=r"parts.encodr: .* has no such part; use encoder, decoder, loss"):
        prepare(Captioning("tiny", 0), settings, CPU).source(model)


@pytest.mark.parametrize(
    ("spelled", "complaint"),
    [
        (
            "inductor.coordinate_descent_tunning=on",
            "no option 'coordinate_descent_tunning'; did you mean coordinate_descent_tuning",
        ),
        ("backend=inductr", "no backend 'inductr'; did you mean inductor"),
    ],
)
def test_a_name_torch_does_not_know_is_refused_with_the_nearest(spelled: str, complaint: str, model: torch.nn.Module) -> None:
    with pytest.raises(SettingsError, match=complaint):
        prepare(Captioning("tiny", 0), CompileSettings.parse(spelled), CPU)


def test_process_wide_settings_are_put_back() -> None:
    workload = Captioning("tiny", 0)
    model = workload.build_model()
    settings = CompileSettings.parse("scope=full,recompile_limit=12,matmul_precision=medium")
    before = torch._dynamo.config.recompile_limit, torch.get_float32_matmul_precision()
    with applied(prepare(workload, settings, CPU), model, workload.optimizer(model, settings.optimizer)) as step:
        assert (torch._dynamo.config.recompile_limit, torch.get_float32_matmul_precision()) == (12, "medium")
        assert "recompile_limit = 12" in step.source
    assert (torch._dynamo.config.recompile_limit, torch.get_float32_matmul_precision()) == before


PASTED = """
import sys, torch
import pasted

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, hidden):
        return hidden + self.linear(hidden).relu()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
    def forward(self, hidden):
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()

torch.manual_seed(0)
model = Model()
step = pasted.make_step(model, torch.optim.Adam(model.parameters(), **pasted.OPTIMIZER_OPTIONS))
losses = [step({"hidden": torch.ones(2, pasted.padded_length(n), 8)}).item() for n in (5, 11, 23, 40)]
assert losses[-1] < losses[0], losses
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(graphs, sorted(name for name in ("compile_sweep", "workloads", "orchestrator", "ray") if name in sys.modules))
"""


@pytest.mark.slow
def test_pasted_source_runs_where_only_torch_is_and_compiles_one_graph_for_all_lengths(tmp_path: Path) -> None:
    facts = Facts(
        workload="pasted",
        device_type="cpu",
        torch_version=(2, 13),
        max_length=64,
        targets={f"blocks.{i}": {"hidden": (1,)} for i in range(3)},
        autocast=None,
        attention=None,
    )
    settings = CompileSettings.parse("scope=regional,dynamic=mark,optimizer=fused")
    (tmp_path / "pasted.py").write_text(to_source(settings, facts), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-c", PASTED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_VEC_ISA_OK": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "1 []"


def test_float8_layers_come_before_what_is_compiled() -> None:
    source = source_of("scope=full,float8=rowwise_with_gw_hp")
    assert source.index('use_float8(model, "rowwise_with_gw_hp")') < source.index("forward = compile_model(model)")
    assert "def suits_float8" in source
    ast.parse(source)
    assert "float8" not in source_of("scope=full")
