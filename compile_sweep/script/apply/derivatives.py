"""Captured calls whose gradients are differentiated again, as autograd sees them.

A penalty on gradients takes them with `create_graph=True`, and a differential equation does so as often as its order says. What a
script asks for, and in which order, is learned from a call that runs as it is. The call and all that is asked of it are then
captured one after the other, each as a graph that reads what those before it left in memory, and are replayed in that order.

To autograd, gradients that may be differentiated again come from nodes of their own, which depend on a token that the call
returns. So a backward pass reaches the call's node last, when it knows the gradients of all of them, and one graph computes
those of the call's tensors and weights from them.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    spread,
)
from compile_sweep.script.apply.graph_recording import GraphRecorder, apart, generator_state, recording, versions_of
from compile_sweep.script.apply.module_call import captured, unsuitable

MOST_SEQUENCES = 4
"""Sequences of requests for which a kind of call is captured: a penalty may come every few steps only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
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


_Sequence = tuple[_Request, ...]
_Tree = dict[_Request, "_Tree"]


class _Computed:
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

    def answer(self, request: _Request, given: Sequence[Tensor], *, keep: bool = True) -> list[Tensor | None]:
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

    def _asked(self, request: _Request) -> list[tuple[int, int]]:
        if request.node == 0:
            return [(0, place) for place, is_needed in enumerate(request.needed) if is_needed]
        return [(request.node, place) for place, _ in enumerate(self._tracked[request.node - 1])]

    def zeros(self, request: _Request) -> list[Tensor]:
        """Returns memory for the gradients that a request comes with."""
        pairs = zip(request.given, request.tracked, strict=True)
        return [torch.zeros_like(self.results[number]).requires_grad_(is_tracked) for number, is_tracked in pairs]

    def each(self, tree: _Tree) -> Iterator[tuple[_Request, _Tree]]:
        """Yields the requests of a tree with those that may follow; what came before each is computed when it is yielded."""
        for request, rest in tree.items():
            before = list(self.results), list(self._tracked), dict(self._sums)
            yield request, rest
            self.results, self._tracked, self._sums = before

    def try_out(self, tree: _Tree) -> str:
        """Answers all requests of a tree; returns why that cannot be captured, empty if it can."""
        reason = ""
        for request, rest in self.each(tree):
            found = self.answer(request, self.zeros(request))
            reason = reason or unsuitable(found, "has gradients of", self._function.call.device) or self.try_out(rest)
        return reason


@dataclass(slots=True, kw_only=True)
class _Step:
    """A request that was captured."""

    request: _Request
    memory: Sequence[Tensor]
    """That of the gradients that it comes with."""
    graph: Any
    answers: Gradients
    have_gradients: Sequence[bool]
    """Which of the answers depend on something that may be differentiated."""
    following: Sequence["_Step"] = ()


