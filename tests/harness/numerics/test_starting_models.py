"""The models that a trial trains start alike, are built only once if they can be copied, and share nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toy_workloads import Toy

from compile_sweep.harness.numerics import references
from compile_sweep.harness.numerics.references import OriginalModel, build_model_on

CPU = torch.device("cpu")


class Counted(Toy):
    """Counts how often it was built, and what else is done to each model."""

    also: Callable[[nn.Module], object] = staticmethod(lambda model: None)

    def __init__(self, size: str = "only", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.built = 0

    def build_model(self) -> nn.Module:
        self.built += 1
        model = super().build_model()
        type(self).also(model)
        return model


@pytest.fixture
def model_of() -> Callable[[Toy], nn.Module]:
    """Builds models as `build_model_on` does on a GPU."""
    original = OriginalModel()
    return lambda workload: original.copied(workload, CPU)


def first_weights(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def hooked(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, inputs, output: output)


def hooked_in_the_backward(model: nn.Module) -> None:
    first_weights(model).register_hook(lambda gradient: gradient)


def hooked_after_gradients(model: nn.Module) -> None:
    first_weights(model).register_post_accumulate_grad_hook(lambda weights: None)


def with_a_forward_of_its_own(model: nn.Module) -> None:
    kept = model.forward
    model.forward = lambda **inputs: kept(**inputs)  # type: ignore[assignment]


def locked(model: nn.Module) -> None:
    model.lock = threading.Lock()  # type: ignore[assignment]


def test_a_model_is_built_once_and_every_one_begins_with_its_weights(model_of: Callable[[Toy], nn.Module]) -> None:
    workload = Counted()
    models = [model_of(workload) for _ in range(3)]
    built = workload.build_model()
    assert workload.built == 2
    for model in models:
        assert list(model.state_dict()) == list(built.state_dict())
        assert all(map(torch.equal, model.state_dict().values(), built.state_dict().values()))
        assert [weights.requires_grad for weights in model.parameters()] == [w.requires_grad for w in built.parameters()]


def test_training_one_changes_no_other(model_of: Callable[[Toy], nn.Module]) -> None:
    workload = Counted()
    trained = model_of(workload)
    before = first_weights(trained).detach().clone()
    with torch.no_grad():
        for weights in trained.parameters():
            weights.zero_()
    assert torch.equal(first_weights(model_of(workload)), before)
    assert bool(before.any())


def test_each_workload_has_its_own(model_of: Callable[[Toy], nn.Module]) -> None:
    one, other = Counted(seed=0), Counted(seed=1)
    weights = [first_weights(model_of(workload)) for workload in (one, other, one)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_a_device_without_room_is_said_at_once_and_the_model_is_copied_when_there_is(
    model_of: Callable[[Toy], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(model: nn.Module, device: torch.device) -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    workload = Counted()
    with monkeypatch.context() as crowded:
        crowded.setattr(references, "_copied", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            model_of(workload)
    model_of(workload)
    assert workload.built == 1


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_precision_is_the_same_weights_in_it(device: torch.device | str) -> None:
    workload, there = Counted(), torch.device(device)
    precise = first_weights(build_model_on(workload, there, torch.float64))
    assert precise.dtype is torch.float64
    assert torch.equal(precise.float(), first_weights(build_model_on(workload, there)))
    assert first_weights(build_model_on(workload, there)).dtype is torch.float32
    assert precise.device.type == there.type
    assert workload.built == (3 if there == CPU else 1), "a process's memory is its models' on a CPU"


def test_shared_weights_stay_shared_and_marks_stay_on_them(model_of: Callable[[Toy], nn.Module]) -> None:
    class Tied(Counted):
        @staticmethod
        def also(model: nn.Module) -> None:
            model.twin = model.get_submodule(next(name for name, part in model.named_children()))
            model.register_buffer("kept", torch.arange(3.0), persistent=False)
            first_weights(model).no_weight_decay = True  # type: ignore[attr-defined]

    model = model_of(Tied())
    twin: Tensor = first_weights(model.twin)  # type: ignore[arg-type]
    assert twin is first_weights(model)
    assert twin.no_weight_decay
    assert model.kept.tolist() == [0.0, 1.0, 2.0]  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("also", [hooked, hooked_in_the_backward, hooked_after_gradients, with_a_forward_of_its_own, locked])
def test_what_a_copy_might_not_do_justice_to_is_built_each_time(
    also: Callable[[nn.Module], object], model_of: Callable[[Toy], nn.Module]
) -> None:
    class Attached(Counted):
        pass

    Attached.also = staticmethod(also)
    workload = Attached()
    models = [model_of(workload) for _ in range(3)]
    assert workload.built == 3 + (also is locked), "that one is found out only by trying"
    assert len({id(model) for model in models}) == 3
    assert all(torch.equal(first_weights(model), first_weights(models[0])) for model in models)
