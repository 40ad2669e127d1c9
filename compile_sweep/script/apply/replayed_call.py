"""A captured call and what is asked of it, as autograd sees them.

Gradients that may be differentiated again come from nodes of their own, which depend on a token that the call returns. So a
backward pass reaches the call's node last, when it knows the gradients of all of them, and one graph computes those of the call's
tensors and weights from them.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import private
from compile_sweep.script.apply.captured_graph import (
    CallMemory,
    Function,
    Gradients,
    Slot,
    Waiting,
    accumulates,
    are_needed,
    as_leaves,
    held,
    run_again,
)
from compile_sweep.script.apply.computed_gradients import Computed, Request
from compile_sweep.script.apply.graph_recording import generator_state, recording, spread, versions_of


@dataclass(slots=True, kw_only=True)
class Step:
    """A request that was captured."""

    request: Request
    memory: Sequence[Tensor]
    """That of the gradients that it comes with."""
    graph: Any
    answers: Gradients
    have_gradients: Sequence[bool]
    """Which of the answers depend on something that may be differentiated."""
    following: Sequence["Step"] = ()

    def answered(self, request: Request, given: Sequence[Tensor]) -> Gradients:
        """Replays the graph; returns what is asked for."""
        memory = dict(zip(self.request.given, self.memory, strict=True))
        for number in memory.keys() - set(request.given):
            memory[number].zero_()
        if given:
            torch._foreach_copy_([memory[number].detach() for number in request.given], [one.detach() for one in given])
        self.graph.replay()
        if request.node or request.needed == self.request.needed:
            return self.answers
        everything = spread(self.answers, self.request.needed)
        return [one for one, is_needed in zip(everything, request.needed, strict=True) if is_needed]


@dataclass(slots=True, kw_only=True)
class Chain:
    """A captured call with what is asked of it."""

    memory: CallMemory
    forward: Any
    outputs: Sequence[Tensor]
    have_gradients: Sequence[bool]
    """Which of the results depend on something that is trained."""
    first: Sequence[Step]
    slot: Slot
    function: Function
    passes: "Passes"

    @property
    def gradients(self) -> Iterator[Tensor | None]:
        """Memory of the gradients of weights."""

        def those(steps: Sequence[Step]) -> Iterator[Tensor | None]:
            for step in steps:
                yield from step.answers
                yield from those(step.following)

        return those(self.first)

    def replayed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call with these tensors."""
        self.slot.copy_gradients(self.memory.parameters)
        return Pass(self.function, self.passes, self).results_of(tensors, self.memory.parameters)


Passes = list[tuple[list[Request], weakref.ref[Waiting]]]
"""What was asked of calls that were not replayed, or not to the end; and what stands for each while more may be."""


