"""The numerics check on real models: injected faults are found, and right runs with and without dropout pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch
from faulty_workloads import NanWhenCompiled
from torch import Tensor, nn
from toy_workloads import VOCABULARY, Block, Toy, ToyModel

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.from_model import WorkloadFromModel
from compile_sweep.harness.apply import applied
from compile_sweep.harness.numerics import references
from compile_sweep.harness.numerics.check import Numerics, NumericsStatus, check_numerics, judge
from compile_sweep.harness.numerics.references import References, eager_reference, record_run, run_references
from compile_sweep.harness.numerics.tolerance import Gap
from compile_sweep.harness.numerics.trajectory import MAX_GROUPS, SAMPLED_ELEMENTS, Recorder, Trajectory, module_groups
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning

CPU = torch.device("cpu")
EAGER = CompileSettings.parse("scope=eager")
STEPS = 10


class _WithDropout(ToyModel):
    def spoiled(self, loss: Tensor) -> Tensor:
        return loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body.embedding(ids)
        for block in self.body.blocks:
            hidden = nn.functional.dropout(block(hidden), 0.1, training=True)
        loss: Tensor = self.loss(self.body.output(hidden), labels)
        return loss


class Random(Toy):
    """Draws random numbers in every step."""

    model_class = _WithDropout


class _Overflowing(ToyModel):
    def spoiled(self, loss: Tensor) -> Tensor:
        return loss * torch.tensor(3e38) * 10


class Overflowing(Toy):
    """Not finite in eager."""

    model_class = _Overflowing


def batches_of(workload: Workload) -> list[Batch]:
    pool = workload.pool(EAGER.shape_policy(workload.max_length), rank=0, device=CPU)
    return [pool[i % len(pool)] for i in range(STEPS)]


def trained(
    workload: Workload,
    spoil: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda model, optimizer: None,
    *,
    seed: int = 0,
    settings: CompileSettings = EAGER,
) -> Trajectory:
    """A run in place of a compiled one, with an injected fault."""
    model = workload.build_model()
    optimizer = workload.optimizer(model, settings.optimizer)
    spoil(model, optimizer)
    torch.manual_seed(seed)
    with applied(prepare(workload, settings, CPU), model, optimizer) as step:
        return record_run(workload, model, step, batches_of(workload))


@cache
def references_of(workload_class: type[Toy]) -> References:
    """The eager runs under default settings, the same for every run of a workload."""
    workload = workload_class("only", 0)
    return run_references(prepare(workload, EAGER, CPU), batches_of(workload))


def judged(workload: Toy, run: Trajectory, steady: Sequence[float] = (1.0,)) -> Numerics:
    return judge(run, references_of(type(workload)), steady)


def checked(workload: Workload, run: Trajectory, steady: Sequence[float] = (1.0,), settings: CompileSettings = EAGER) -> Numerics:
    return check_numerics(prepare(workload, settings, CPU), batches_of(workload), run, steady)


def a_wrong_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # Changes only the reported number: its gradient is right.
    model.register_forward_hook(lambda module, inputs, loss: loss + 0.01 * loss.detach())


def a_wrong_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.get_submodule("body.blocks.1").parameters():
        parameter.register_hook(lambda gradient: gradient * 1.01)


def a_wrong_learning_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 1.01


def after_each_step(model: nn.Module, optimizer: torch.optim.Optimizer, spoil: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replaces one module's parameters by what `spoil` makes of their values before and after a step."""
    parameters = list(model.get_submodule("body.blocks.1").parameters())
    before: list[Tensor] = []

    def remember(*_: object) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def change(*_: object) -> None:
        for parameter, start in zip(parameters, before, strict=True):
            parameter.copy_(spoil(start, parameter))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(change)


def a_step_that_forgets_a_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    after_each_step(model, optimizer, lambda before, after: before)


