"""What happens inside a script while it runs: discovery, warm-up, steady state, and its end.

Background: the script calls this code through torch's hooks, and never waits for it. A step of an optimizer ends a step. The
first few steps are watched (`discover.py`). Then the settings are applied; the next steps are recorded for the comparison with
eager runs, and warm up until nothing has compiled for some steps. Then steps are timed until their median is certain
(`steady_steps.py`). The results are written before an exception that no `except Exception` catches ends the script; if it
continues anyway, its process is ended.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_sweep.contract.inspect_model import are_time_first, shapes_of, size_of
from compile_sweep.contract.installed_torch import outside_of_transforms
from compile_sweep.contract.seeding import own_random_numbers
from compile_sweep.harness import memory
from compile_sweep.harness.compile_phases import PhaseClock, record_phases
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.distributed import everywhere
from compile_sweep.harness.numerics.gradient_check import GradientCheck
from compile_sweep.harness.numerics.references import RANDOM_REPEATS, kernel_rounding, perturb
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.harness.protocol import Protocol
from compile_sweep.harness.steady import synchronize
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.script import numerics
from compile_sweep.script.apply.frozen import apply_to_discovered
from compile_sweep.script.apply.graph_memory import wrap_call
from compile_sweep.script.apply.in_place import (
    OwnCompile,
    apply_to_losses,
    apply_to_optimizers,
    expectation,
    overridden,
    process_wide,
    set_global_state,
)
from compile_sweep.script.apply.module_names import name_as_the_script_does
from compile_sweep.script.apply.padding import MOST_CHANGE, ROUNDINGS, Padder, change_of_outputs, why_not_padded
from compile_sweep.script.clock import StepClock, StepTime, interrupting, loaders_watched, saves_watched
from compile_sweep.script.discover import MAX_STEPS, Discovery, Target, Watch, is_of_the_loop, leave_out
from compile_sweep.script.fallback import FallbackWatch
from compile_sweep.script.gradients import CallRecorder, check_calls, inner_call
from compile_sweep.script.job import FellBackError, ScriptError
from compile_sweep.script.monkeypatch import replaced
from compile_sweep.script.processes import ELSEWHERE, Processes, why_no_module
from compile_sweep.script.steady_steps import Stream

QUIET_STEPS = 3  # number of steps without a compile after which no more are expected

CUDAGRAPH_QUIET_STEPS = 5
"""The equivalent with CUDA graphs, which are captured in the second run of a graph and replayed from the third."""

MAX_WARMUP_STEPS = 100
"""Number of steps after which timing starts although something still compiles; the record says what."""

NO_OPTIMIZER = (
    "the script computes gradients but no optimizer of torch.optim steps; mark its steps, for batch in "
    "compile_sweep.steps(loader), which does nothing outside a sweep"
)

MAX_FUNCTIONAL = 50
"""Number of gradients taken by torch.func after which a script without a backward pass counts as training by them."""

FUNCTIONAL = (
    "the script takes its gradients by torch.func, as by grad of a functional_call, where a compiled module runs uncompiled; "
    "have it call the module itself, model(x), and loss.backward(), and if then no optimizer of torch.optim steps, mark its "
    "steps: for batch in compile_sweep.steps(loader)"
)

TAKES_OVER_AFTER = 2
"""Steps of a new optimizer without one of the anchor's in between, after which it has taken the anchor's place."""

MOST_SHAPES_MET = 16  # of a target's shapes in turn, how many are kept
MAX_RESTARTS = 3  # maximum number of restarts of the timing because something compiled


class Stop(BaseException):
    """Ends a script from within a hook."""


class Kind(StrEnum):
    """Purpose of a script's run."""

    MEASURED = "measured"
    EAGER = "eager"
    """Recorded: the script unchanged, without compiling anything."""
    AGAIN = "again"
    """Recorded: the eager run repeated."""
    PERTURBED = "perturbed"
    """Recorded: the eager run with weights changed by roundings."""


