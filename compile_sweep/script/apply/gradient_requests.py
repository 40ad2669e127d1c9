"""Learns what a script asks of a module's calls, and captures it.

Most scripts ask for one backward pass. With `retain_graph=True` they ask for several; a penalty on gradients takes some with
`create_graph=True`, and a differential equation does so as often as its order says. What is asked for, and in which order, is
learned from calls that run as they are. The call and all that is asked of it are then captured one after the other, each as a
CUDA graph that reads what those before it left in memory, and are replayed in that order.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.script.apply.captured_graph import CallMemory, Function, Replayed, Slot, Waiting
from compile_sweep.script.apply.computed_gradients import Computed, Request, RequestSequence, RequestTree
from compile_sweep.script.apply.graph_recording import GraphRecorder, apart
from compile_sweep.script.apply.module_call import captured
from compile_sweep.script.apply.replayed_call import Chain, Pass, Passes, Step, current_task

MOST_SEQUENCES = 4
"""Sequences of requests for which a kind of call is captured: a penalty may come every few steps only."""


class GradientRequests:
    """What is asked of the calls of a kind.

    Args:
        function: The call.
        results: Those of the first call, which runs as it is, for what the script will ask of it.
    """

    def __init__(self, function: Function, results: Sequence[Tensor]) -> None:
        self._function = function
        self.are_possible = any(one.requires_grad for one in results)
        """Whether results depend on something that is trained."""
        self.sequences: list[RequestSequence] = []
        """What was asked of a call, from the first to the last request."""
        self._passes: Passes = []
        self._noted: dict[int, dict[int, tuple[bool, tuple[bool, torch.dtype]]]] = {}
        for number, one in enumerate(results):
            if one.requires_grad:
                one.register_hook(partial(self._note, number))

    def _note(self, number: int, _: Tensor) -> None:
        self._noted.setdefault(current_task(), {})[number] = (torch.is_grad_enabled(), self._function.call.autocast)

    @property
    def are_made(self) -> bool:
        """Whether a gradient of the first call's results was taken."""
        return bool(self._noted)

    def watched(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call that runs as it is, to learn what is asked of it."""
        return Pass(self._function, self._passes, None).results_of(given, self._weights())

    def _weights(self) -> list[nn.Parameter]:
        return [one for one in self._function.call.parameters if one.requires_grad]

    def learned(self, given: Sequence[Tensor]) -> bool:
        """Learns from calls that were not replayed; tells whether something is to be captured that was not before.

        Args:
            given: Tensors that a call was given.
        """
        before = list(self.sequences)
        if not self.sequences and not self._passes and (simple := self._simple(given)):
            self.sequences = [simple]
        ended = [tuple(some) for some, waiting in self._passes if _is_over(waiting())]
        self._passes[:] = [one for one in self._passes if not _is_over(one[1]())]
        for new in filter(None, ended):
            self._add(new)
        return self.sequences != before

    def _simple(self, given: Sequence[Tensor]) -> RequestSequence | None:
        """Returns the one backward pass that was asked of the first call; None if that was not all."""
        if len(self._noted) != 1:
            return None
        (noted,) = self._noted.values()
        again, autocast = next(iter(noted.values()))
        if again:
            return None
        numbers = tuple(sorted(noted))
        needed = tuple(one.requires_grad for one in (*given, *self._weights()))
        tracked = (False,) * len(numbers)
        return (Request(node=0, is_first=True, given=numbers, tracked=tracked, needed=needed, again=False, autocast=autocast),)

    def _add(self, new: RequestSequence) -> None:
        for place, known in enumerate(self.sequences):
            if all(one.covers(other) for one, other in zip(known, new, strict=False)) and len(new) <= len(known):
                return
            if len(new) == len(known) and all(one.differs_little(other) for one, other in zip(known, new, strict=True)):
                self.sequences[place] = tuple(
                    one if one == other else one.joined(other) for one, other in zip(known, new, strict=True)
                )
                return
        others = [known for known in self.sequences if not (len(known) <= len(new) and all(map(Request.covers, new, known)))]
        if len(others) < MOST_SEQUENCES:
            self.sequences = [*others, new]

    def captured(self, recorder: GraphRecorder, given: Sequence[Tensor], slot: Slot) -> Replayed | str:
        """Captures a call with what is asked of it; returns why if it cannot be.

        Args:
            recorder: Captures it.
            given: Tensors that a call was given.
            slot: Where the graphs' memory is.
        """
        tree: RequestTree = {}
        for sequence in self.sequences:
            place = tree
            for request in sequence:
                place = place.setdefault(request, {})
        memory = CallMemory(self._function, given)
        computed = Computed(self._function, memory.inputs, memory.trained, memory.run)

        def trial() -> str:
            computed.start()
            return computed.try_out(tree, memory.parameters)

        with memory.tried(trial) as reason:
            if reason:
                return reason
            with captured(self._function.call.module):
                device = self._function.call.device
                forward, outputs = recorder.record(computed.start, device, slot.pool)
                have_gradients = [one.requires_grad for one in computed.results]
                first = _recorded(recorder, computed, tree, slot.pool, device)
        return Chain(
            memory=memory,
            forward=forward,
            outputs=outputs,
            have_gradients=have_gradients,
            first=first,
            slot=slot,
            function=self._function,
            passes=self._passes,
        )


def _is_over(waiting: Waiting | None) -> bool:
    return waiting is None or waiting.is_over


def _recorded(
    recorder: GraphRecorder, computed: Computed, tree: RequestTree, pool: Any, device: torch.device, *, more: bool = False
) -> list[Step]:
    """Captures what may be asked for next; `more` tells whether the call's own memory is needed afterward."""
    steps = []
    for place, (request, rest) in enumerate(computed.each(tree), 1):
        is_last = place == len(tree) and not more
        steps.append(step := _recorded_step(recorder, computed, request, pool, device, keep=bool(rest) or not is_last))
        step.following = _recorded(recorder, computed, rest, pool, device, more=not is_last)
    return steps


def _recorded_step(
    recorder: GraphRecorder, computed: Computed, request: Request, pool: Any, device: torch.device, *, keep: bool
) -> Step:
    memory, have_gradients = computed.zeros(request), list[bool]()

    def run() -> list[Tensor | None]:
        answers = apart(computed.answer(request, memory, keep=keep), memory)
        have_gradients[:] = [one.requires_grad for one in answers if one is not None]
        return answers

    graph, answers = recorder.record_gradients(run, device, pool)
    return Step(request=request, memory=memory, graph=graph, answers=answers, have_gradients=have_gradients)