def a_step_the_wrong_way(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Moves one module by the right distance in the opposite direction."""
    after_each_step(model, optimizer, lambda before, after: 2 * before - after)


def a_gradient_that_is_no_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    calls: list[None] = []

    def spoiled(gradient: Tensor) -> Tensor:
        calls.append(None)
        return gradient * float("nan") if len(calls) == 4 else gradient

    model.get_submodule("body.blocks.1").linear.bias.register_hook(spoiled)


# The injected fault, where it is found, and at which step first: wrong parameters show one step later.
FAULTS: list[tuple[Callable[[nn.Module, torch.optim.Optimizer], object], Callable[[Numerics], Gap], int]] = [
    (a_wrong_loss, lambda verdict: verdict.loss, 0),
    (a_wrong_gradient, lambda verdict: verdict.gradients["body.blocks.1"], 0),
    (a_wrong_learning_rate, lambda verdict: verdict.updates["body.embedding"], 0),
    (a_step_that_forgets_a_module, lambda verdict: verdict.updates["body.blocks.1"], 0),
    (a_step_the_wrong_way, lambda verdict: verdict.parameters["body.blocks.1"], 1),
]


def test_an_eager_run_agrees_with_itself_sharply() -> None:
    verdict = judged(Toy("only", 0), trained(Toy("only", 0)))
    assert (verdict.status, verdict.random, verdict.reference) == (NumericsStatus.OK, False, "float64")
    assert (verdict.compared_steps, verdict.judged_steps) == (STEPS, STEPS)
    assert set(verdict.gradients) == {"body.embedding", *(f"body.blocks.{i}" for i in range(3)), "body.output"}
    for gap in (verdict.loss, *verdict.gradients.values(), *verdict.updates.values()):
        assert gap.tolerance is not None
        assert gap.tolerance < 1e-3


@pytest.mark.parametrize(("fault", "respect", "step"), FAULTS)
def test_a_fault_of_one_per_cent_or_of_one_module_is_found_in_a_deterministic_model(
    fault: Callable[[nn.Module, torch.optim.Optimizer], object], respect: Callable[[Numerics], Gap], step: int
) -> None:
    verdict = judged(Toy("only", 0), trained(Toy("only", 0), fault))
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.DIVERGES, step)
    assert respect(verdict).share > 1
    if fault is a_wrong_loss:
        assert max(gap.share for gap in verdict.gradients.values()) < 1, "the gradients are right"
    if fault is a_wrong_gradient:
        assert verdict.loss.share < 1, "Adam makes the same steps of a gradient 1% too large"
        assert [module for module, gap in verdict.gradients.items() if gap.share > 1] == ["body.blocks.1"]


class _WithStatistics(ToyModel):
    """Keeps running statistics that training never reads, a mask, and a mean that each step stores as a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.norm(self.body(ids).transpose(1, 2)).transpose(1, 2)
        self.mean = 0.9 * self.mean + 0.1 * logits.detach().square().mean()
        return self.spoiled(self.loss(logits, labels))


class Statistics(Toy):
    """Has buffers of every kind."""

    model_class = _WithStatistics


@pytest.mark.parametrize("lost", ["running_mean", "running_var", "mean", None])
def test_a_buffer_whose_change_is_lost_is_found_though_no_loss_depends_on_it(lost: str | None) -> None:
    def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def put_back(module: nn.Module, inputs: object) -> None:
            for holder in (model, model.norm):
                if lost in dict(holder.named_buffers(recurse=False)):
                    setattr(holder, str(lost), torch.full_like(holder.get_buffer(str(lost)), 1.0 * (lost == "running_var")))

        model.register_forward_pre_hook(put_back)

    verdict = judged(Statistics("only", 0), trained(Statistics("only", 0), forget))
    assert set(verdict.buffers) == {"norm", "mean"}
    outside = [name for name, gap in verdict.buffers.items() if gap.share > 1]
    assert outside == ([] if lost is None else ["mean"] if lost == "mean" else ["norm"])
    assert verdict.status is NumericsStatus.OK, "no loss, gradient or parameter differs"
    assert (verdict.remark is None) == (lost is None)
    assert lost is None or "buffers of " in (verdict.remark or "")


def test_a_gradient_that_is_no_number_is_found_though_the_loss_of_its_step_is_one() -> None:
    verdict = judged(Toy("only", 0), trained(Toy("only", 0), a_gradient_that_is_no_number))
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.NAN, 3)
    assert verdict.worst == "gradients of body.blocks.1 of step 3: not finite"


def test_a_late_timed_loss_that_is_no_number_is_found() -> None:
    verdict = judged(Toy("only", 0), trained(Toy("only", 0)), [1.0] * 400 + [float("nan"), 1.0])
    assert (verdict.status, verdict.first_bad_step, verdict.first_bad_steady_step) == (NumericsStatus.NAN, None, 400)


