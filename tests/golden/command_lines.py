"""The commands that are run for each golden file. The first word names one of `golden.COMMANDS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from golden import COMMANDS

CACHE_COMMANDS = ("list", "show", "verify", "gc", "export", "import", "explain")
RECIPES = ("auto", "quickstart", "captioning", "regional", "modes", "inference", "generation", "vision", "grid")

WORKLOAD_OF = {"inference": "gpt2-inference", "generation": "decoder", "vision": "detection"}
"""Workloads that recipes are made for, if not captioning."""

CAPTIONING = "results/h200-captioning"

HELP: Mapping[str, Sequence[str]] = {
    **{f"help/{name}.txt": [f"{name} --help"] for name in COMMANDS if name not in ("cache", "sweep")},
    "help/sweep.txt": ["sweep --help", "sweep --help-all"],
    "help/cache.txt": ["cache --help", *(f"cache {command} --help" for command in CACHE_COMMANDS)],
    "list.txt": ["sweep --list"],
}


def _plans(device: str) -> dict[str, Sequence[str]]:
    """Returns dry runs on `cpu` or `cuda`, a file for each recipe and one for other output."""
    small = "--size tiny --dry-run"
    return {
        **{
            f"dry_run/{device}/{recipe}.txt": [f"sweep {recipe} --workload {WORKLOAD_OF.get(recipe, 'captioning')} {small}"]
            for recipe in RECIPES
        },
        f"dry_run/{device}/options.txt": [
            f"sweep {small}",
            f"sweep --workload resnet {small} --effort standard",
            f"sweep --workload segmentation vision {small}",
            f"sweep modes --workload layers {small} --num-trials 2 --max-concurrent 2 --pipeline real",
            f"sweep quickstart --workload gpt2 {small} --max-concurrent 2 --no-confirm --starts shared",
            f"sweep quickstart {small} --starts auto --time-budget-s 600 --cache-store s3://bucket/mine --output there/sweep",
            f"sweep quickstart {small} --placement spread --cache-store none --storage copies --no-warm-start",
            f"sweep --settings scope=full scope=regional --vary group_window=1,10 autocast=bf16,off {small}",
            f"sweep --settings num_buckets=3 scope=full,mode=max-autotune-no-cudagraphs {small} --compile-deadline-s 30",
            f"sweep generation --workload decoder {small} --vary workload.new_tokens=1",
            f"sweep {small} --searcher gain --constraint compile_s<=60 --stop 'front stable for 6 trials' "
            "--gpu-budget-s 1200 --num-trials 40",
            f"sweep quickstart {small} --searcher random --objective samples_per_s:max --prune off --time-budget-s 3600",
            f"sweep captioning {small} --constraint peak_memory_bytes<=40GiB",
        ],
    }


SOURCE_OF_CAPTIONING = (
    "scope=eager",
    "scope=eager,padding=longest,group_window=10",
    "scope=eager,padding=longest,pad_multiple=1,optimizer=fused",
    "scope=eager,optimizer=compiled,autocast=bf16",
    "scope=full",
    "scope=full,mode=max-autotune-no-cudagraphs,fullgraph=on,optimizer=compiled",
    "scope=full,dynamic=auto,pad_multiple=1",
    "scope=full,dynamic=mark,dynamic_min=16,dynamic_max=64,shape_padding=off",
    "scope=full,dynamic=mark,padding=max",
    "scope=full,dynamic=true,matmul_precision=medium",
    "scope=full,dynamic=buckets",
    "scope=full,dynamic=buckets,bucket_size=16",
    "scope=full,dynamic=buckets,buckets=16/40/64,recompile_limit=12,matmul_precision=high",
    "scope=full,num_buckets=3,group_window=100",
    "scope=full,backend=aot_eager,dynamic=true",
    "scope=full,backend=eager,fullgraph=on",
    "scope=full,optimizer=foreach_map,static_gradients=on,autocast=fp16",
    "scope=full,inductor.coordinate_descent_tuning=on,inductor.max_autotune_gemm_backends=ATEN%2CTRITON",
    "scope=full,mode=max-autotune-no-cudagraphs,inductor.epilogue_fusion=off,inductor.cpp.threads=4",
    "scope=full,attention=eager",
    "scope=full,attention=unmasked,autocast=bf16",
    "scope=full,attention=flex",
    "scope=full,attention=sdpa,autocast=off",
    "scope=regional",
    "scope=regional,dynamic=auto,attention=unmasked",
    "scope=regional,dynamic=mark,optimizer=fused,group_window=100",
    "scope=regional,dynamic=buckets,bucket_size=32,optimizer=compiled",
    "scope=regional,mode=max-autotune-no-cudagraphs,inductor.triton.mix_order_reduction=off",
    "scope=modular",
    "scope=modular,dynamic=auto,parts.encoder.compile=off",
    "scope=modular,dynamic=mark,parts.encoder.mode=max-autotune-no-cudagraphs,parts.loss.compile=off",
    "scope=modular,parts.decoder.dynamic=mark,parts.loss.dynamic=true,optimizer=compiled",
)
SOURCE_ON_GPU = (
    "scope=full",
    "scope=full,mode=reduce-overhead",
    "scope=full,mode=reduce-overhead,autocast=off,attention=eager",
    "scope=full,cudagraphs=on,inductor.coordinate_descent_tuning=off",
    "scope=full,mode=max-autotune,optimizer=compiled,static_gradients=on",
    "scope=full,mode=max-autotune,cudagraphs=off",
    "scope=full,backend=cudagraphs",
    "scope=full,autocast=fp16,optimizer=compiled",
    "scope=full,dynamic=mark,mode=reduce-overhead,group_window=100,attention=unmasked,optimizer=fused",
    "scope=full,num_buckets=3,mode=reduce-overhead",
    "scope=regional,mode=reduce-overhead,dynamic=buckets,buckets=16/64",
    "scope=regional,mode=max-autotune,inductor.max_autotune_gemm_backends=ATEN",
    "scope=modular,dynamic=auto,parts.encoder.mode=reduce-overhead",
)
SOURCE_OF_WORKERS = (
    "scope=eager,ddp.bucket_cap_mb=100",
    "scope=full",
    "scope=full,ddp.compression=fp16,ddp.gradient_as_bucket_view=on",
    "scope=full,ddp.compression=powersgd,ddp.powersgd_rank=4,ddp.powersgd_start=10",
    "scope=full,ddp.compression=bf16,ddp.static_graph=on,mode=reduce-overhead",
    "scope=full,ddp.optimize_ddp=python_reducer",
    "scope=full,ddp.optimize_ddp=off,ddp.around=wrapper",
    "scope=regional,ddp.find_unused_parameters=on,ddp.broadcast_buffers=off",
    "scope=modular,ddp.batched_grad_copy=on,dynamic=mark",
)
SOURCE_OF_OTHERS = (
    ("gpt2", "scope=regional,dynamic=mark"),
    ("gpt2-inference", "scope=full,workload.weights=frozen"),
    ("gpt2-inference", "scope=regional,workload.grad_mode=no_grad,workload.weights=bf16"),
    ("decoder", "scope=modular,workload.new_tokens=1"),
    ("detection", "scope=full,workload.ema=on,workload.matching=python"),
    ("segmentation", "scope=full,workload.norm=sync"),
    ("layers", "scope=regional"),
    ("layers-inference", "scope=full,workload.grad_mode=no_grad"),
)


def _sources(settings: Sequence[str], workload: str = "captioning", more: str = "") -> list[str]:
    return [f"sweep --workload {workload} --size tiny{more} --source {setting}" for setting in settings]


ON_CPU: Mapping[str, Sequence[str]] = {
    **HELP,
    **_plans("cpu"),
    "source/captioning.txt": _sources(SOURCE_OF_CAPTIONING),
    "source/other_workloads.txt": [line for name, one in SOURCE_OF_OTHERS for line in _sources([one], name)],
}
ON_GPU: Mapping[str, Sequence[str]] = {
    **_plans("cuda"),
    "source/captioning_on_gpu.txt": _sources(SOURCE_ON_GPU),
    "source/workers_on_gpus.txt": _sources(SOURCE_OF_WORKERS, more=" --workers-per-trial 2"),
}

BAD_INPUT: Mapping[str, Sequence[str]] = {
    "bad_input/sweep.txt": [
        "sweep quickstrat",
        "sweep --num-trails 3",
        "sweep --num-trials many",
        "sweep --num-trials 0",
        "sweep quickstart --effort quick",
        "sweep --effort quick --num-trials 3",
        "sweep --max-concurrent 20000",
        "sweep --device cuda",
        "sweep --device tpu",
        "sweep --size huge",
        "sweep --workload captionin",
        "sweep --workload translation",
        "sweep --workload no_such_module:Workload",
        "sweep --workload pathlib:Path",
        "sweep --time-budget-s 0",
        "sweep --compile-deadline-s 600 --trial-deadline-s 60",
        "sweep --seed -1",
        "sweep --settings",
        "sweep --settings scope=regionl",
        "sweep --settings dynamic=true,cudagraphs=on",
        "sweep --settings dynamic=buckets,bucket_size=1",
        "sweep --settings scope=full,inductor.max_autotun=on",
        "sweep --settings scope=full,bucket_size=32",
        "sweep --settings scope=full,ddp.bucket_cap_mb=25",
        "sweep --settings scope=eager,ddp.compression=zip",
        "sweep --settings scope=modular,parts.encodr.mode=default",
        "sweep captioning --settings scope=full",
        "sweep --vary autocats=bf16",
        "sweep --vary group_window",
        "sweep --resume",
        "sweep --resume --output results/h200-captioning",
        "sweep --pipeline real --workload toy_workloads:Toy",
        "sweep --no-confrim",
        "sweep --starts shared --cache-store none",
        "sweep --cache-store ftp://host/cache",
        "sweep --searcher gian",
        "sweep --searcher gain --learn-from nowhere",
        "sweep --objective samples_per_sec:max",
        "sweep --constraint compile_s=120",
        "sweep --constraint graphs<=1GiB",
        "sweep --stop soon",
        "sweep --log-to wandbx:project",
        "sweep --storage ''",
        "sweep --explain mode=reduce-overhead",
        "sweep --explain scope=full --num-trials 3",
        "sweep --source scope",
        "sweep captioning --source scope=full",
    ],
    "bad_input/check.txt": [
        "check",
        "check captoning",
        "check pathlib:Path",
        "check captioning --size huge",
        "check captioning --device cuda",
        "check captioning --scopes fulll",
        "check captioning --size tiny --backend inductr",
        "check captioning --seed -1",
    ],
    "bad_input/cache.txt": [
        "cache",
        "cache lst",
        "cache list --cache-store ftp://host/cache",
        "cache list --cache-store nowhere",
        "cache show",
        "cache show 1234 --cache-store nowhere",
        "cache verify --key-file nowhere/key",
        "cache gc --cache-store nowhere",
        "cache gc --max-age-days -1 --cache-store nowhere",
        "cache export 1234 out --cache-store nowhere",
        "cache import nowhere --cache-store there",
        "cache explain here nowhere.json --cache-store nowhere",
    ],
    "bad_input/simulate.txt": [
        "simulate",
        "simulate nowhere",
        f"simulate {CAPTIONING} --seeds 0",
        f"simulate {CAPTIONING} --target 2",
        f"simulate {CAPTIONING} --searcher gian",
        f"simulate {CAPTIONING} --constraint compile_s<=0",
        f"simulate {CAPTIONING} --stop soon",
        "benchmarks.search.make_table nowhere there",
        "benchmarks.search.make_table",
    ],
    "bad_input/analysis.txt": [
        "report",
        "report nowhere",
        f"report {CAPTIONING} --port 8000",
        "table nowhere",
        "table results/h200-benchmarks",
        f"recommend {CAPTIONING} --steps many",
        f"recommend {CAPTIONING} --restarts -1",
        f"recommend {CAPTIONING} --price-per-gpu-hour x",
        f"recommend {CAPTIONING} --constraint compile_s<=0",
        f"recommend {CAPTIONING} --constraint compile_s",
        f"recommend {CAPTIONING} --constrain compile_s<=1 --nodes",
        f"compare {CAPTIONING}",
        f"compare {CAPTIONING} results/h200-workloads/detection",
        f"compare {CAPTIONING} {CAPTIONING} --fail-on compile_s",
        f"compare {CAPTIONING} {CAPTIONING} --fail-on compile_sec>+5%",
        f"compare {CAPTIONING} {CAPTIONING} --repeat {CAPTIONING}",
        f"compare {CAPTIONING} {CAPTIONING} --output results",
        f"export {CAPTIONING} --steps 1M 2M",
        f"export {CAPTIONING} --setting scope=nothing",
        f"export {CAPTIONING} --no-rerun --output {CAPTIONING}/sweep.json",
        "picture nowhere",
    ],
}

DETECTION, GAIN = "results/h200-workloads/detection", "results/search/live-captioning-tiny-cpu/gain"
ONE, ALL = "results/h200-scaling/sweep/one", "results/h200-scaling/sweep/all"
WORKERS = "results/h100-workers/segmentation/workers-2"

RESULTS: Mapping[str, Sequence[str]] = {
    "results/recommend.txt": [
        f"recommend {CAPTIONING} --restarts 10 --price-per-gpu-hour 4 --markdown",
        f"recommend {CAPTIONING} --steps 20k 1M --starts warm --start-overhead-s 60 --nodes 4 --gpus-per-node 8",
        f"recommend {CAPTIONING} --steps 2e5 --starts first-cold --restarts 3 --constraint peak_memory_bytes<=20GiB",
        f"recommend {CAPTIONING} --steps 1M --constraint compile_s<=30 --constraint samples_per_s>=1000",
        f"recommend {WORKERS} --steps 50k --price-per-gpu-hour 2.5",
    ],
    "results/compare.txt": [
        f"compare {ONE} {ALL}",
        f"compare {ONE} {ALL} --markdown --output compare.html",
        f"compare {ALL} {ONE} --fail-on compile_s>+15% --fail-on samples_per_s<-3% --fail-on graph_breaks>0",
        f"compare {ONE} {ALL} --fail-on peak_memory_bytes>1GiB --fail-on failures --fail-on numerics",
        f"compare {GAIN} {GAIN.replace('gain', 'random')} --fail-on recompiles --fail-on breaks",
    ],
    "results/simulate.txt": [
        f"simulate {CAPTIONING} --searcher grid random gain --seeds 2",
        f"simulate {GAIN} --searcher tpe nsga2 gp --seeds 1",
        f"simulate {GAIN} --searcher random gain --seeds 3 --prune --constraint compile_s<=60",
        f"simulate {CAPTIONING} --searcher gain --seeds 2 --stop 'front stable for 6 trials' --objective samples_per_s:max",
        f"benchmarks.search.make_table {CAPTIONING} table",
        "simulate table --searcher random --seeds 1 --gpu-budget-s 3000 --target 0.9",
    ],
}

EXPORTED = (
    f"export {CAPTIONING} --steps 1M --no-rerun",
    f"export {DETECTION} --steps 20k --no-rerun --only best --constraint compile_s<=60",
    f"export {WORKERS} --no-rerun --only best --output there",
)

REPORTED = (CAPTIONING, GAIN, WORKERS)

RECOMFIXED = (
    "results/h100-resnet",
    "results/h100-workers/segmentation/workers-2",
    "results/h200-scaling/workers/workers-1",
    "results/h200-workloads/decoder",
    "results/h200-workloads/gpt2-inference-medium",
    "results/h200-workloads/gpt2-large",
    "results/h200-workloads/gpt2-xl",
    "results/search/live-captioning-base-h200/gain",
    "results/search/live-captioning-tiny-cpu/random",
)
"""One sweep of each kind; a fixed list, so that a sweep committed later changes no golden file but that of `table`."""
