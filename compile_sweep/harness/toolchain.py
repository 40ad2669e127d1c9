"""Prepares the tools that Inductor compiles with before anything is measured: C++ headers on a CPU, compile workers on a GPU.

Torch precompiles its C++ headers once per host and keeps them outside `TORCHINDUCTOR_CACHE_DIR`, in the folder for temporary
files, so the first cold compile on a host would take seconds longer than later ones. Its compile workers take about 7 s to start
on an H200 host, as long as it takes to build a model; exported settings start them on import, and so does a trial.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

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
    """Makes torch's check of the CPU's vector instructions, or takes its result from an earlier process on this host.

    Torch compiles and loads a program for it, with an empty compile cache in every process, which takes 3 s and more.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    if not hasattr(config.cpp, "vec_isa_ok"):  # then torch makes the check itself
        return

    def names() -> str:
        return "\n".join(str(one) for one in valid_vec_isa_list())

    found = cpp_header_folder() / f"compile-sweep-vectors-{torch.__version__}"
    config.cpp.vec_isa_ok = True
    if not found.exists() or found.read_text(encoding="utf-8") != names():
        config.cpp.vec_isa_ok = None
        valid_vec_isa_list.cache_clear()
        written = found.with_name(f"{found.name}.{os.getpid()}")
        written.write_text(names(), encoding="utf-8")
        os.replace(written, found)


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