def test_a_model_that_is_not_finite_eagerly_says_nothing_of_the_compiled_run() -> None:
    verdict = checked(Overflowing("only", 0), trained(Toy("only", 0)))
    assert verdict.status is NumericsStatus.EAGER_UNSTABLE


@pytest.mark.slow
def test_right_runs_of_a_model_with_dropout_pass_whatever_their_seed_and_faults_are_found() -> None:
    workload = Random("only", 0)
    assert len(references_of(Random).runs) == 5
    verdicts = [judged(workload, trained(workload, seed=seed)) for seed in range(100, 120)]
    assert [verdict.status for verdict in verdicts] == [NumericsStatus.OK] * 20, [v.worst for v in verdicts]
    assert all(verdict.random and verdict.loss.kind != "rms" for verdict in verdicts)

    def half_as_much_again(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.register_forward_hook(lambda module, inputs, loss: loss * 1.5)

    for fault in (half_as_much_again, a_step_that_forgets_a_module):
        assert judged(workload, trained(workload, fault)).status is NumericsStatus.DIVERGES, fault


@pytest.mark.parametrize(("spelled", "reference"), [("autocast=bf16", "float32"), ("matmul_precision=high", "float32")])
def test_coarser_arithmetic_is_compared_with_eager_of_the_same_and_float32(spelled: str, reference: str) -> None:
    settings = CompileSettings.parse(f"scope=eager,{spelled}")
    workload = Toy("only", 0)
    verdict = checked(workload, trained(workload, settings=settings), settings=settings)
    assert (verdict.status, verdict.reference) == (NumericsStatus.OK, reference)
    assert checked(workload, trained(workload, a_wrong_loss, settings=settings), settings=settings).worst.startswith("loss")


def test_arithmetic_coarser_than_asked_for_is_found() -> None:
    workload = Toy("only", 0)
    coarse = trained(workload, settings=CompileSettings.parse("scope=eager,autocast=bf16"))
    assert checked(workload, coarse).status is NumericsStatus.DIVERGES


def test_torch_is_left_as_it_was() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    workload = Toy("only", 0)
    run_references(prepare(workload, CompileSettings.parse("scope=eager,matmul_precision=high"), CPU), batches_of(workload))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_a_model_that_does_not_run_in_float64_is_compared_with_float32() -> None:
    class SingleOnly(ToyModel):
        def spoiled(self, loss: Tensor) -> Tensor:
            return loss + torch.mm(self.body.output.weight, torch.ones(8, 1, dtype=torch.float32)).sum() * 0

    class Single(Toy):
        model_class = SingleOnly

    verdict = checked(Single("only", 0), trained(Single("only", 0)))
    assert (verdict.status, verdict.reference) == (NumericsStatus.OK, "float32")


def test_where_memory_does_not_allow_a_precise_run_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(dtype: torch.dtype, tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    workload = Toy("only", 0)
    run = trained(workload)
    wrong = trained(workload, a_wrong_loss)
    monkeypatch.setattr(references, "_in", too_large)
    verdict = checked(workload, run)
    assert (verdict.status, verdict.reference) == (NumericsStatus.OK, None)
    assert checked(workload, wrong).status is NumericsStatus.DIVERGES


@pytest.mark.slow
def test_a_compiled_model_is_recorded_and_checked_like_an_eager_one() -> None:
    settings = CompileSettings.parse("scope=full,backend=aot_eager")
    workload = NanWhenCompiled("only", 0)
    torch._dynamo.reset()
    verdict = checked(workload, trained(workload, settings=settings), settings=settings)
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.NAN, 0)
    sound = Toy("only", 0)
    assert checked(sound, trained(sound, settings=settings), settings=settings).status is NumericsStatus.OK


def test_an_eager_run_recorded_by_the_caller_is_used() -> None:
    workload = Toy("only", 0)
    with eager_reference(prepare(workload, EAGER, CPU)) as (model, step):
        eager = record_run(workload, model, step, batches_of(workload))
    assert run_references(prepare(workload, EAGER, CPU), batches_of(workload), eager=eager).eager is eager
    assert eager.losses == trained(workload).losses


def test_recording_ends_by_itself_and_changes_nothing() -> None:
    workload = Toy("only", 0)
    with eager_reference(prepare(workload, EAGER, CPU)) as (model, step):
        recorder = Recorder(workload, model, steps=2)
        losses = [float(recorder.step(step, batch)) for batch in batches_of(workload)]
    trajectory = recorder.trajectory()
    assert recorder.done
    assert trajectory.losses == losses[:2]
    with eager_reference(prepare(workload, EAGER, CPU)) as (_, step):
        assert [float(step(batch)) for batch in batches_of(workload)] == losses
    assert all(len(norms) == 2 for norms in (*trajectory.gradients.values(), *trajectory.updates.values()))


def test_norms_of_large_tensors_are_estimated_from_a_sample() -> None:
    class Large(Toy):
        def build_model(self) -> nn.Module:
            torch.manual_seed(self.seed)
            return nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200))

        def regions(self, model: nn.Module) -> Sequence[str]:
            return []

    workload = Large("only", 0)
    model = workload.build_model()
    recorder = Recorder(workload, model, steps=1)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def move(batch: object, before_update: Callable[[], None]) -> Tensor:
        before_update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        return torch.tensor(1.0)

    recorder.step(move, Batch(inputs={}, length=1, samples=1, tokens=1))  # type: ignore[arg-type]  # a step of its own
    trajectory = recorder.trajectory()
    assert set(trajectory.updates) == {"0", "1"}
    for group in trajectory.updates:
        moved = [p.detach() - start[name] for name, p in model.named_parameters() if name.startswith(group)]
        whole = float(torch.linalg.vector_norm(torch.cat([m.flatten() for m in moved])))
        assert trajectory.updates[group][0] == pytest.approx(whole, rel=0.05)
        assert float(torch.linalg.vector_norm(trajectory.movement[group])) == pytest.approx(whole, rel=0.05)
        assert trajectory.movement[group].numel() == SAMPLED_ELEMENTS + len(moved[1])


