"""Hits and misses of a process's compile caches, and the compile seconds that hits saved.

Background: torch counts hits, but counts say little: a hit on forward and backward of a graph includes two on Inductor's
graphs, and one that took a minute to make counts as much as one of a millisecond. So lookups are followed where they happen.
Torch stores in an entry how long it took, and three corrections turn that into what a cold process would spend:

- AOTAutograd's time contains Inductor's time for the forward, and for the backward only if that is compiled at once.
- An entry from a process that hit something on the way (Inductor's graph, max-autotune's timings) took less than it would
  have cold; the savings of that process are added.
- A hit takes time itself (lookup, loading libraries, on a CPU also querying its instruction set); that is subtracted.

A graph that missed may find Triton kernels that other settings compiled. Compilers work in parallel in processes of their own, so
what counts is the time spent waiting for them: each kernel costs, and a hit on it saves, its part of that. If several
configurations of a kernel were compiled, the best one carries the cost of all, because restoring it also restores the choice.

So a warm compile time plus `saved_s` approximates the cold one. C++ libraries that a missed graph finds ready go unnoticed, and
such a graph is recorded as cheaper than it is.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Self

from torch._dynamo.package import CompilePackage
from torch._dynamo.utils import compilation_time_metrics
from torch._guards import CompileContext, CompileId

from compile_sweep.contract.installed_torch import private
from compile_sweep.contract.precision import matmul_precision
from compile_sweep.harness.compile_cache import bundles
from compile_sweep.harness.compile_cache import kernels as cache_kernels
from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.folders import ArtifactKind, choice_key

DiskDynamoCache = private("torch._dynamo.package", "DiskDynamoCache")
DynamoStore = private("torch._dynamo.package", "DynamoStore")
AOTAutogradCache = private("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache")
AsyncCompile = private("torch._inductor.async_compile", "AsyncCompile")
FxGraphCache = private("torch._inductor.codecache", "FxGraphCache")
PersistentCache = private("torch._inductor.codecache", "PersistentCache")
AlgorithmSelectorCache = private("torch._inductor.select_algorithm", "AlgorithmSelectorCache")

ArtifactName = tuple[str, str]  # kind and key of an artifact
TorchFunction = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class CacheUsage:
    """Filled while `watch_caches` is open."""

    hits: dict[str, int] = field(default_factory=dict)
    """By kind, counting each artifact once and none that this process made. Libraries and kernels' folders are not counted."""
    misses: dict[str, int] = field(default_factory=dict)
    """By kind: artifacts that were compiled or tuned here."""
    hit_keys: list[ArtifactName] = field(default_factory=list)
    """Kind and key of each artifact hit, as `gather_artifacts` names them, in the order of their first hits."""
    saved_s: float = 0.0
    """Seconds that the artifacts hit took to make, less the seconds that finding and loading them took now."""
    cost_s: dict[ArtifactName, float] = field(default_factory=dict)
    """Seconds of compile time that a hit saves, by artifact, for those restored and those made while watching."""

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain JSON values."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_keys": [list(name) for name in self.hit_keys],
            "saved_s": self.saved_s,
            "cost_s": [[*name, cost_s] for name, cost_s in self.cost_s.items()],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores usage from the result of `to_dict`."""
        hit_keys = [(kind, key) for kind, key in values["hit_keys"]]
        return cls(**{**values, "hit_keys": hit_keys, "cost_s": {(kind, key): cost_s for kind, key, cost_s in values["cost_s"]}})


@contextmanager
def watch_caches(restored: Iterable[Artifact] = ()) -> Iterator[CacheUsage]:
    """Follows every compile inside the block; restores torch when it ends.

    If a version of torch lacks one of the wrapped functions, what it would report is missing, and nothing fails.
    """
    use = CacheUsage(cost_s={(str(artifact.kind), artifact.key): artifact.cost_s for artifact in restored if artifact.cost_s})
    with ExitStack() as undo:
        tally = Tally(use)
        for owner, name, by in (*_Follower(tally).followed(), *cache_kernels.functions_to_wrap(tally)):
            _follow(undo, owner, name, by)
        yield use


def _follow(undo: ExitStack, owner: type | None, name: str, by: Callable[..., Any]) -> None:
    """Replaces a class's function by `by(original, ...)` until `undo` closes."""
    if owner is None or (declared := owner.__dict__.get(name)) is None:
        return
    original = getattr(owner, name)

    @wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(owner, name, staticmethod(instead) if isinstance(declared, staticmethod) else instead)
    undo.callback(setattr, owner, name, declared)


