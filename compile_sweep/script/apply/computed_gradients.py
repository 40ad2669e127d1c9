"""What is asked of a call, and how autograd computes it: the call, then one request after the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compile_sweep.script.apply.captured_graph import Function
from compile_sweep.script.apply.module_call import unsuitable


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a backward pass asks for at a node of autograd."""

    node: int
    """0 for that of the call, of whose tensors and weights gradients are wanted; that of an earlier request has its number,
    counted from 1, and those of the gradients that it was given are wanted.
    """
    is_first: bool
    """Whether the backward pass asked for nothing before."""
    given: tuple[int, ...]
    """Numbers of results that have a gradient; those of the call come first, then those of each request."""
    tracked: tuple[bool, ...]
    """Which of these gradients may be differentiated, too."""
    needed: tuple[bool, ...]
    """Which of the call's tensors and weights need a gradient."""
    again: bool
    """Whether what it computes may be differentiated again."""
    autocast: tuple[bool, torch.dtype]

    def covers(self, other: "Request") -> bool:
        """Tells whether its graph computes what another request asks for, with zeros for gradients that do not come."""
        if self.again or (self.node, self.is_first, self.autocast) != (other.node, other.is_first, other.autocast):
            return self == other
        is_needed = all(own or not one for own, one in zip(self.needed, other.needed, strict=True))
        return not other.again and is_needed and set(other.given) <= set(self.given)

    def differs_little(self, other: "Request") -> bool:
        """Tells whether one graph may compute both: they differ in nothing but what has gradients and what needs one."""
        alike = replace(other, given=self.given, tracked=self.tracked, needed=self.needed)
        return self == other or (not self.again and self == alike)

    def joined(self, other: "Request") -> "Request":
        """Returns a request that covers both, which differ in what has gradients and what needs one."""
        given = tuple(sorted({*self.given, *other.given}))
        needed = tuple(own or one for own, one in zip(self.needed, other.needed, strict=True))
        return replace(self, given=given, tracked=(False,) * len(given), needed=needed)


RequestSequence = tuple[Request, ...]
RequestTree = dict[Request, "RequestTree"]


class Computed:
    """A call and its gradients, computed one after the other by autograd.

    Args:
        function: The call.
        tensors: What it is given.
        weights: Its trained weights.
        run: Computes its results.
    """

    def __init__(
        self,
        function: Function,
        tensors: Sequence[Tensor],
        weights: Sequence[Tensor],
        run: Callable[[], list[Tensor]] | None = None,
    ) -> None:
        self._function, self._wanted = function, [*tensors, *weights]
        self._run = run or partial(function.called, tensors)
        self.results: list[Tensor] = []
        """Those of the call, and all gradients that may be differentiated again."""
        self._tracked: list[Sequence[Tensor]] = []
        self._sums: dict[tuple[int, int], Tensor] = {}

    def start(self) -> list[Tensor]:
        """Computes the results of the call."""
        self.results, self._tracked, self._sums = self._run(), [], {}
        return list(self.results)

    def answer(self, request: Request, given: Sequence[Tensor], *, keep: bool = True) -> list[Tensor | None]:
        """Computes what is asked for: gradients of the call's tensors and weights, or of the gradients of an earlier request.

        Args:
            request: What is asked for.
            given: Gradients of the results that it names; those that are tracked require gradients.
            keep: Whether more follows.

        Returns:
            Gradients, with None for what does not depend on what has gradients.
        """
        if request.is_first:
            self._sums = {}
        targets = {(0, place): one for place, one in enumerate(self._wanted) if request.needed[place]}
        for number, some in enumerate(self._tracked, 1):
            targets |= {(number, place): one for place, one in enumerate(some)}
        if request.given and targets:
            enabled, dtype = request.autocast
            with torch.autocast(self._function.call.device.type, dtype, enabled=enabled):
                found = torch.autograd.grad(
                    [self.results[number] for number in request.given],
                    list(targets.values()),
                    given,
                    allow_unused=True,
                    create_graph=request.again,
                    retain_graph=keep or request.again,
                )
                for place, gradient in zip(targets, found, strict=True):
                    if gradient is not None:
                        self._sums[place] = self._sums[place] + gradient if place in self._sums else gradient
        answers = [self._sums.pop(place, None) for place in self._asked(request)]
        self._tracked.append([one for one, is_tracked in zip(given, request.tracked, strict=True) if is_tracked])
        if request.again:
            self.results.extend(one for one in answers if one is not None)
        return answers

    def _asked(self, request: Request) -> list[tuple[int, int]]:
        if request.node == 0:
            return [(0, place) for place, is_needed in enumerate(request.needed) if is_needed]
        return [(request.node, place) for place, _ in enumerate(self._tracked[request.node - 1])]

    def zeros(self, request: Request) -> list[Tensor]:
        """Returns memory for the gradients that a request comes with."""
        pairs = zip(request.given, request.tracked, strict=True)
        return [torch.zeros_like(self.results[number]).requires_grad_(is_tracked) for number, is_tracked in pairs]

    def each(self, tree: RequestTree) -> Iterator[tuple[Request, RequestTree]]:
        """Yields the requests of a tree with those that may follow; what came before each is computed when it is yielded."""
        for request, rest in tree.items():
            before = list(self.results), list(self._tracked), dict(self._sums)
            yield request, rest
            self.results, self._tracked, self._sums = before

    def try_out(self, tree: RequestTree, others: Sequence[Tensor]) -> str:
        """Answers all requests of a tree; returns why that cannot be captured, empty if it can.

        Args:
            tree: The requests.
            others: The module's own weights, which others stand in for.
        """
        reason = ""
        for request, rest in self.each(tree):
            given, used = self.zeros(request), [self.results[number] for number in request.given]
            if others and any(one is not None for one in _gradients(used, others, given)):
                return "it also holds weights outside of its modules"
            found = self.answer(request, given)
            if any(one is not None and one.layout is not torch.strided for one in found):
                return "it has sparse gradients"
            reason = reason or unsuitable(found, "has gradients of", self._function.call.device) or self.try_out(rest, others)
        return reason


def _gradients(results: Sequence[Tensor], of: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(results, of, given, allow_unused=True, retain_graph=True) if results else []