@pytest.mark.parametrize("blocks", [0, 3, 12, 100])
def test_a_model_of_any_depth_has_few_groups_that_hold_every_parameter_once(blocks: int) -> None:
    class Deep(Toy):
        def regions(self, model: nn.Module) -> Sequence[str]:
            return [name for name, module in model.named_modules() if isinstance(module, Block)][:blocks]

    model = ToyModel()
    model.body.blocks = nn.ModuleList(Block() for _ in range(max(3, blocks)))
    groups = module_groups(Deep("only", 0), model)
    assert sorted(name for names in groups.values() for name in names) == sorted(dict(model.named_parameters()))
    assert 3 <= len(groups) <= MAX_GROUPS
    if blocks == 12:
        assert groups["body.blocks.11"] == ["body.blocks.11.linear.weight", "body.blocks.11.linear.bias"]
    if blocks == 100:
        assert "body.blocks.0 to body.blocks.3" in groups


def test_captioning_is_split_into_its_blocks_and_what_is_around_them() -> None:
    groups = module_groups(Captioning("tiny", 0), Captioning("tiny", 0).build_model())
    assert "model.decoder.transformer.h.1" in groups
    assert "model.decoder.transformer.wte" in groups
    assert 8 <= len(groups) <= MAX_GROUPS


def convolutions() -> nn.Module:
    widths = (3, 32, 64, 128)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * widths[-1], 10))


def images(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(64, 3, 32, 32, generator=generator), torch.randint(10, (64,), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("error", [0.0, 0.05])
def test_kernels_that_round_more_coarsely_are_right_in_float32_and_a_wrong_layer_is_still_found(error: float, seed: int) -> None:
    """On a CPU, `channels_last` errs ten times as much, so a ReLU may pass what it stops in eager runs."""
    made = WorkloadFromModel(
        convolutions,
        images,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer_fn=lambda weights: torch.optim.SGD(weights, lr=0.03, momentum=0.9),
    )
    workload = made("only", seed)
    settings = CompileSettings.parse("scope=eager,memory_format=channels_last")

    def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        second = [module for module in model.modules() if isinstance(module, nn.Conv2d)][1]
        second.weight.register_hook(lambda gradient: gradient * (1 + error))

    verdict = checked(workload, trained(workload, spoil, seed=seed, settings=settings), settings=settings)
    assert verdict.status is (NumericsStatus.DIVERGES if error else NumericsStatus.OK)
    assert not error or "model.3" in verdict.worst
