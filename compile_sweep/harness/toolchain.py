"""Prepares the tools that Inductor compiles with before anything is measured: C++ headers on a CPU, compile workers on a GPU.

Torch precompiles its C++ headers once per host and keeps them outside `TORCHINDUCTOR_CACHE_DIR`, in the folder for temporary
files, so the first cold compile on a host would take seconds longer than later ones. Its compile workers take about 7 s to start
on an H200 host, as long as it takes to build a model; exported settings start them on import, and so does a trial.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
from torch._inductor.async_compile import maybe_warm_pool
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_COMPILE_SOMETHING = """
import torch
step = torch.compile(lambda x: (x.relu() * 2).sum())
step(torch.ones(64, 64, requires_grad=True)).backward()
"""


def cpp_header_folder() -> Path:
    """Returns the folder in which torch keeps precompiled C++ headers, creating it if necessary."""
    folder = Path(default_cache_dir(), "precompiled_headers")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def warm_cpp_headers() -> None:
    """Compiles a tiny program in another process, once per host, user and torch version; ignores failures."""
    with (cpp_header_folder() / f"compile-sweep-{torch.__version__}").open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)  # of concurrent trials, one compiles and the others wait
        if os.fstat(mark.fileno()).st_size == 0:  # tell() would be where the file ended before the lock was acquired
            environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            if subprocess.run([sys.executable, "-c", _COMPILE_SOMETHING], env=environment, check=False).returncode == 0:
                mark.write("made\n")


def check_vector_instructions() -> None:
    """Makes torch's checks of the CPU's vector instructions, with their results from earlier processes on this host.

    With an empty compile cache, torch compiles and loads up to seven programs for them in every process: 3 s of CPU time or more.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list

    check = getattr(VecISA, "check_build", None)
    if check is None:  # then torch makes the checks itself
        return
    compiler = Path(shutil.which(get_cpp_compiler()) or "").resolve()
    results = cpp_header_folder() / f"compile-sweep-vector-checks-{torch.__version__}.json"
    known: dict[str, bool] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}

    def remembered(isa: VecISA, code: str) -> bool:
        what = f"{compiler} {compiler.stat().st_mtime_ns} {isa.build_arch_flags()} {code}"
        key = hashlib.sha256(what.encode()).hexdigest()
        if key not in known:
            known[key] = check(isa, code)
        return known[key]

    before = len(known)
    with mock.patch.object(VecISA, "check_build", remembered):
        valid_vec_isa_list()
    if len(known) > before:
        written = results.with_name(f"{results.name}.{os.getpid()}")
        written.write_text(json.dumps(known), encoding="utf-8")
        os.replace(written, results)


def link_cpp_headers(headers: Path) -> None:
    """Lets processes that this one starts find the headers although its temporary files now go to a new folder.

    Args:
        headers: Result of `cpp_header_folder()` before the change.
    """
    folder = Path(default_cache_dir())
    folder.mkdir()
    (folder / headers.name).symlink_to(headers)


def start_compile_workers() -> None:
    """Starts the processes that compile kernels for a GPU, without waiting for them."""
    maybe_warm_pool()
