"""A process that compiles according to `test_transfer.py`: `caching_process.py PLAN`, a JSON file that receives the result.

Without an argument it reads lines of standard input, each a JSON list of a plan's file and of environment variables. It forks a
process for each line, which therefore has imported torch already, and answers with that process's exit status.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # so that forked processes need not
from torch import nn
from torch._functorch import config as functorch_config

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.compile_cache.transfer import (
    CacheFolders,
    enable_precompile,
    gather_artifacts,
    restore_artifacts,
    watch_caches,
)
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.toolchain import check_vector_instructions
from compile_sweep.harness.warm_start import restart
from compile_sweep.schema.settings import CompileSettings


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    activation = {"relu": nn.ReLU, "plain": nn.Identity, "norm": lambda: nn.LayerNorm(512)}[name]
    bias = name != "plain"  # whose gradient is a sum, for which Inductor writes a kernel
    return nn.Sequential(nn.Linear(512, 512, bias=bias), activation(), nn.Linear(512, 8, bias=bias))


def first_step(name: str, *, mode: str | None, device: str) -> float:
    """Returns the seconds of compiling and running forward and backward, including the call of `torch.compile`."""
    built, batch = model(name).to(device), torch.ones(16, 512, device=device)
    begun = time.perf_counter()
    torch.compile(built, mode=mode)(batch).square().sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def first_step_under(settings: str, name: str, *, device: str) -> float:
    """Returns the seconds of a workload's first step."""
    workload = load_workload(name)("tiny", 0)
    return restart(prepare(workload, CompileSettings.parse(settings), device)).first_step_s


def run(plan: dict[str, Any]) -> dict[str, Any]:
    folders = CacheFolders.of_process()
    restored = [artifact for path in plan["restored"] for artifact in pickle.loads(Path(path).read_bytes())]
    restore_artifacts(restored, folders)
    with ExitStack() as within:
        within.enter_context(enable_precompile(plan["precompile"]))
        within.enter_context(functorch_config.patch(enable_autograd_cache=plan["autograd_cache"]))
        use = within.enter_context(watch_caches(restored))
        if settings := plan["settings"]:
            steps_s = [first_step_under(settings, name, device=plan["device"]) for name in plan["models"]]
        else:
            steps_s = [first_step(name, mode=plan["mode"], device=plan["device"]) for name in plan["models"]]
        gathered = gather_artifacts(folders, use)
    Path(plan["gathered"]).write_bytes(pickle.dumps(gathered))
    return {
        "compile_s": sum(steps_s),
        "hits": use.hits,
        "misses": use.misses,
        "hit_keys": use.hit_keys,
        "saved_s": use.saved_s,
        "costs": [[*name, cost_s] for name, cost_s in use.cost_s.items()],
    }


def answer(path: Path) -> None:
    """Follows the plan in the file and leaves there what came of it."""
    path.write_text(json.dumps(run(json.loads(path.read_text()))))


def serve() -> None:
    """Forks a process for each line, and waits for it."""
    check_vector_instructions()  # which each process would do otherwise, in its empty cache folder
    for line in sys.stdin:
        path, environment = json.loads(line)
        if (child := os.fork()) == 0:
            os.environ.update(environment)
            status = 1
            try:
                answer(Path(path))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        answer(Path(sys.argv[1]))
    else:
        serve()