class Tally:
    """Counts into a `CacheUsage`."""

    def __init__(self, use: CacheUsage) -> None:
        self._use = use
        self._made: set[ArtifactName] = set()
        self._counting = threading.Lock()  # backward graphs compile in autograd's own threads

    def hit(self, name: ArtifactName, *, otherwise_s: float = 0.0, took_s: float = 0.0) -> float:
        """Counts a hit and returns the seconds it saved: 0 if this process hit or made the artifact before."""
        with self._counting:
            if name in self._made or name in self._use.hit_keys:
                return 0.0
            self._use.hit_keys.append(name)
            self._use.hits[name[0]] = self._use.hits.get(name[0], 0) + 1
            cost_s = self.cost_s(name, otherwise_s)
            saved_s = cost_s - took_s if cost_s else 0.0  # claims no saving for an artifact that was never timed
            self._use.saved_s += saved_s
            return saved_s

    def also_hit(self, name: ArtifactName) -> None:
        """Counts a hit whose saving is part of another hit's."""
        with self._counting:
            if name not in self._made and name not in self._use.hit_keys:
                self._use.hit_keys.append(name)
                self._use.hits[name[0]] = self._use.hits.get(name[0], 0) + 1

    def missed(self, kind: str, times: int = 1) -> None:
        with self._counting:
            self._use.misses[kind] = self._use.misses.get(kind, 0) + times
            if not self._use.misses[kind]:
                del self._use.misses[kind]

    def made(self, name: ArtifactName, cost_s: float) -> None:
        with self._counting:
            self._made.add(name)
            self._use.cost_s[name] = cost_s

    def readied(self, kernels: Iterable[ArtifactName], took_s: float) -> float:
        """Records the kernels of a graph compiled here in `took_s`; returns the seconds that restored kernels saved.

        These count neither as hits nor as misses; a second graph finds them ready, as it would in a cold process.
        """
        with self._counting:
            new = [name for name in dict.fromkeys(kernels) if name not in self._made]
            restored = [name for name in new if name in self._use.cost_s]
            compiled = [name for name in new if name not in self._use.cost_s]
            self._made.update(new)
            self._use.cost_s |= dict.fromkeys(compiled, took_s / max(1, len(compiled)))
            saved_s = sum(self._use.cost_s[name] for name in restored) - (took_s if restored and not compiled else 0.0)
            self._use.saved_s += saved_s
            return saved_s

    def cost_s(self, name: ArtifactName, otherwise_s: float = 0.0) -> float:
        return self._use.cost_s.get(name, otherwise_s)

    def spared(self, name: ArtifactName) -> None:
        """Records that a kernel is ready without tuning, given by kind and key of its configuration."""
        if name in self._use.cost_s:  # other kernels have only one configuration
            self.hit(name)

    def tuned(self, name: ArtifactName, seconds: float) -> None:
        """Records the seconds that tuning a kernel took; may be called twice for one kernel, once for each part."""
        if name in self._made:  # the second part of tuning, coordinate descent
            seconds += self.cost_s(name)
        else:
            self.missed(name[0])
        self.made(name, seconds)

    def chosen(self, best: ArtifactName, configurations: Sequence[ArtifactName]) -> None:
        """Records which compiled configuration of a kernel was chosen as best; restoring it saves compiling the rest."""
        with self._counting:
            if best in self._use.cost_s:
                others = [name for name in configurations if name != best and name in self._use.cost_s]
                self._use.cost_s[best] += sum(self._use.cost_s[name] for name in others)
                self._use.cost_s |= dict.fromkeys(others, 0.0)


class _Thread(threading.local):
    """The current state of a thread."""

    key: str | None = None
    """AOTAutograd key being looked up."""
    entry: Any = None
    """Entry found under that key."""
    within: list[ArtifactName] | None = None
    """Inductor entries loaded for it; None outside such a lookup."""
    prepared_s: float = 0.0
    """Seconds that making the key of the next graph for Inductor took."""
    saved_s: float = 0.0
    """Seconds that hits in this thread saved; its growth during a compile is what that compile was spared."""
    saved_before_s: float = 0.0
    benchmarked: list[ArtifactName] | None = None
    """Operations whose candidates were timed; None outside max-autotune."""
    is_loading: bool = False
    """Whether an Inductor entry is loading, whose kernels come with it."""
    readied: list[ArtifactName] | None = None
    """Kernels that the current graph has waited for; None when it does not wait."""


