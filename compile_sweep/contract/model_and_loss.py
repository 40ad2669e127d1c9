"""A user's model and loss function, or step, as one module for measuring."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.contract.batches import Structure, flatten, rebuild
from compile_sweep.schema.errors import WorkloadError

LossFn = Callable[[nn.Module, Any], Any]

MODEL = "model"  # name of the user's model inside that module


class ModelAndLoss(nn.Module):
    """The user's model and loss function as one module.

    Args:
        structure: Structure of a batch that is not a dictionary of tensors; the batch is rebuilt for the loss function.
        has_own_step: Whether the loss function calls `backward()` itself. Then the returned loss has no graph, and `backward()`
            on it does nothing.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, structure: Structure | None = None, *, has_own_step: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.structure = structure
        self.has_own_step = has_own_step
        found = getattr(type(model), "loss_function", None)
        if loss_fn is model_loss and isinstance(found, property) and found.fset:
            # transformers looks up the loss in each forward and logs if the class name is unknown, which breaks the graph.
            found.fset(model, model.loss_function)

    def forward(self, **batch: Tensor) -> Any:
        """Returns the loss, or the outputs for inference."""
        whole = batch if self.structure is None else rebuild(self.structure, batch)
        if self.has_own_step:
            with torch.enable_grad():
                return self._detached(self.loss_fn(self.model, whole))
        found = self.loss_fn(self.model, whole)
        return loss_of(found) if self.training else found

    def _detached(self, returned: Any) -> Tensor:
        """Returns the loss of a step of the user's own, which may be a number, as `loss.item()` is."""
        first = returned[0] if isinstance(returned, tuple | list) and returned else returned
        if isinstance(first, float):
            device = next((weights.device for weights in self.model.parameters()), None)
            returned = torch.tensor(first, device=device)
        return loss_of(returned, "step_fn").detach().requires_grad_()


def loss_of(returned: Any, function: str = "loss_fn") -> Tensor:
    """Extracts the loss from a loss function's result: itself, the first of a tuple, or `loss` of a dictionary or an output."""
    found = returned
    if isinstance(found, tuple | list) and found:
        found = found[0]
    elif isinstance(found, dict):
        found = found.get("loss")
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", None)
    if not isinstance(found, Tensor):
        what = (
            f"{type(returned).__name__} without a loss" if isinstance(returned, dict | tuple | list) else type(returned).__name__
        )
        raise WorkloadError(f"{function} returned {what}; return the loss, a tensor, alone or first: return loss, logs")
    return found


def model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Returns the loss that the model computes, as those of Hugging Face do when their batch contains labels."""
    returned = model(**batch)
    loss: Tensor | None = getattr(returned, "loss", None)
    if loss is None:
        loss = _loss_among(returned)
    if loss is None:
        what = type(returned).__name__
        raise WorkloadError(
            f"the model returned {what} without a loss, as one of Hugging Face's does where the batch holds no labels; "
            "put labels into the batch, or give loss_fn"
        )
    return loss


def _loss_among(returned: Any) -> Tensor | None:
    """Returns the loss that a model returns alone, in a dictionary or as the one number of a tuple; None if there is none."""
    if isinstance(returned, dict):
        return returned.get("loss")
    found = [one for one in (returned if isinstance(returned, tuple | list) else [returned]) if isinstance(one, Tensor)]
    numbers = [one for one in found if one.dim() == 0]
    return numbers[0] if len(numbers) == 1 else None


def model_outputs(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Returns the model's outputs."""
    return model(**batch)


class AccumulatedLoss:
    """A step that splits its batch into equal parts, with one forward and backward each, and returns the mean of their losses."""

    def __init__(self, loss_fn: LossFn, parts: int) -> None:
        self.loss_fn = loss_fn
        self.parts = parts

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the detached loss; the gradients are set."""
        tensors, structure = flatten(batch)
        samples = max((tensor.size(0) for tensor in tensors.values() if tensor.dim()), default=1)
        if samples % self.parts:
            raise WorkloadError(f"accumulate={self.parts} does not split {samples} samples evenly; use a divisor of {samples}")
        total: Tensor | None = None
        for part in range(self.parts):
            rows = slice(part * samples // self.parts, (part + 1) * samples // self.parts)
            some = {name: one[rows] if one.dim() and one.size(0) == samples else one for name, one in tensors.items()}
            loss = loss_of(self.loss_fn(model, some if structure is None else rebuild(structure, some))) / self.parts
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


def names_inside(model: nn.Module, names: Sequence[str], what: str) -> list[str]:
    """Returns names of the user's model as names inside `ModelAndLoss`; WorkloadError says which are unknown."""
    known = {name for name, _ in model.named_modules()}
    for name in names:
        if name not in known:
            raise WorkloadError(f"{what}: the model has no module {name!r}; names are those of model.named_modules()")
    return [f"{MODEL}.{name}" for name in names]