class Session:
    """One run of a script.

    Args:
        forward_seed: Seed of the forward's random numbers while steps are recorded.
        on_over: Called when everything is found, or `error` says why it cannot be; writes the results.
    """

    def __init__(
        self,
        settings: CompileSettings,
        *,
        kind: Kind = Kind.MEASURED,
        protocol: Protocol | None = None,
        forward_seed: int = 0,
        report: Path | None = None,
        on_phase: Callable[[Phase], None] = lambda phase: None,
        on_discovered: Callable[[Session], None] = lambda session: None,
        on_first_pass: Callable[[Session], None] = lambda session: None,
        on_over: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self.settings = settings
        self.kind = kind
        self.protocol = protocol or Protocol()
        self.error: BaseException | None = None
        self.own_compile = OwnCompile()
        self.device = torch.device("cpu")
        self.missed: list[str] = []
        self.trajectory: Trajectory | None = None
        self.changed_in_classes: list[str] = []
        self.gradient_check: GradientCheck | None = None
        """Whether the compiled modules' gradients belong to what they compute; None if nothing is compiled."""
        self.diagnostics = Diagnostics()
        self.phases = PhaseClock()
        self.warmup: list[StepTime] = []
        self.warmup_s = self.first_step_s = 0.0
        self.warmup_peaks = self.peaks = memory.read_peaks(self.device)
        self.stream: Stream | None = None
        self.losses: list[Tensor] = []
        """Losses of timed steps."""
        self.sizes: list[tuple[int, int]] = []
        """Samples and tokens of each step since the discovery."""
        self.restarts = 0
        self.num_losses = 0
        """Number of backward passes."""
        self.other_steps = 0
        """Steps, since the discovery, of optimizers that train modules other than the measured ones."""
        self.num_without_gradients = self.num_evaluated = 0
        """Calls of the modules without gradients since the discovery, and those of them in evaluation mode."""
        self.processes = Processes(
            refuse=lambda reason: self._fail(ScriptError(reason)), has_trained=lambda: self.num_losses > 0, report=report
        )
        """Processes that the script started."""
        self._on_phase, self._on_discovered, self._on_first_pass, self._on_over = on_phase, on_discovered, on_first_pass, on_over
        self._watch = Watch(self._watched_step, self._discovered, self._take_functional)
        self._undo, self._hooks = ExitStack(), ExitStack()
        self._anchor: Optimizer | None = None
        """The optimizer whose step ends a step."""
        self._stepped_since: list[Optimizer] = []
        """Optimizers that were not there during the discovery, a step each, since the anchor's last one."""
        self._clock: StepClock | None = None
        self._recorder: numerics.StepRecorder | None = None
        self._inner: dict[Target, Callable[..., Any]] = {}
        self._calls = CallRecorder()
        self._keeps_calls = self._has_looked = False
        self._forward_seed = forward_seed
        self._forwards = 1_000_003 * forward_seed
        self._step_losses: list[Tensor] = []
        self._size = [0, 0]
        self._mode_tells = True  # that a call without no_grad is an evaluation, until a step has no other calls
        self.shapes_met: defaultdict[Target, list[tuple[tuple[int, ...], ...]]] = defaultdict(list)
        """Shapes of each target's arguments after the discovery, in turn: each that differs from the one before."""
        self.times_met: Counter[tuple[Target, tuple[tuple[int, ...], ...]]] = Counter()
        """How often a module was called with tensors of these shapes."""
        self._stage: Callable[[list[Tensor]], None] = self._recording
        self._began = 0.0
        self._compiles, self._compiled_at, self._compiled_in_pass = 0, 0, False
        self._timed = -1
        self.is_over = False
        """Whether everything is found, or there is an error."""

    @property
    def found(self) -> Discovery:
        """What was discovered so far."""
        return self._watch.found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Observes the script, which runs in the block."""
        plainly = not self.settings.as_written or self.kind is not Kind.MEASURED
        with ExitStack() as around:
            around.enter_context(self.own_compile.answered(plainly=plainly))
            around.enter_context(loaders_watched(lambda: self._clock))
            around.enter_context(replaced(torch.autograd, "backward", self._noting_losses))
            around.enter_context(saves_watched(lambda: self._clock))
            around.enter_context(self.processes.watched())
            around.callback(self._undo.close)
            around.callback(self._hooks.close)  # not earlier: torch allows no hook to be removed while hooks run
            around.callback(self._watch.end)
            process_wide(self.settings)
            self._on_phase(Phase.BUILDING)
            self._watch.begin()
            _current.append(self)
            around.callback(_current.remove, self)
            yield

    def mark_step(self) -> None:
        """Marks the end of a step, on behalf of the script."""
        if self._clock is not None:
            self._step()
        else:
            self.found.marked = True
            if self._step_losses or self.found.num_taken:  # there is none when a loop begins
                self.found.num_marked += 1
                self.found.settle()
            self._step_losses.clear()

    def finish_early(self) -> bool:
        """Finishes when the script has ended by itself, with what was timed. Returns whether everything is found."""
        if self.stream is not None and not self.is_over and self._clock is not None and self._stage == self._timing:
            self.stream.take(self._clock.stop() if self._timed >= 0 else [], are_last=True)  # < 0 between two passes
            if len(self.stream.passes) > 1:
                self._end(stops=False)
        return self.is_over

    @property
    def is_functional(self) -> bool:
        """Whether the script has taken gradients by torch.func only."""
        return self.found.num_functional > 0 and not self.num_losses

    def _take_functional(self) -> None:
        if self.is_functional and self.found.num_functional > MAX_FUNCTIONAL:
            self._fail(ScriptError(FUNCTIONAL))
        found = self.found
        if found.num_taken > MAX_FUNCTIONAL and not (self.num_losses or found.optimizers or found.constructed or found.marked):
            self._fail(ScriptError(NO_OPTIMIZER))

    def _watched_step(self) -> None:
        self._step_losses.clear()
        if self.processes.is_fork:
            if not self.processes.trained_before:
                self._fail(ScriptError(ELSEWHERE))
            return
        if not self.found.targets and self.found.num_steps >= MAX_STEPS:  # watching ends in a module's call, and there was none
            self._fail(ScriptError(FUNCTIONAL if self.is_functional else why_no_module()))

    def _discovered(self) -> None:
        """Applies the settings, and sets the hooks that mark steps from here on."""
        if self.processes.is_fork:
            return
        try:
            with outside_of_transforms():
                self._begin()
        except Exception as error:  # raised in a module's call, where the script might catch it
            self._fail(error)

    def _begin(self) -> None:
        found = self.found
        if self.is_functional:
            raise ScriptError(FUNCTIONAL)
        if not found.targets:
            raise ScriptError(why_no_module())
        name_as_the_script_does(found.trained_and_frozen)
        if self._compiles_modules and any(isinstance(target.module, torch.jit.ScriptModule) for target in found.targets):
            raise ScriptError(
                "the script makes its model a torch.jit.ScriptModule, which torch.compile cannot compile; leave torch.jit.script "
                "or torch.jit.trace out"
            )
        self.device = found.primary.device
        if found.anchor is not None:
            self._anchor = found.anchor
            stepped = torch.compiler.disable(self._stepped)  # the script may compile a function that steps the optimizer
            self._hooks.callback(register_optimizer_step_post_hook(stepped).remove)
        if self.kind is Kind.PERTURBED:
            weights = (one for target in found.targets for one in target.module.parameters())
            rounding = numerics.rounding_of(found.primary)
            is_further = self._forward_seed > RANDOM_REPEATS
            perturb(weights, kernel_rounding(rounding) if is_further else rounding, self._forward_seed)
        if self.kind is Kind.MEASURED:
            if self.settings.pad_to_multiple_of is not None:
                self._refuse_padding()
            leave_out(found.trained_and_frozen, self.settings.parts)
            memory.reset_peaks(self.device)
            self._fallbacks = FallbackWatch(self.settings, found, self.protocol)
            self.diagnostics = self._undo.enter_context(capture_diagnostics(expectation(self.settings, found), self._fell_back))
            self.phases = self._undo.enter_context(record_phases())
            set_global_state(self.settings)
            self.missed = apply_to_losses(self.settings, found, self._undo)
            apply_to_discovered(self.settings, found, self.own_compile)
            self.missed += apply_to_optimizers(self.settings, found.optimizers, together=found.steps_together)
        self._on_discovered(self)
        self._recorder = numerics.StepRecorder(found.targets, steps=self.protocol.compared_steps)
        if not (self.own_compile.modules and self.settings.as_written):  # which may be compiled together with what calls them
            for average in found.averages():
                wrap_call(average, partial(interrupting, lambda: self._clock))
        self._wrap(isolated=True)
        self._has_compiled()
        self._clock = StepClock(self.device)
        self._on_phase(Phase.WARMING_UP)
        self._began = time.perf_counter()
        self._clock.start()

    def _refuse_padding(self) -> None:
        """Raises an error if the next call shows that a module computes something else for texts that are padded further."""
        module, args, kwargs = self._watch.next_call or (None, (), {})
        reason = ""
        for target in self.found.targets:
            if target.called is module and why_not_padded(target) is None:
                with own_random_numbers(self.device, self._forward_seed):
                    change = change_of_outputs(target.module, args, kwargs)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # nothing of it is the setting's
                if change > max(MOST_CHANGE, ROUNDINGS * numerics.rounding_of(target)):
                    reason = (
                        f"pad_to_multiple_of changes what {target.name} computes, by {100 * change:.2g}% with texts twice as "
                        "long, as where padding takes part in an average; leave it out"
                    )
        if not everywhere(not reason, self.device):
            raise ScriptError(reason or "pad_to_multiple_of changes what the model computes in another worker; leave it out")

    def _wrap(self, *, isolated: bool) -> None:
        """Hooks into the script's calls of its modules, outside of compiled code."""
        if self.own_compile.functions and self.settings.as_written:
            return  # the script compiles functions that may call the modules
        for target in self.found.targets:
            # Neither of the two is included when the module is copied or pickled.
            held, name = vars(target.called), "forward" if isinstance(target.called, OptimizedModule) else "_compiled_call_impl"
            inner = self._inner.setdefault(target, held.get(name) or target.called._call_impl)
            counted = self._counted(target, inner)
            held[name] = self._isolated(counted) if isolated and target.draws else counted

    def _counted(self, target: Target, inner: Callable[..., Any]) -> Callable[..., Any]:
        counts = target is self.found.primary
        multiple = self.settings.pad_to_multiple_of if self.kind is Kind.MEASURED else None
        time_first = are_time_first(target.sizes)
        padder = None if multiple is None else Padder(target.module, multiple)
        trains = target.module.training  # a step has just ended

        def call(*args: Any, **kwargs: Any) -> Any:
            has_gradients = torch.is_grad_enabled()
            is_evaluated = not has_gradients or (trains and self._mode_tells and not target.module.training)
            if is_evaluated:
                self._interrupt()
                self.num_without_gradients += not has_gradients
                self.num_evaluated += not has_gradients and not target.module.training
            else:
                shapes = shapes_of(args, kwargs)
                self._meet(target, shapes if padder is None else shapes_of(*padder.without_values(args, kwargs)))
                if self._clock is not None:
                    self._clock.meet(shapes)
                if counts:
                    self._look_at_settings()
                    size = size_of(args, kwargs, is_time_first=time_first, module=target.module)
                    self._size = [total + more for total, more in zip(self._size, size, strict=True)]
            keeps = self._keeps_calls and not is_evaluated and not target.stays_eager
            try:
                return self._calls.call(target, inner, args, kwargs) if keeps else inner(*args, **kwargs)
            except Exception as error:
                self.found.note_error(error, target)
                raise

        return call

    def _meet(self, target: Target, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Notes whether these shapes have come as often as code and kernels for them need to be ready."""
        self.times_met[target, shapes] += 1
        met = self.shapes_met[target]
        if met[-1:] != [shapes] and len(met) < MOST_SHAPES_MET:
            met.append(shapes)
        if self.times_met[target, shapes] < (self.protocol.cudagraph_visits if self.has_graphs else self.protocol.visits):
            assert self._clock is not None
            self._clock.meet_new()

    def _look_at_settings(self) -> None:
        """Notes, in the second step, which settings the script has replaced since they were applied."""
        if self.kind is Kind.MEASURED and not self._has_looked and self.sizes:
            self._has_looked = True
            with suppress(RuntimeError):  # torch refuses to say the precision where it was set in a new and in an old way
                self.missed += overridden(self.settings)

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs may be recorded."""
        return bool(self.settings.claims_cudagraphs or (self.settings.as_written and self.own_compile.modules))

    def _isolated(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._forwards += 1
            with own_random_numbers(self.device, self._forwards):
                return inner(*args, **kwargs)

        return call

    def _interrupt(self) -> None:
        if self._clock is not None:
            self._clock.interrupt()

    def _noting_losses(self, backward: Callable[..., None]) -> Callable[..., None]:
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not is_of_the_loop():  # one inside of another, of a part that is recomputed (use_reentrant=True)
                backward(tensors, *args, **kwargs)
                return
            for loss in [tensors] if isinstance(tensors, Tensor) else tensors:
                self.num_losses += 1
                if isinstance(loss, Tensor):  # a copy: with CUDA graphs the next step overwrites the original
                    self._step_losses.append(loss.detach().clone() if loss.numel() == 1 else loss.detach().float().mean())
            backward(tensors, *args, **kwargs)
            if self.found.steps_by_backward and self._clock is not None and not self.processes.is_fork:
                self._step()

        # The script may compile a function that runs the backward pass.
        apart: Callable[..., None] = torch.compiler.disable(noted)
        return apart

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped: the anchor, or one that the script made later, as when it unfreezes layers."""
        if self.processes.is_fork:
            return
        if self.is_over:  # the script caught what was to end it
            leave()
        if optimizer is not self._anchor:
            if any(optimizer is known for known in self.found.optimizers):
                return
            self._stepped_since.append(optimizer)
            if not self._trains_targets(optimizer):
                self.other_steps += 1
                return
            if sum(optimizer is other for other in self._stepped_since) < TAKES_OVER_AFTER:
                return
            self._anchor = optimizer
            self.found.optimizers.append(optimizer)
            if self.kind is Kind.MEASURED:
                self.missed += apply_to_optimizers(self.settings, [optimizer])
            self._interrupt()
        self._stepped_since.clear()
        self._step()

    def _trains_targets(self, optimizer: Optimizer) -> bool:
        trained = {id(weights) for target in self.found.targets for weights in target.module.parameters()}
        return any(id(weights) in trained for group in optimizer.param_groups for weights in group["params"])

    def _step(self) -> None:
        if self.is_over:  # the script caught the exception that should have ended it
            leave()
        losses = self._step_losses[:]
        self._step_losses.clear()
        self._mode_tells &= self._size != [0, 0]
        self.sizes.append((self._size[0], self._size[1]))
        self._size = [0, 0]
        self._stage(losses)

    def _recording(self, losses: list[Tensor]) -> None:
        assert self._recorder is not None
        assert self._clock is not None
        if len(self.sizes) == 1:
            synchronize(self.device)
            self.first_step_s = time.perf_counter() - self._began
        self._recorder.stepped(losses)
        self._clock.step(self.sizes[-1])
        self._has_compiled()
        if self._compiles_modules and len(self.sizes) == self.protocol.compared_steps - 1:
            self._keeps_calls = True
            self._clock.interrupt()  # by copies made during the step
        if self._recorder.done:
            self.trajectory = self._recorder.trajectory()
            self.changed_in_classes = self._recorder.classes.changed()
            self._recorder, self._keeps_calls = None, False
            self._wrap(isolated=False)
            if self.kind is not Kind.MEASURED:
                self._end()
            self._stage = self._warming_up

    def _has_compiled(self) -> bool:
        """Tells whether anything has compiled since the last call."""
        now = counters["stats"]["unique_graphs"] + sum(counters["frames"].values())
        found, self._compiles = now != self._compiles, now
        if found:
            self._compiled_at = len(self.sizes)
        return found

    def _warming_up(self, losses: list[Tensor]) -> None:
        assert self._clock is not None
        self._clock.step(self.sizes[-1])
        self._has_compiled()
        quiet = CUDAGRAPH_QUIET_STEPS if self.has_graphs else QUIET_STEPS
        steps = len(self.sizes)
        if everywhere(steps - self._compiled_at >= quiet or steps >= MAX_WARMUP_STEPS, self.device):
            self.warmup += self._clock.stop()
            self.warmup_s = time.perf_counter() - self._began
            if self.stream is None:
                self.warmup_peaks = memory.read_peaks(self.device)
            self.stream = Stream.after(self.warmup, self.protocol, self.device)
            self.losses = []
            memory.reset_peaks(self.device)
            self._on_phase(Phase.STEADY)
            self._timed = -1  # the device was waited for, so one step is not timed
            self._stage = self._timing

    def _timing(self, losses: list[Tensor]) -> None:
        assert self._clock is not None
        assert self.stream is not None
        self._timed += 1
        self.losses += losses[-1:]
        if self._timed <= 0:
            self._has_compiled()
            self._clock.start()
            return
        # Compiles during an evaluation are left out together with it.
        self._compiled_in_pass |= self._has_compiled() and not self._clock.is_interrupted
        self._clock.step(self.sizes[-1])
        if self._timed < self.stream.pass_steps:
            return
        self._timed = self.stream.before_next_pass()
        times, has_compiled = self._clock.stop(), self._compiled_in_pass
        self._compiled_in_pass = False
        if self.restarts < MAX_RESTARTS and not everywhere(not has_compiled, self.device):
            self.restarts += 1
            self.warmup += times
            self._clock.start()
            self._stage = self._warming_up
            return
        self.stream.take(times)
        self.stream.note(self._clock)
        # What runs eagerly is measured to its end, because the reason for that says more than the speed.
        if self.stream.begins_to_show() and not self.diagnostics.tells_more_than_speed:
            self._on_first_pass(self)
        if self.stream.is_long_enough():
            self._end()

    def _end(self, *, stops: bool = True) -> None:
        if self.kind is Kind.MEASURED:
            synchronize(self.device)
            self.peaks = memory.read_peaks(self.device)
            self._undo.close()  # diagnostics are complete when they have ended
            self._on_phase(Phase.CHECKING)
            if self._compiles_modules:
                runs = {target: inner_call(target, run) for target, run in self._inner.items()}
                same = self.settings.draws_eagers
                self.gradient_check = check_calls(self._calls.calls, runs, numerics.rounding_of, draws_eagers=same)
        self._over(stops=stops)

    @property
    def _compiles_modules(self) -> bool:
        """Tells whether modules are compiled in this run, by the settings or by the script itself."""
        own = self.settings.as_written and bool(self.own_compile.modules)
        return self.kind is Kind.MEASURED and (own or self.settings.scope is not Scope.EAGER)

    def _fell_back(self, found: Diagnostics) -> None:
        if self._clock is None or self.stream is not None or self.is_over:
            return
        if why := self._fallbacks.why_to_end(found, time.perf_counter() - self._began):
            self._fail(FellBackError(why))

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._over(stops=True)

    def _over(self, *, stops: bool) -> None:
        self.is_over = True
        self._on_over(self)
        if stops:
            raise Stop

    def step_size(self) -> tuple[float, float]:
        """Returns samples and tokens of a mean step that counts; if none could be counted, those of the discovery."""
        assert self.stream is not None
        samples, tokens = self.stream.mean_size()
        if not samples:  # a function that the script compiles calls the modules
            calls = self.found.micro_steps
            samples, tokens = (calls * statistics.fmean(size[at] for size in self.found.primary.sizes) for at in (0, 1))
        return samples, tokens


_current: list[Session] = []


def current() -> Session | None:
    """Returns the session of the script in this process, if there is one."""
    return _current[-1] if _current else None


def leave() -> None:
    """Ends the process at once; call it after everything is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