class _Follower:
    """Replacements for torch's functions; each method calls the original."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._here = _Thread()
        self._missed: dict[str, tuple[float, float]] = {}
        """AOTAutograd keys that missed: when, and after how many seconds of lookup."""
        self._unserved: set[CompileId] = set()
        """Frames whose last AOTAutograd lookup missed. Dynamo starts some frames twice and looks up another graph then."""
        self._looked_up_at: dict[ArtifactName, float] = {}
        self._spared_s: dict[ArtifactName, float] = {}
        """By Inductor entry: seconds of its cost that hits saved here."""
        self._frames_before_s = _frames_s()
        self._traced: ArtifactName | None = None
        """The function that was traced last."""

    def followed(self) -> Iterator[tuple[type | None, str, Callable[..., Any]]]:
        yield AOTAutogradCache, "try_load", self.load_aot
        yield AOTAutogradCache, "_lookup", self.find_aot
        yield AOTAutogradCache, "save", self.save_aot
        yield FxGraphCache, "prepare_key", self.prepare_graph
        yield FxGraphCache, "load_with_key", self.load_graph
        yield FxGraphCache, "_save_graph", self.save_graph
        yield PersistentCache, "lookup", self.look_up_choices
        yield AlgorithmSelectorCache, "do_autotuning", self.tune
        yield DiskDynamoCache, "load", self.load_traced
        yield DynamoStore, "record_package", self.record_traced
        yield AsyncCompile, "triton", self.wait_for_kernels  # compiles in this process if its workers are not ready
        yield AsyncCompile, "wait", self.wait_for_kernels
        yield cache_kernels.CachingAutotuner, "precompile", self.ready_kernel

    def load_aot(self, original: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        here, begun = self._here, time.perf_counter()
        here.key, here.entry, here.within = None, None, []
        try:
            result = original(*args, **kwargs)
            within = here.within
        finally:
            here.within = None
        took_s = time.perf_counter() - begun
        is_hit = (result[0] if isinstance(result, tuple) else result) is not None  # torch 2.13 returns more than 2.11
        attempted = CompileContext.current_compile_id()
        if is_hit and attempted is not None and attempted in self._unserved:
            self._unserved.discard(attempted)
            self._tally.missed(ArtifactKind.AOT_AUTOGRAD, -1)
        if is_hit and here.key is not None:
            for name in within:
                self._tally.also_hit(name)
            name = bundles.entry_name(ArtifactKind.AOT_AUTOGRAD, here.key, here.entry)
            here.saved_s += self._tally.hit(name, otherwise_s=bundles.seconds_taken(here.entry), took_s=took_s)
        elif not is_hit:
            if attempted not in self._unserved:
                self._tally.missed(ArtifactKind.AOT_AUTOGRAD)
            if attempted is not None:
                self._unserved.add(attempted)
            if here.key is not None:
                self._missed[here.key] = time.perf_counter(), took_s
        return result

    def find_aot(self, original: TorchFunction, key: str, *args: Any, **kwargs: Any) -> Any:
        result = original(key, *args, **kwargs)
        self._here.key, self._here.entry = key, result[0] if result else None
        return result

    def save_aot(self, original: TorchFunction, key: str, entry: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(key, entry, *args, **kwargs)
        if key not in self._missed:
            return result
        missed_at, looked_s = self._missed.pop(key)
        forward_s, backward_s = entry.forward_time_taken_ns / 1e9, entry.backward_time_taken_ns / 1e9
        cost_s = looked_s + forward_s
        graphs = bundles.referenced_graphs(entry)
        for number, name in enumerate(graphs):
            is_within = number == 0 or self._looked_up_at.get(name, 0.0) < missed_at + forward_s
            cost_s += self._spared_s.get(name, 0.0) if is_within else self._tally.cost_s(name, backward_s)
        if not graphs and time.perf_counter() - missed_at > forward_s + backward_s:  # graphs within the entry, for precompile
            cost_s += backward_s
            if self._traced is not None:
                self._tally.made(self._traced, self._tally.cost_s(self._traced) + backward_s)
        self._tally.made(bundles.entry_name(ArtifactKind.AOT_AUTOGRAD, key, entry), cost_s)
        return result

    def prepare_graph(self, original: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = original(*args, **kwargs)
        self._here.prepared_s = time.perf_counter() - begun
        return result

    def load_graph(self, original: TorchFunction, key: str, *args: Any, **kwargs: Any) -> Any:
        here, begun = self._here, time.perf_counter()
        here.is_loading = True
        try:
            result = original(key, *args, **kwargs)
        finally:
            here.is_loading = False
        graph, took_s = result[0], time.perf_counter() - begun + here.prepared_s
        if here.within is not None:
            if graph is not None:
                here.within.append(bundles.entry_name(ArtifactKind.INDUCTOR, key, graph))
        elif graph is None:
            self._tally.missed(ArtifactKind.INDUCTOR)
            here.saved_before_s = here.saved_s
        else:
            name = bundles.entry_name(ArtifactKind.INDUCTOR, key, graph)
            self._looked_up_at[name] = begun
            saved_s = self._tally.hit(name, otherwise_s=bundles.seconds_taken(graph), took_s=took_s)
            self._spared_s[name] = saved_s
            here.saved_s += saved_s
        return result

    def save_graph(self, original: TorchFunction, key: str, graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(key, graph, *args, **kwargs)  # records the guards
        name = bundles.entry_name(ArtifactKind.INDUCTOR, key, graph)
        taken_s = bundles.seconds_taken(graph)
        self._looked_up_at[name] = time.perf_counter() - taken_s
        self._spared_s[name] = self._here.saved_s - self._here.saved_before_s
        self._tally.made(name, taken_s + self._spared_s[name])
        return result

    def look_up_choices(
        self,
        original: TorchFunction,
        cache: Any,
        choices: Any,
        op: str,
        inputs: str,
        benchmark: Any,
        hint_override: int | None = None,
    ) -> Any:
        here, begun, is_timed = self._here, time.perf_counter(), False

        def benchmarked(candidates: Any) -> Any:
            nonlocal is_timed
            is_timed = True
            return benchmark(candidates)

        timings = original(cache, choices, op, inputs, benchmark and benchmarked, hint_override)
        inputs = inputs if hint_override is None else f"{inputs}_{hint_override}"
        key_of_precision = private("torch._inductor.codecache", "fp32_matmul_precision_key")  # torch 2.15 on
        path = (op, inputs, (key_of_precision or matmul_precision)())
        name = (str(ArtifactKind.CHOICES), choice_key(cache.system["hash"], path))
        if is_timed:
            self._tally.missed(name[0])
            self._tally.made(name, time.perf_counter() - begun)
            if here.benchmarked is not None:
                here.benchmarked.append(name)
        elif timings and len(timings) == len(choices):  # fewer if some candidate is new
            here.saved_s += self._tally.hit(name)
        return timings

    def tune(self, original: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        here, begun = self._here, time.perf_counter()
        here.benchmarked = []
        try:
            result = original(*args, **kwargs)
            for name in here.benchmarked:  # with the timings, compiling the candidates is spared as well
                self._tally.made(name, (time.perf_counter() - begun) / len(here.benchmarked))
        finally:
            here.benchmarked = None
        return result

    def wait_for_kernels(self, original: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        here, begun = self._here, time.perf_counter()
        if here.is_loading or here.within is not None:
            return original(*args, **kwargs)
        here.readied = []
        try:
            result = original(*args, **kwargs)
            if here.readied:
                here.saved_s += self._tally.readied(here.readied, time.perf_counter() - begun)
        finally:
            here.readied = None
        return result

    def ready_kernel(self, original: TorchFunction, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(kernel, *args, **kwargs)
        if self._here.readied is not None:
            self._here.readied += cache_kernels.compiled_configurations(kernel)
        return result

    def load_traced(self, original: TorchFunction, cache: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = original(cache, function, *args, **kwargs)
        if result is None:
            self._tally.missed(ArtifactKind.PRECOMPILE)
        else:
            name = (str(ArtifactKind.PRECOMPILE), CompilePackage.source_id_from_fn(function))
            self._tally.hit(name, took_s=time.perf_counter() - begun)
        return result

    def record_traced(self, original: TorchFunction, cache: Any, package: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs after each frame, for the package of the function that was given to `torch.compile`."""
        result = original(cache, package, *args, **kwargs)
        spent_s = _frames_s() - self._frames_before_s
        self._frames_before_s += spent_s
        name = (str(ArtifactKind.PRECOMPILE), package.source_id)
        self._traced = name
        self._tally.made(name, self._tally.cost_s(name) + spent_s)
        return result


def _frames_s() -> float:
    """Returns the seconds that this process spent compiling frames, without backward graphs that were left for later."""
    return sum(compilation_time_metrics.get("_compile.compile_inner", ()))
