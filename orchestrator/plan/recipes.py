"""Named sweeps: a recipe is a function from the target to the candidates it would like to try, in order."""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, combinations, product

from compile_sweep.contract.workload_names import is_in_users_folder, named_workloads
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import Attention
from orchestrator.plan.space import Candidate, Target, every_candidate

Recipe = Callable[[Target], Iterator[Candidate]]

AUTO_RECIPE = "auto"  # the recipe of a sweep that does not name one
GROUP_WINDOW = 100  # number of batches within which recipes group captions of similar length

AS_WRITTEN: Candidate = {"scope": "eager", "as_written": "on"}
"""A script without changes, the baseline of every sweep of one."""

ARGUMENTS_FOLLOW = "a script's own arguments follow after --, as in -- {word}"

_EAGER_MAX: Candidate = {"scope": "eager", "padding": "max"}
_EAGER_LONGEST: Candidate = {"scope": "eager", "padding": "longest"}


def auto(target: Target) -> Iterator[Candidate]:
    """Within a time budget, what won elsewhere, then one change at a time whatever fits the model and the machine."""
    for own in _crossed(_levers(target)):
        lengths = {name: own[name] for name in own if name in _LENGTHS}
        shared = {name: value for name, value in own.items() if name not in _LENGTHS}
        if target.is_script:
            yield {"scope": "eager", **shared} if shared else AS_WRITTEN
            if target.has_gpu and target.num_workers == 1:
                yield {"scope": "eager", "cudagraphs": "on", **shared}
        elif lengths in ({"dynamic": "static"}, {"dynamic": "auto"}):
            is_static = lengths == {"dynamic": "static"} or target.has_one_shape
            yield {"scope": "eager", "padding": "max" if is_static else "longest", **shared}
        for compiled in _ways_to_compile(target):
            yield {**compiled, **own}
            for rare in _rare_levers(target):
                if (rare.get("dynamic"), {**compiled, **rare}.get("mode")) != ("true", "reduce-overhead"):
                    yield {**compiled, **{name: value for name, value in own.items() if not _replaces(rare, name)}, **rare}


_LENGTHS = ("dynamic", "num_buckets", "bucket_size")