@dataclass(slots=True, kw_only=True)
class _Chain:
    """A captured call with what is asked of it."""

    memory: CallMemory
    forward: Any
    outputs: Sequence[Tensor]
    first: Sequence[_Step]
    slot: Slot
    function: Function
    passes: "_Passes"

    @property
    def gradients(self) -> Iterator[Tensor | None]:
        """Memory of the gradients of weights."""

        def those(steps: Sequence[_Step]) -> Iterator[Tensor | None]:
            for step in steps:
                yield from step.answers
                yield from those(step.following)

        return those(self.first)

    def replayed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call with these tensors."""
        self.slot.copy_gradients(self.memory.parameters)
        return _Pass(self.function, self.passes, self).results_of(tensors, self.memory.parameters)


_Passes = list[tuple[list[_Request], weakref.ref[Waiting]]]
"""What was asked of calls that were not replayed, or not to the end; and what stands for each while more may be."""


class _Pass:
    """A call, and what was asked of it up to now.

    Args:
        function: The call.
        passes: Where it is noted if it is not replayed to the end.
        chain: The captured call; None to compute it as it is.
    """

    def __init__(self, function: Function, passes: "_Passes", chain: _Chain | None) -> None:
        self.function, self._passes, self.chain = function, passes, chain
        self.waiting = Waiting(1)
        self.requests: list[_Request] = []
        self._given: list[Sequence[Tensor]] = []
        self._next: Sequence[_Step] = chain.first if chain else ()
        self._computed: _Computed | None = None
        self._firsts, self._num_results = [0], 0
        self.token = torch.empty(0, device=function.call.device)
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
            self._computed = _Computed(self.function, as_leaves(tensors), weights)
            with recording():
                outputs: Sequence[Tensor] = self._computed.start()
            have_gradients: Sequence[bool] = [one.requires_grad for one in outputs]
        else:
            memory = self.chain.memory
            if tensors:
                torch._foreach_copy_(memory.inputs, list(tensors))
            if memory.draws:
                self._drawn = generator_state(self.function.call.device)
            self.chain.forward.replay()
            self.chain.slot.latest = self.waiting
            outputs, have_gradients = self.chain.outputs, memory.have_gradients
        self._num_results = len(outputs)
        return outputs, have_gradients

    def note(self, node: int, given: Gradients) -> None:
        """Notes the gradients of results of the call or of a request, in a backward pass."""
        task = -1 if _TASK is None else _TASK()
        if task != self._task:
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
        needed = [one.requires_grad for one in (*self.tensors, *self._weights)]
        request = _Request(
            node=node,
            is_first=self._is_first,
            given=tuple(numbers),
            tracked=tuple(again and one.requires_grad for one in given),
            needed=tuple(are_needed(needed, call.next_functions) if again else needed),
            again=again,
            autocast=self.function.call.autocast,
        )
        self._pending, self._is_first = {}, False
        answers, have_gradients = self._answer(request, given)
        self.requests.append(request)
        self._given.append([one.detach() for one in given])
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

    def _answer(self, request: _Request, given: Sequence[Tensor]) -> tuple[Gradients, Sequence[bool]]:
        is_over = request.node == 0 and not request.again
        step = None
        if self._computed is None and self.chain is not None and self.chain.slot.latest is self.waiting:
            step = next((one for one in self._next if one.request == request), None)
        if step is not None:
            if given:
                torch._foreach_copy_([one.detach() for one in step.memory], [one.detach() for one in given])
            step.graph.replay()
            self._next = step.following
            self.waiting.num_left = len(self._next)
            return step.answers, step.have_gradients
        if self._computed is None:
            self._computed = self._computed_again()
        self.waiting.num_left = 0 if is_over else 1
        answers = self._computed.answer(request, _with_gradients(given, request))
        return answers, [one.requires_grad for one in answers if one is not None]

    def _computed_again(self) -> _Computed:
        """Computes what was replayed up to now, because what is asked for next was not captured."""
        self._passes.append((self.requests, weakref.ref(self.waiting)))
        made = _Computed(self.function, as_leaves(self.tensors), self._weights)
        with run_again(self.function.call, self.tensors, self._versions, self._drawn):
            made.start()
            for request, given in zip(self.requests, self._given, strict=True):
                made.answer(request, _with_gradients(given, request))
        return made


def _with_gradients(given: Sequence[Tensor], request: _Request) -> list[Tensor]:
    pairs = zip(given, request.tracked, strict=True)
    return [one.detach().requires_grad_(is_tracked) for one, is_tracked in pairs]


_TASK: Callable[[], int] | None = private("torch._C", "_current_graph_task_id")
"""Returns the number of the backward pass that is at work."""


class _Call(torch.autograd.Function):
    """A call as autograd sees it; its last result is a token."""

    @staticmethod
    def forward(ctx: Any, run: _Pass, num_tensors: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, have_gradients = run.start(tensors[:num_tensors], tensors[num_tensors:])
        ctx.run = run
        return _results(ctx, outputs, have_gradients, run.token)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        run = cast(_Pass, ctx.run)
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
        ctx: Any, run: _Pass, number: int, values: Sequence[Tensor], known: Sequence[bool], num_tokens: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.number, ctx.num_tokens = run, number, num_tokens
        return _results(ctx, values, known, run.token, tensors[0])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        run, (call_token, token) = cast(_Pass, ctx.run), ctx.saved_tensors
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


class Derivatives:
    """What is asked of the calls of a kind, besides a backward pass.

    Args:
        function: The call.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self.are_taken = False
        """Whether gradients were taken that may be differentiated again."""
        self.sequences: list[_Sequence] = []
        """What was asked of a call, from the first to the last request."""
        self._passes: _Passes = []

    def note(self) -> None:
        """Notes that gradients may be differentiated again."""
        self.are_taken = True

    def watched(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call that runs as it is, to learn what is asked of it."""
        weights = [one for one in self._function.call.parameters if one.requires_grad]
        return _Pass(self._function, self._passes, None).results_of(given, weights)

    def learned(self) -> bool:
        """Learns from calls that were not replayed; tells whether something is to be captured that was not before."""
        before = list(self.sequences)
        ended = [tuple(some) for some, waiting in self._passes if _is_over(waiting())]
        self._passes[:] = [one for one in self._passes if not _is_over(one[1]())]
        for new in ended:
            if new and all(new != one[: len(new)] for one in self.sequences):
                others = [one for one in self.sequences if one != new[: len(one)]]
                self.sequences = [*others, new] if len(others) < MOST_SEQUENCES else self.sequences
        return self.sequences != before

    def captured(self, recorder: GraphRecorder, given: Sequence[Tensor], uses: Sequence[int], slot: Slot) -> _Chain | str:
        """Captures a call with what is asked of it; returns why if it cannot be.

        Args:
            recorder: Captures it.
            given: Tensors that a call was given.
            uses: How often each result gets a gradient.
            slot: Where the graphs' memory is.
        """
        tree: _Tree = {}
        for sequence in self.sequences:
            place = tree
            for request in sequence:
                place = place.setdefault(request, {})
        memory = CallMemory(self._function, given)
        computed = _Computed(self._function, memory.inputs, memory.trained, memory.run)
        refused = ""

        def try_out() -> None:
            nonlocal refused
            computed.start()
            refused = computed.try_out(tree)

        with memory.tried(uses, try_out) as reason:
            if reason := reason or refused:
                return reason
            with captured(self._function.call.module):
                forward, outputs = recorder.record_forward(computed.start, self._function.call.device, slot.pool)
                first = _recorded(recorder, computed, tree, slot.pool, self._function.call.device)
        return _Chain(
            memory=memory,
            forward=forward,
            outputs=[one.detach() for one in outputs],
            first=first,
            slot=slot,
            function=self._function,
            passes=self._passes,
        )


def _is_over(waiting: Waiting | None) -> bool:
    return waiting is None or waiting.num_left == 0


def _recorded(
    recorder: GraphRecorder, computed: _Computed, tree: _Tree, pool: Any, device: torch.device, *, more: bool = False
) -> list[_Step]:
    """Captures what may be asked for next; `more` tells whether the call's own memory is needed afterward."""
    steps = []
    for place, (request, rest) in enumerate(computed.each(tree), 1):
        is_last = place == len(tree) and not more
        steps.append(step := _recorded_step(recorder, computed, request, pool, device, keep=bool(rest) or not is_last))
        step.following = _recorded(recorder, computed, rest, pool, device, more=not is_last)
    return steps


def _recorded_step(
    recorder: GraphRecorder, computed: _Computed, request: _Request, pool: Any, device: torch.device, *, keep: bool
) -> _Step:
    memory, known = computed.zeros(request), list[bool | None]()

    def run() -> list[Tensor]:
        answers = apart(computed.answer(request, memory, keep=keep), memory)
        known[:] = [None if one is None else one.requires_grad for one in answers]
        return [one for one in answers if one is not None]

    graph, found = recorder.record_forward(run, device, pool)
    answers = spread([one.detach() for one in found], [one is not None for one in known])
    have_gradients = [one for one in known if one is not None]
    return _Step(request=request, memory=memory, graph=graph, answers=answers, have_gradients=have_gradients)