class Pass:
    """A call, and what was asked of it up to now.

    Args:
        function: The call.
        passes: Where it is noted if it is not replayed to the end.
        chain: The captured call; None to compute it as it is.
    """

    def __init__(self, function: Function, passes: "Passes", chain: Chain | None) -> None:
        self.function, self._passes, self.chain = function, passes, chain
        self.waiting = Waiting()
        self.requests: list[Request] = []
        self._history: list[tuple[Request, Sequence[Tensor]]] = []
        """What it takes to compute again what was asked up to now."""
        self._next: Sequence[Step] = chain.first if chain else ()
        self._computed: Computed | None = None
        self._firsts, self._num_results = [0], 0
        self.token = function.token
        self._task, self._is_first = -1, True
        self._pending: dict[int, Tensor] = {}
        self._tokens: list[Tensor] = []

    def results_of(self, tensors: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
        """Returns the results of the call."""
        found = _Call.apply(self, len(tensors), *tensors, *weights)  # type: ignore[no-untyped-call, unused-ignore]
        return cast(tuple[Tensor, ...], found[:-1])

    def start(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[bool]]:
        """Computes the results; returns them, and which depend on something that is trained."""
        self.tensors, self._weights, self._versions = tensors, weights, versions_of(tensors)
        self._drawn: Tensor | None = None
        if self.chain is None:
            self._passes.append((self.requests, weakref.ref(self.waiting)))
            self._may_need = tuple(one.requires_grad for one in (*tensors, *weights))
            self._computed = Computed(self.function, as_leaves(tensors), weights)
            with recording():
                outputs: Sequence[Tensor] = self._computed.start()
            have_gradients: Sequence[bool] = [one.requires_grad for one in outputs]
        else:
            memory, self._may_need = self.chain.memory, self.chain.memory.may_need
            if tensors:
                torch._foreach_copy_(memory.inputs, list(tensors))
            if memory.draws:
                self._drawn = generator_state(self.function.call.device)
            self.chain.forward.replay()
            self.chain.slot.latest = self.waiting
            outputs, have_gradients = self.chain.outputs, self.chain.have_gradients
        self._num_results = len(outputs)
        return outputs, have_gradients

    def note(self, node: int, given: Gradients) -> None:
        """Notes the gradients of results of the call or of a request, in a backward pass."""
        if (task := current_task()) != self._task:
            self._task = task
            self._begin()
        first = self._firsts[node]
        self._pending |= {number: one for number, one in enumerate(given, first) if one is not None}

    def _begin(self) -> None:
        self._is_first, self._pending, self._tokens = True, {}, []

    def tracks(self, node: int) -> bool:
        """Tells whether a request, or one before it, was given gradients that may be differentiated, too."""
        return any(any(one.tracked) for one in self.requests[:node])

    def add_token(self, token: Tensor) -> None:
        """Notes the token of a request that has gradients in this backward pass."""
        self._tokens.append(token)

    def ask(self, node: int, call: Any, token: Tensor) -> Gradients:
        """Returns gradients, in a backward pass that reached a node and noted all that it depends on.

        Args:
            node: Number of the node.
            call: The node of the call.
            token: The token of the call.
        """
        again = torch.is_grad_enabled()
        numbers = sorted(self._pending)
        given = [self._pending[number] for number in numbers]
        needed = self._may_need
        if again or not accumulates(call.next_functions):
            needed = tuple(are_needed(needed, call.next_functions))
        request = Request(
            node=node,
            is_first=self._is_first,
            given=tuple(numbers),
            tracked=tuple(again and one.requires_grad for one in given),
            needed=needed,
            again=again,
            autocast=self.function.call.autocast,
        )
        self._pending, self._is_first = {}, False
        answers, have_gradients = self._answer(request, given)
        self.requests.append(request)
        if node == 0 and not again:  # what follows does not depend on it, and its gradients may be large
            request, given = replace(request, given=(), tracked=()), []
        self._history.append((request, [one.detach() for one in given]))
        self._firsts.append(self._num_results)
        tokens = [token, *self._tokens]
        if node == 0:
            self._begin()
        if not again:
            return answers if node else spread(answers, needed)
        values = [one for one in answers if one is not None]
        self._num_results += len(values)
        tracked = [one for one, is_tracked in zip(given, request.tracked, strict=True) if is_tracked]
        if values:
            found = _Gradients.apply(self, len(self.requests), values, have_gradients, len(tokens), *tokens, *tracked)  # type: ignore[no-untyped-call, unused-ignore]
            answers = spread(found[:-1], [one is not None for one in answers])
        return answers if node else spread(answers, request.needed)

    def _answer(self, request: Request, given: Sequence[Tensor]) -> tuple[Gradients, Sequence[bool]]:
        is_over = request.node == 0 and not request.again
        step = None
        if self._computed is None and self.chain is not None and self.chain.slot.latest is self.waiting:
            step = next((one for one in self._next if one.request == request), None)
            step = step or next((one for one in self._next if one.request.covers(request)), None)
        if step is not None:
            answers = step.answered(request, given)
            self._next = step.following
            self.waiting.is_over = not self._next
            return answers, step.have_gradients
        if self._computed is None:
            self._computed = self._computed_again()
        self.waiting.is_over = is_over
        answers = self._computed.answer(request, _with_gradients(given, request))
        return answers, [one.requires_grad for one in answers if one is not None]

    def _computed_again(self) -> Computed:
        """Computes what was replayed up to now, because what is asked for next was not captured."""
        self._passes.append((self.requests, weakref.ref(self.waiting)))
        made = Computed(self.function, as_leaves(self.tensors), self._weights)
        with run_again(self.function.call, self.tensors, self._versions, self._drawn):
            made.start()
            for request, given in self._history:
                made.answer(request, _with_gradients(given, request))
        return made


def _with_gradients(given: Sequence[Tensor], request: Request) -> list[Tensor]:
    pairs = zip(given, request.tracked, strict=True)
    return [one.detach().requires_grad_(is_tracked) for one, is_tracked in pairs]


_TASK: Callable[[], int] | None = private("torch._C", "_current_graph_task_id")


def current_task() -> int:
    """Returns the number of the backward pass that is at work; -1 if there is none, or it is not known."""
    return -1 if _TASK is None else _TASK()


class _Call(torch.autograd.Function):
    """A call as autograd sees it; its last result is a token."""

    @staticmethod
    def forward(ctx: Any, run: Pass, num_tensors: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, have_gradients = run.start(tensors[:num_tensors], tensors[num_tensors:])
        ctx.run = run
        return _results(ctx, outputs, have_gradients, run.token)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        run = cast(Pass, ctx.run)
        run.note(0, given[:-1])
        again = torch.is_grad_enabled()
        found = run.ask(0, ctx, ctx.saved_tensors[-1])
        if not again:
            copied = not accumulates(ctx.next_functions)
            leaves = [one.is_leaf for one in run.tensors] + [False] * (len(found) - len(run.tensors))
            found = [held(one, copied=copied or leaf) for one, leaf in zip(found, leaves, strict=True)]
        return None, None, *found


class _Gradients(torch.autograd.Function):
    """Gradients that may be differentiated again, as autograd sees them; the last result is a token."""

    @staticmethod
    def forward(
        ctx: Any, run: Pass, number: int, values: Sequence[Tensor], known: Sequence[bool], num_tokens: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.number, ctx.num_tokens = run, number, num_tokens
        return _results(ctx, values, known, run.token, tensors[0])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        run, (call_token, token) = cast(Pass, ctx.run), ctx.saved_tensors
        run.note(ctx.number, given[:-1])
        found: Gradients = [None] * (len(ctx.next_functions) - ctx.num_tokens)
        if run.tracks(ctx.number):
            found = run.ask(ctx.number, call_token.grad_fn, call_token)
            run.add_token(token)
        return *[None] * 5, *[run.token] * ctx.num_tokens, *found


def _results(ctx: Any, values: Sequence[Tensor], known: Sequence[bool], token: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """Returns results of a node of autograd, with a token of its own; `known` tells which may have gradients."""
    ctx.set_materialize_grads(False)
    outputs, own = tuple(one.detach() for one in values), token.detach()
    ctx.mark_non_differentiable(*(one for one, is_known in zip(outputs, known, strict=True) if not is_known))
    ctx.save_for_backward(*saved, own)
    return *outputs, own