def _crossed(axes: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    for chosen in product(*axes):
        yield {name: value for one in chosen for name, value in one.items()}


def _replaces(rare: Candidate, name: str) -> bool:
    return name in _LENGTHS and any(length in rare for length in _LENGTHS)


def _ways_to_compile(target: Target) -> list[Candidate]:
    scopes = ["full", *([] if target.has_blocks is False else ["regional"])]
    scopes += ["modular"] if target.parts and not target.trains else []  # for example parts of a loop that writes text
    modes: list[Candidate] = [{}, *([{"mode": "reduce-overhead"}] if target.has_gpu else [])]
    ways = [{"scope": scope, **mode} for scope in scopes for mode in modes]
    return [*ways, *({**way, "compile_loss": "on"} for way in ways if target.is_script and way["scope"] == "full")]


def _lengths(target: Target) -> list[Candidate]:
    if target.has_one_shape or target.is_script:
        return [{"dynamic": "auto"}]
    if target.unpadded_reason is not None:
        return [{"dynamic": "auto"}, {"dynamic": "mark"}]
    if not target.has_lengths:
        return [{"dynamic": "static"}]
    return [{"dynamic": "static"}, {"dynamic": "auto"}, {"dynamic": "mark"}]


def _levers(target: Target) -> list[list[Candidate]]:
    """Returns levers that often gain, besides what is compiled, each as a list of choices; all are crossed."""
    levers: list[list[Candidate]] = [_lengths(target)]
    if target.trains:
        levers.append([{}, {"optimizer": "fused"}])
    if target.row_lengths and target.has_lengths:
        levers.append([{}, {"group_window": GROUP_WINDOW}])
    if target.memory_format is not None:
        levers.append([{}, {"memory_format": target.memory_format}])
    if target.recomputes:
        levers.append([{}, {"activation_checkpointing": "off"}])
    if target.is_script and target.makes_cache is not False:
        levers.append([{}, {"use_cache": "off"}])
    if target.is_script and target.float32_experts is not False:
        levers.append([{}, {"autocast_experts": "on"}])
    if target.is_script and target.can_pad is not False:
        levers.append([{}, {"pad_to_multiple_of": 64}])
    if Attention.UNMASKED in target.attentions:
        levers.append([{}, {"attention": "unmasked"}])
    if target.has_gpu and target.has_attention:
        # A script may mask its attention and change its shapes, for each of which cuDNN plans a kernel.
        kernels = ["cudnn", *(["efficient"] if target.is_script else [])]
        levers.append([{}, *({"sdpa_kernel": kernel} for kernel in kernels)])
    if target.has_gpu and not target.autocasts:
        levers.append([{}, {"matmul_precision": "high"}])
    return levers


def _rare_levers(target: Target) -> list[Candidate]:
    """Returns levers that seldom gain or take long, each crossed with all that often gain; a few of them also with each other."""
    untuned: Candidate = {"inductor.coordinate_descent_tuning": "off"} if target.has_gpu else {}
    rare: list[Candidate] = [{"mode": "max-autotune-no-cudagraphs", **untuned}]
    if target.has_gpu:
        rare.append({"mode": "max-autotune", **untuned})
    if target.trains:
        rare.append({"optimizer": "compiled"})
    if target.has_gpu and target.has_attention:
        rare.append({"sdpa_kernel": "flash"})
    if target.has_gpu and target.memory_format is not None:  # each gains 1 to 6% on a ResNet-50 and loses 14% or more on GPT-2
        kinds = ("combo_kernels", "max_autotune_pointwise", "coordinate_descent_tuning")
        together = chain.from_iterable(combinations(kinds, number) for number in range(1, len(kinds) + 1))
        rare += [{f"inductor.{kind}": "on" for kind in chosen} for chosen in together]
    if target.has_lengths and not target.is_script:
        buckets: list[Candidate] = [{"num_buckets": 3}, {"num_buckets": 6}]
        rare += buckets if target.row_lengths else [{"dynamic": "buckets", "bucket_size": _part(target, 4)}]
        rare.append({"dynamic": "true"})
        if target.has_gpu:  # its guard creates a second graph for marked lengths (docs/log.md)
            rare.append({"dynamic": "mark", "inductor.triton.mix_order_reduction": "off"})
    if target.is_script:  # one graph from the start, where `auto` compiles anew for each dimension that changes
        rare.append({"dynamic": "mark"})
    if target.num_workers > 1 and target.trains:
        rare.append({"ddp.optimize_ddp": "no_optimization"})
    return rare


def quickstart(target: Target) -> Iterator[Candidate]:
    """Five or six settings that show the trade-off in minutes; a few more for convolutions and for several workers."""
    if target.is_script:
        yield from of_script(target)
        return
    yield _EAGER_MAX
    yield _EAGER_LONGEST
    if target.memory_format is not None:
        reordered: Candidate = {"memory_format": target.memory_format}
        yield {**_EAGER_MAX, **reordered}
        yield {"scope": "full", **reordered}
        if target.has_gpu:
            yield {"scope": "full", "mode": "reduce-overhead", **reordered}
    yield {"scope": "regional"}
    yield {"scope": "full"}
    yield from _unsplit(target, {"scope": "full"})
    if target.has_gpu:
        yield {"scope": "regional", "dynamic": "auto"}
        yield {"scope": "full", "mode": "reduce-overhead"}
    elif not target.has_one_shape:
        yield {"scope": "full", "dynamic": "mark"}


def of_script(target: Target) -> Iterator[Candidate]:
    """What can be applied to a script from outside, the script as it is first; what cannot is named, so that a plan says why."""
    auto: Candidate = {"dynamic": "auto"}
    yield AS_WRITTEN
    yield {"scope": "regional", **auto}
    yield {"scope": "full", **auto}
    if target.has_gpu:
        yield {"scope": "full", **auto, "optimizer": "fused"}
        yield {"scope": "full", **auto, "optimizer": "fused", "mode": "reduce-overhead"}
    else:
        yield {"scope": "full", **auto, "optimizer": "compiled"}
    yield {"scope": "full", "dynamic": "buckets"}
    yield {"scope": "full", **auto, "group_window": GROUP_WINDOW}


def captioning(target: Target) -> Iterator[Candidate]:
    """The captioning source's two tables and more: cheap settings first, those that tune or make CUDA graphs last."""
    narrow = _part(target, 8)
    marked: Candidate = {"scope": "full", "dynamic": "mark", "optimizer": "compiled"}
    grouped: Candidate = {"group_window": GROUP_WINDOW, "attention": "unmasked", "optimizer": "fused"}
    # Takes minutes to compile without a gain in speed here (docs/log.md).
    untuned: Candidate = {"inductor.coordinate_descent_tuning": "off"}
    one_graph: Candidate = {"inductor.triton.mix_order_reduction": "off"}  # its guard creates a second graph from 107 tokens on
    unpadded: Candidate = {"shape_padding": "off"}  # with its guards, dynamic=true creates four graphs before torch 2.13
    yield _EAGER_MAX
    yield _EAGER_LONGEST
    yield {**_EAGER_LONGEST, "group_window": GROUP_WINDOW}
    yield {"scope": "regional"}
    yield {"scope": "regional", "dynamic": "auto"}
    yield {"scope": "regional", "dynamic": "mark"}
    yield {"scope": "regional", "dynamic": "auto", **grouped}
    yield {"scope": "regional", "num_buckets": 5, **grouped}
    yield {"scope": "regional", "dynamic": "buckets", "bucket_size": narrow}
    yield {"scope": "regional", "num_buckets": 6}
    yield {"scope": "full"}
    yield {"scope": "full", "attention": "unmasked"}
    yield {"scope": "full", "mode": "reduce-overhead"}
    yield {"scope": "full", "optimizer": "fused"}
    yield from _unsplit(target, {"scope": "full", "optimizer": "fused"}, {"scope": "full", "mode": "reduce-overhead"})
    yield {"scope": "full", "optimizer": "compiled"}
    yield {"scope": "modular"}
    yield {"scope": "modular", "dynamic": "auto", "parts.encoder.mode": "reduce-overhead", **grouped}
    yield {"scope": "full", "dynamic": "mark", **grouped, **one_graph}
    yield {"scope": "full", "dynamic": "mark", "mode": "reduce-overhead", **grouped, **one_graph}
    yield {"scope": "full", "num_buckets": 3, "mode": "reduce-overhead", **grouped}
    yield {"scope": "regional", "mode": "reduce-overhead"}
    yield {"scope": "regional", "num_buckets": 3, "mode": "reduce-overhead", **grouped}
    yield {"scope": "modular", "dynamic": "mark"}
    yield {"scope": "full", "dynamic": "mark"}
    yield marked
    yield {"scope": "full", "dynamic": "auto"}
    yield {"scope": "full", "dynamic": "true"}
    yield {"scope": "full", "dynamic": "true", **one_graph, **unpadded}
    yield {"scope": "full", "dynamic": "mark", "mode": "reduce-overhead"}
    yield {"scope": "regional", "mode": "max-autotune", **untuned}
    yield {"scope": "regional", "mode": "max-autotune", **untuned, "inductor.max_autotune_gemm_backends": "ATEN"}  # its own won
    yield {"scope": "modular", "dynamic": "mark", "parts.encoder.mode": "max-autotune", **untuned}
    yield {"scope": "full", "mode": "max-autotune", "optimizer": "compiled", **untuned}
    yield {"scope": "full", "mode": "max-autotune", "optimizer": "compiled", "static_gradients": "on", **untuned}
    yield {"scope": "full", "mode": "max-autotune", "optimizer": "foreach_map", **untuned}
    yield {**marked, "mode": "max-autotune", **untuned, **one_graph}
    yield {"scope": "full", "dynamic": "true", "mode": "max-autotune-no-cudagraphs", **untuned, **one_graph, **unpadded}
    yield {"scope": "full", "dynamic": "buckets", "bucket_size": narrow, "optimizer": "compiled"}
    yield {"scope": "full", "dynamic": "buckets", "bucket_size": narrow, "mode": "max-autotune", **untuned}


def regional(target: Target) -> Iterator[Candidate]:
    """Full against regional compiling: what it saves to compile a repeated block once."""
    yield _EAGER_MAX
    yield {"scope": "full"}
    yield {"scope": "regional"}


def modes(target: Target) -> Iterator[Candidate]:
    """Eager and the modes of torch.compile on one shape, the table of the benchmark's source."""
    yield _EAGER_MAX
    yield {"scope": "full"}
    yield from _unsplit(target, {"scope": "full"})
    if target.has_gpu:
        yield {"scope": "full", "mode": "reduce-overhead"}
        yield {"scope": "full", "mode": "max-autotune", "inductor.coordinate_descent_tuning": "off"}
    else:
        yield {"scope": "full", "mode": "max-autotune-no-cudagraphs"}


def inference(target: Target) -> Iterator[Candidate]:
    """Why compiling may not help inference, and what does: each cause switched by itself, then together."""
    cast: Candidate = next(iter(_varied(target, "weights", "bf16")), {})
    scopes: tuple[Candidate, ...] = ({"scope": "eager"}, {"scope": "full"}, {"scope": "regional"}, {"scope": "modular"})
    for scope in scopes:
        yield scope
        yield {**scope, **cast}
    causes = [*_varied(target, "grad_mode", "no_grad"), *_varied(target, "batch_size", 1, 8 * target.batch_size)]
    if Attention.EAGER in target.attentions:
        causes.append({"attention": "eager"})
    if target.has_gpu:  # where there is an autocast to begin with
        causes.append({"autocast": "off"})
        causes += [{**kept, "workload.grad_mode": "no_grad"} for kept in _varied(target, "cast_cache", "kept")]
    for cause in causes:
        yield {"scope": "eager", **cause}
        yield {"scope": "full", **cause}
    for frozen in _varied(target, "weights", "frozen"):
        yield {"scope": "full", **frozen}
        if target.has_gpu:
            yield {"scope": "full", "mode": "reduce-overhead", **frozen}
    if target.max_length > 1:
        yield {"scope": "full", "dynamic": "mark"}
        yield {"scope": "full", "dynamic": "true"}
    if target.has_gpu:
        for mode in ("reduce-overhead", "max-autotune"):
            tuned: Candidate = {"inductor.coordinate_descent_tuning": "off"} if mode == "max-autotune" else {}
            yield {"scope": "full", "mode": mode, **tuned}
            yield {"scope": "full", "mode": mode, **tuned, **cast}
        yield {"scope": "modular", "mode": "reduce-overhead", **cast}
        for other in (*_varied(target, "grad_mode", "no_grad"), *_varied(target, "batch_size", 1)):
            yield {"scope": "full", "mode": "reduce-overhead", **other}


def generation(target: Target) -> Iterator[Candidate]:
    """Text written token by token: parts compiled apart, the loop left to Python, by mode, precision and batch.

    Of the whole loop `scope=full` makes one graph: 64 tokens did not compile within seven minutes on an H200 (docs/log.md).
    """
    cast: Candidate = next(iter(_varied(target, "weights", "bf16")), {})
    modes: list[Candidate] = [{}]
    if target.has_gpu:
        tuned: Candidate = {"mode": "max-autotune", "inductor.coordinate_descent_tuning": "off"}
        modes += [{"mode": "reduce-overhead"}, tuned]
    yield {"scope": "eager"}
    yield {"scope": "eager", **cast}
    for mode in modes:
        yield {"scope": "modular", **mode}
        yield {"scope": "modular", **mode, **cast}
    for batch in _varied(target, "batch_size", 1, 8 * target.batch_size):
        yield {"scope": "eager", **batch}
        for mode in modes[:2]:
            yield {"scope": "modular", **mode, **cast, **batch}
    if target.has_gpu:
        yield {"scope": "eager", "autocast": "off"}
        yield {"scope": "modular", "mode": "reduce-overhead", "autocast": "off"}


def vision(target: Target) -> Iterator[Candidate]:
    """The pitfalls of compiling vision models as rows, eager and compiled: AMP, EMA, SyncBN, memory by mode and batch size."""
    reordered: Candidate = {} if target.memory_format is None else {"memory_format": target.memory_format}
    variants: list[Candidate] = [
        {},
        reordered,
        {"autocast": "off"},
        *_varied(target, "ema", True),
        *_varied(target, "norm", "sync"),
        *_varied(target, "matching", "python", "greedy"),
        *_varied(target, "batch_size", max(1, target.batch_size // 2), 2 * target.batch_size),
    ]
    for variant in variants:
        yield {"scope": "eager", **variant}
        yield {"scope": "full", **variant}
    yield from _unsplit(target, {"scope": "full"})
    yield {"scope": "regional"}
    if target.has_gpu:
        for variant in variants:
            yield {"scope": "full", "mode": "reduce-overhead", **variant}


def _unsplit(target: Target, *candidates: Candidate) -> Iterator[Candidate]:
    """Yields the candidates again for workers that train together, with graphs that are not split where gradients are reduced.

    Two H100 GPUs trained the captioning model 1.27 times as fast this way as with split graphs (docs/results.md).
    """
    if target.num_workers > 1 and target.trains:
        for candidate in candidates:
            yield {**candidate, "ddp.optimize_ddp": "no_optimization"}


def _varied(target: Target, name: str, *values: Scalar) -> list[Candidate]:
    """Returns a candidate per value of the workload's option; empty if it has no such option or the machine cannot run one."""
    able = [value for value in values if target.has_gpu or (name, value) not in target.needs_gpu]
    return [{f"workload.{name}": value} for value in able] if name in target.options else []


def grid(target: Target) -> Iterator[Candidate]:
    """Every combination of the settings' values."""
    yield from every_candidate(bucket_sizes=[_part(target, count) for count in (8, 4, 2)], pad_multiples=(8,))


def _part(target: Target, count: int) -> int:
    """Returns the size in tokens of `count` buckets of the longest sequence; rounded up, or there would be one more."""
    return -(-target.max_length // count)


RECIPES: dict[str, Recipe] = {
    AUTO_RECIPE: auto,
    "quickstart": quickstart,
    "captioning": captioning,
    "regional": regional,
    "modes": modes,
    "inference": inference,
    "generation": generation,
    "vision": vision,
    "grid": grid,
}


def candidates(recipe: str, target: Target) -> Iterator[Candidate]:
    """Yields what the recipe would try, in order.

    Where every batch has one shape, or is not padded, a candidate that compiles without a strategy for lengths uses
    torch.compile's default, dynamic=None: dynamic=False would also make constants of Python numbers that change.

    Raises:
        ConfigError: There is no such recipe.
    """
    for candidate in find_recipe(recipe)(target):
        is_default = (
            (target.has_one_shape or target.unpadded_reason) and candidate.get("scope") != "eager" and "dynamic" not in candidate
        )
        yield {**candidate, "dynamic": "auto"} if is_default else candidate


def find_recipe(name: str, *, has_script: bool = False) -> Recipe:
    """Returns the recipe called `name`; raises ConfigError if there is none, and says what else the word may be.

    Args:
        has_script: Whether the sweep is of a script, whose arguments may have been given in the wrong place.
    """
    if name not in RECIPES:
        raise ConfigError(f"no recipe is called {name!r}; {_meant_by(name, has_script=has_script)}")
    return RECIPES[name]


def _meant_by(name: str, *, has_script: bool) -> str:
    if close := get_close_matches(name, RECIPES, n=1):
        return f"did you mean {close[0]}?"
    if has_script:
        return ARGUMENTS_FOLLOW.format(word=name)
    if name.endswith(".py"):
        return f"a training script is named by its option: --script {name}"
    if is_in_users_folder(name) or name in named_workloads():
        return f"a workload is named by its option: --workload {name}"
    return f"use one of {', '.join(RECIPES)}"
