"""The workloads other than captioning, each in its size for two cores: right when compiled, and their options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compile_sweep.contract.base import Workload, load_workload
from compile_sweep.contract.workload_names import BUILT_IN
from compile_sweep.describe import describe
from compile_sweep.harness.apply import applied
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.source_runtime import moving_average
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToMax
from orchestrator.plan.space import Target, choose
from workloads.decoder import Decoder
from workloads.detection import MATCHINGS, DetectionLoss, DetectionModel, generalized_overlap, matching_costs
from workloads.gpt2 import Gpt2, Gpt2Inference
from workloads.segmentation import Segmentation

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=2, visits=1, min_passes=1, max_passes=1, cpu_window_s=0.0, eager_batches=0)

FURTHER = pytest.mark.nightly("another variant of a workload; `make test` compiles each workload once")

SLOWEST = pytest.mark.nightly("its graph takes 15 s to trace; `make test` compiles the other workloads, one with an average")

OWN = sorted(set(BUILT_IN) - {"captioning"})


def tiny(name: str) -> Workload:
    return load_workload(name)("tiny", 0)


def first_inputs(workload: Workload) -> dict[str, torch.Tensor]:
    return dict(workload.pool(PadToMax(max_length=workload.max_length), rank=0, device=CPU)[0].inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("layers", "scope=regional"),
        pytest.param("layers-inference", "scope=full,workload.grad_mode=no_grad", marks=FURTHER),
        ("gpt2", "scope=regional,workload.batch_size=3"),
        ("gpt2-inference", "scope=full,dynamic=mark,pad_multiple=16,workload.weights=bf16"),
        pytest.param("gpt2-inference", "scope=full,workload.weights=frozen,autocast=bf16", marks=FURTHER),
        ("decoder", "scope=modular"),
        pytest.param("decoder", "scope=full", marks=FURTHER),
        ("resnet", "scope=full,workload.ema=on"),
        pytest.param("segmentation", "scope=full,workload.ema=on", marks=SLOWEST),
        ("detection", "scope=regional"),
        pytest.param("detection", "scope=full", marks=FURTHER),
        pytest.param("detection", "scope=full,workload.matching=greedy", marks=FURTHER),
    ],
)
def test_compiled_it_is_one_graph_a_piece_and_right(name: str, spelled: str) -> None:
    workload = tiny(name)
    found = measure(prepare(workload, CompileSettings.parse(f"{spelled},backend=aot_eager"), CPU), protocol=SHORT)
    assert (found.numerics["status"], found.fallbacks, found.graph_break_reasons) == ("ok", [], []), found.numerics["worst"]
    assert found.graphs == {"decoder": 3}.get(name, 1) if "modular" in spelled else 1  # encoder; a first token; the others
    assert (found.numerics["outputs"] is None) is workload.trains


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("detection", "scope=full,mode=reduce-overhead"),
        ("segmentation", "scope=full,workload.norm=sync"),
        ("gpt2-inference", "scope=full,mode=reduce-overhead,workload.weights=frozen"),
        ("gpt2-inference", "scope=full,workload.grad_mode=no_grad,workload.cast_cache=kept"),
        ("decoder", "scope=modular,mode=reduce-overhead,workload.weights=bf16"),
        ("decoder", "scope=full,mode=reduce-overhead"),
    ],
)
def test_what_needs_a_gpu_is_right_on_one(name: str, spelled: str) -> None:
    settings = CompileSettings.parse(spelled)
    device = torch.device("cuda", torch.cuda.current_device())
    found = measure(prepare(tiny(name), settings, device), protocol=SHORT)
    assert (found.numerics["status"], found.fallbacks, found.graph_break_reasons) == ("ok", [], []), found.numerics["worst"]
    assert (found.cudagraph_skips, found.cudagraph_skip_reasons) == (0, [])


@pytest.mark.parametrize("name", OWN)
def test_it_names_modules_that_exist_and_fits_its_name(name: str) -> None:
    workload = tiny(name)
    model = workload.build_model()
    assert workload.sizes[-1] == "tiny"
    assert len(workload.regions(model)) > 1
    for module in (*workload.regions(model), *workload.parts()):
        model.get_submodule(module)
        workload.dynamic_dims(module)
    assert model.training is workload.trains
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), tiny(name).build_model().parameters(), strict=True))
    assert type(workload).__doc__
    pools = [tiny(name).pool(PadToMax(max_length=workload.max_length), rank=rank, device=CPU) for rank in (0, 0, 1)]
    inputs = [next(iter(pool[1].inputs.values())) for pool in pools]
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0], inputs[2])


@pytest.mark.parametrize(
    ("name", "spelled", "said"),
    [
        ("gpt2", "scope=full,workload.weights=bf16", "no option 'weights'"),
        (
            "gpt2-inference",
            "scope=full,workload.weights=fp8",
            "Gpt2Inference takes; use one of float32, bf16, frozen",
        ),
        ("gpt2-inference", "scope=full,workload.weights=bf16,workload.cast_cache=kept", "leaves autocast nothing to cast"),
        ("gpt2-inference", "scope=full,workload.cast_cache=kept", "needs workload.grad_mode=no_grad"),
        ("gpt2-inference", "scope=full,workload.weights=bf16,autocast=bf16", "needs no autocast"),
        ("gpt2-inference", "scope=full,optimizer=fused", "only infers"),
        ("gpt2", "scope=full,workload.batch_size=0", "use a whole number, 1 or more"),
        ("segmentation", "scope=full,workload.emma=on", "did you mean ema?"),
        ("decoder", "scope=full,workload.new_tokens=300", "above the 256"),
        ("layers", "scope=full,dynamic=mark", "dynamic=mark is for lengths that change"),
    ],
)
def test_what_it_cannot_vary_is_one_sentence(name: str, spelled: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        tiny(name).under(CompileSettings.parse(spelled))


def test_options_change_the_workload_and_their_usual_values_do_not() -> None:
    workload = tiny("gpt2-inference")
    assert workload.under(CompileSettings.parse("scope=full,workload.weights=float32")) is workload
    other = workload.under(
        CompileSettings.parse("scope=full,workload.weights=bf16,workload.batch_size=5,workload.grad_mode=no_grad")
    )
    assert {parameter.dtype for parameter in other.build_model().parameters()} == {torch.bfloat16}
    assert first_inputs(other)["ids"].shape == (5, 32)
    assert (other.autocast_dtype(torch.device("cuda")), workload.autocast_dtype(torch.device("cuda"))) == (None, torch.bfloat16)
    source = prepare(workload, CompileSettings.parse("scope=full,workload.grad_mode=no_grad"), CPU).source(workload.build_model())
    assert "@torch.no_grad()" in source
    assert "workload.grad_mode=no_grad" in source


@pytest.mark.parametrize(("cache", "sees_the_change"), [("step", True), ("kept", False)])
def test_casts_that_are_kept_are_those_of_the_first_step(cache: str, sees_the_change: bool) -> None:
    settings = CompileSettings.parse(f"scope=eager,autocast=bf16,workload.grad_mode=no_grad,workload.cast_cache={cache}")
    workload = tiny("gpt2-inference").under(settings)
    batch = workload.pool(PadToMax(max_length=32), rank=0, device=CPU)[0]
    with workload.process_settings():
        model = workload.build_model()
        with applied(prepare(workload, settings, CPU), model, None) as step:
            before = step(batch)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if ".h." in name and parameter.dim() == 2:  # autocast casts these; it casts no embedding
                        parameter.mul_(2.0)
            assert (float(step(batch)) != float(before)) is sees_the_change
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "products"), [("float32", 2), ("frozen", 0)])
def test_frozen_weights_are_cast_when_compiled_and_not_in_each_call(weights: str, products: int) -> None:
    frozen = tiny("gpt2-inference").under(CompileSettings.parse(f"scope=full,workload.weights={weights}"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).eval()
    torch._dynamo.reset()
    with frozen.process_settings(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, (code, *_) = run_and_get_code(torch.compile(model, dynamic=False), torch.ones(4, 16))
    assert len(re.findall(r"assert_size_stride\(arg\d+_1, \(16, 16\)", code)) == products
    assert not torch._inductor.config.freezing


SET_FOR_THE_PROCESS = {
    "gpt2-inference workload.weights=frozen": (
        "torch._inductor.config.freezing = True",
        "torch._inductor.config.freezing",
    ),
    "gpt2-inference workload.grad_mode=no_grad,workload.cast_cache=kept": (
        "torch.autocast_increment_nesting()",
        "torch.autocast_increment_nesting() + torch.autocast_decrement_nesting() > 1",  # n + 1, then n
    ),
    "captioning ": ("torch.backends.cuda.enable_cudnn_sdp(False)", "not torch.backends.cuda.cudnn_sdp_enabled()"),
}
"""By workload and options: a statement, and an expression that is true after it and not before."""


@pytest.mark.slow
def test_what_a_workload_sets_for_the_process_is_exported_and_put_back(tmp_path: Path) -> None:
    def state() -> tuple[bool, int, bool]:
        import torch._inductor.config as inductor

        torch.autocast_increment_nesting()
        return inductor.freezing, torch.autocast_decrement_nesting(), torch.backends.cuda.cudnn_sdp_enabled()

    program = ["import torch, torch._inductor.config"]
    for number, (case, (statement, is_set)) in enumerate(SET_FOR_THE_PROCESS.items()):
        name, options = case.split(" ")
        settings = CompileSettings.parse(f"scope=full,{options}")
        workload = tiny(name)
        model = workload.under(settings).build_model()
        before = state()
        with applied(prepare(workload, settings, CPU), model, workload.optimizer(model, settings.optimizer)) as step:
            assert statement in step.source
            assert state() != before
        assert state() == before
        source = prepare(workload, settings, CPU).source(model)
        assert source == step.source
        (tmp_path / f"pasted_{number}.py").write_text(source, encoding="utf-8")
        program += [f"print({is_set})", f"import pasted_{number}", f"print({is_set})"]
    command = [sys.executable, "-c", "\n".join(program)]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True).stdout
    assert printed.split() == ["False", "True"] * len(SET_FOR_THE_PROCESS)
    plain = prepare(tiny("layers"), CompileSettings.parse("scope=full"), CPU).source(tiny("layers").build_model())
    assert not [statement for statement, _ in SET_FOR_THE_PROCESS.values() if statement in plain]


def test_attention_implementations_are_those_the_model_can_run() -> None:
    assert "flex_attention" in Gpt2Inference("tiny", 0).attention_statement("flex")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="it can run sdpa, eager"):
        Gpt2("tiny", 0).attention_statement("flex")  # type: ignore[arg-type]


def test_the_largest_gpt2_has_a_billion_and_a_half_parameters() -> None:
    with torch.device("meta"):
        model = Gpt2("xl", 0).make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.558e9, rel=1e-3)


def test_captions_from_the_cache_are_those_without_it_and_the_cache_forgets() -> None:
    workload = tiny("decoder")
    model = workload.build_model()
    batches = workload.pool(PadToMax(max_length=1), rank=0, device=CPU)
    with torch.inference_mode():
        for batch in batches[:2]:  # the second finds the first one's cache
            images = model.encoder(pixel_values=batch.inputs["pixel_values"]).last_hidden_state
            whole = model.decoder(input_ids=batch.inputs["ids"], encoder_hidden_states=images, use_cache=False).logits
            torch.testing.assert_close(model(**batch.inputs), whole, atol=1e-5, rtol=1e-4)
    assert batches[0].tokens == batches[0].samples * 6
    short = workload.under(CompileSettings.parse("scope=full,workload.new_tokens=1"))
    assert isinstance(short, Decoder)
    assert short.build_model()(**first_inputs(short)).shape == (8, 1, 128)


def test_the_average_follows_the_weights() -> None:
    model = torch.nn.Linear(2, 1)
    average = moving_average(model, 0.75)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 4.0
    average()
    torch.testing.assert_close(average.averages["weight"], before + 1.0)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_average_that_torch_keeps_of_a_compiled_model_is_that_of_the_eager_one() -> None:
    """The vision source's pitfall, "no EMA with torch.compile": its average was a deep copy of the model, like torch's."""
    averages = []
    for compiles in (False, True):
        torch._dynamo.reset()
        workload = tiny("layers")
        model = workload.build_model()
        trained = torch.compile(model, backend="aot_eager") if compiles else model
        average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        for _ in range(3):
            trained(**first_inputs(workload)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(trained)
        averages.append([parameter.detach() for parameter in average.parameters()])
        assert not torch.equal(averages[-1][0], next(model.parameters()))
    torch.testing.assert_close(averages[1], averages[0], atol=1e-5, rtol=1e-4)


def test_a_step_with_an_average_keeps_it_after_every_update() -> None:
    settings = CompileSettings.parse("scope=eager,workload.ema=on")
    workload = tiny("segmentation").under(settings)
    model = workload.build_model()
    with applied(prepare(workload, settings, CPU), model, workload.optimizer(model, settings.optimizer)) as step:
        assert "moving_average(model, 0.9998)" in step.source
        assert "        average()\n        optimizer.zero_grad" in step.source
        assert torch.isfinite(step(workload.pool(PadToMax(max_length=1), rank=0, device=CPU)[0]))


def test_synchronized_normalisation_replaces_the_usual_one() -> None:
    kinds = {}
    for norm in ("batch", "sync"):
        workload = tiny("segmentation").under(CompileSettings.parse(f"scope=full,workload.norm={norm}"))
        assert isinstance(workload, Segmentation)
        kinds[norm] = {
            type(module).__name__ for module in workload.build_model().modules() if "BatchNorm" in type(module).__name__
        }
    assert kinds == {"batch": {"BatchNorm2d"}, "sync": {"SyncBatchNorm"}}


@pytest.mark.slow
def test_synchronized_normalisation_is_refused_where_there_is_no_gpu() -> None:
    settings = CompileSettings.parse("scope=eager,workload.norm=sync")
    with pytest.raises(SettingsError, match=r"^workload\.norm=sync needs a GPU: .*; use workload\.norm=batch$"):
        measure(prepare(tiny("segmentation"), settings, CPU), protocol=SHORT)
    chosen = choose([settings.fields_that_apply()], Target.of(describe(tiny("segmentation")), has_gpu=False))
    assert (chosen.settings, len(chosen.excluded)) == ((), 1)
    assert "needs a GPU" in chosen.excluded[0].reason
    assert choose([settings.fields_that_apply()], Target.of(describe(tiny("segmentation")), has_gpu=True)).settings == (settings,)


def test_each_object_gets_a_query_of_its_own_the_best_one() -> None:
    targets = torch.tensor([[[0.2, 0.2, 0.1, 0.1], [0.21, 0.2, 0.1, 0.1]]])
    boxes = torch.tensor([[[0.9, 0.9, 0.1, 0.1], [0.2, 0.2, 0.1, 0.1], [0.3, 0.2, 0.1, 0.1]]])
    logits, labels = torch.zeros(1, 3, 4), torch.tensor([[0, 1]])
    for match in MATCHINGS.values():
        assert match(matching_costs(logits, boxes, labels, targets)).tolist() == [[1, 2]]
    perfect = torch.cat([boxes[:, :1], targets], dim=1)
    sure = torch.full((1, 3, 4), -20.0)
    sure[0, 0, 3] = sure[0, 1, 0] = sure[0, 2, 1] = 20.0
    assert DetectionLoss()(sure, perfect, labels, targets) < 1e-4 < DetectionLoss()(logits, boxes, labels, targets)


def test_the_least_sum_may_deny_an_object_its_best_query_and_numbers_that_are_none_cost_most() -> None:
    cost = torch.tensor([[[1.0, 2.0], [3.0, 9.0], [torch.nan, torch.inf]]])  # (images, queries, objects)
    assert {name: match(cost).tolist() for name, match in MATCHINGS.items() if name != "greedy"} == {
        "hungarian": [[1, 0]],
        "python": [[1, 0]],
    }
    assert MATCHINGS["greedy"](cost.nan_to_num(nan=1e9)).tolist() == [[0, 1]]
    torch.library.opcheck(torch.ops.compile_sweep.hungarian.default, (cost,), test_utils=("test_schema", "test_faketensor"))


def test_the_loss_is_that_of_transformers() -> None:
    workload = tiny("detection")
    model = workload.build_model()
    assert isinstance(model, DetectionModel)
    inputs = first_inputs(workload)
    published = model.model(
        pixel_values=inputs["pixel_values"],
        labels=[{"class_labels": one, "boxes": two} for one, two in zip(inputs["labels"], inputs["targets"], strict=True)],
    )
    torch.testing.assert_close(model(**inputs), published.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_only_the_published_matching_breaks_the_graph() -> None:
    breaks = {}
    for matching in MATCHINGS:
        torch._dynamo.reset()
        loss, size = DetectionLoss(matching), (2, 6, 6)
        arguments = (torch.randn(size), torch.rand(2, 6, 4), torch.randint(5, (2, 2)), torch.rand(2, 2, 4))
        breaks[matching] = torch._dynamo.explain(loss)(*arguments).graph_break_count > 0
    assert breaks == {"hungarian": False, "python": True, "greedy": False}


def test_overlap_is_that_of_the_paper() -> None:
    one, other = torch.tensor([0.5, 0.5, 1.0, 1.0]), torch.tensor([1.0, 0.5, 1.0, 1.0])
    assert float(generalized_overlap(one, one)) == pytest.approx(1, abs=1e-5)
    assert float(generalized_overlap(one, other)) == pytest.approx(0.5 / 1.5, abs=1e-5)
    apart = torch.tensor([2.5, 0.5, 1.0, 1.0])
    assert float(generalized_overlap(one, apart)) == pytest.approx(0 - (3 - 2) / 3, abs=1e-5)


def test_pixels_without_a_label_count_for_nothing() -> None:
    from workloads.segmentation import PixelLoss

    logits = torch.randn(1, 3, 2, 2)
    labels = torch.full((1, 2, 2), 255)
    labels[0, 0, 0] = 1
    assert PixelLoss()(logits, labels) == pytest.approx(float(cross_entropy(logits[:, :, 0, 0], torch.tensor([1]))), rel=1e-5)
