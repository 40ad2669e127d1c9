"""Prepares the tools that Inductor compiles with before anything is measured: C++ headers on a CPU, compile workers on a GPU.

Torch believes that every compiled file that exists is complete, and compilers write files in place. So a killed process leaves
files on which later ones fail, in folders that a user's processes share: precompiled headers, and a user's own compile cache.
`compile_whole_files` replaces that.

Torch precompiles its C++ headers once per host, installed torch and compiler, and keeps them outside `TORCHINDUCTOR_CACHE_DIR`,
in the folder for temporary files, so the first cold compile on a host would take seconds longer than later ones. Its compile
workers take about 7 s to start on an H200 host, as long as it takes to build a model; exported settings start them on import,
and so does a trial.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import codecache
from torch._inductor.async_compile import maybe_warm_pool
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from compile_sweep.harness.compile_cache.artifact import ELF_HEAD_BYTES, is_cut_short
from compile_sweep.own_packages import import_path
from compile_sweep.schema.journal import written_whole

_COMPILE_SOMETHING = """
import torch
from compile_sweep.harness.toolchain import compile_whole_files
compile_whole_files()
step = torch.compile(lambda x: (x.relu() * 2).sum())
step(torch.ones(64, 64, requires_grad=True)).backward()
"""


def cpp_header_folder() -> Path:
    """Returns the folder in which torch keeps precompiled C++ headers, creating it if necessary."""
    folder = Path(default_cache_dir(), "precompiled_headers")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cpp_header_mark() -> Path:
    """Returns the file that says that this torch's headers are there: torch knows them by its folder and the compiler, too."""
    key = hashlib.sha256(f"{torch.__file__} {_compiler()}".encode()).hexdigest()[:16]
    return cpp_header_folder() / f"compile-sweep-{torch.__version__}-{key}"


def _compiler() -> str:
    """Returns which C++ compiler Inductor uses, and when that was installed."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler = Path(shutil.which(get_cpp_compiler()) or "").resolve()
    return f"{compiler} {compiler.stat().st_mtime_ns}"


def warm_cpp_headers() -> None:
    """Compiles a tiny program in another process, once per host, user, installed torch and compiler; ignores failures."""
    try:
        path = cpp_header_mark()
    except InvalidCxxCompiler:  # a trial that compiles says so
        return
    with path.open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)  # of concurrent trials, one compiles and the others wait
        if os.fstat(mark.fileno()).st_size == 0:  # tell() would be where the file ended before the lock was acquired
            folders = os.pathsep.join(import_path(with_current_folder=False))
            environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "PYTHONPATH": folders}
            if subprocess.run([sys.executable, "-P", "-c", _COMPILE_SOMETHING], env=environment, check=False).returncode == 0:
                mark.write("made\n")


def check_vector_instructions() -> None:
    """Makes torch's checks of the CPU's vector instructions, with their results from earlier processes on this host.

    With an empty compile cache, torch compiles and loads up to seven programs for them in every process: 3 s of CPU time or more.
    """
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list

    check = getattr(VecISA, "check_build", None)
    if check is None:  # then torch makes the checks itself
        return
    compiler = _compiler()
    results = cpp_header_folder() / f"compile-sweep-vector-checks-{torch.__version__}.json"
    known: dict[str, bool] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}

    def remembered(isa: VecISA, code: str) -> bool:
        what = f"{compiler} {isa.build_arch_flags()} {code}"
        key = hashlib.sha256(what.encode()).hexdigest()
        if key not in known:
            known[key] = check(isa, code)
        return known[key]

    before = len(known)
    with mock.patch.object(VecISA, "check_build", remembered):
        valid_vec_isa_list()
    if len(known) > before:
        with written_whole(results) as unfinished:
            unfinished.write_text(json.dumps(known), encoding="utf-8")


def link_cpp_headers(headers: Path) -> None:
    """Lets processes that this one starts find the headers although its temporary files now go to a new folder."""
    folder = Path(default_cache_dir())
    folder.mkdir()
    (folder / headers.name).symlink_to(headers)


def start_compile_workers() -> None:
    """Starts the processes that compile kernels for a GPU, without waiting for them."""
    maybe_warm_pool()


_LOCK_TIMEOUT_S = 600.0
_BROKEN_HEADER = re.compile(
    r"while reading precompiled header|cannot read PCH file|cannot read .*\.gch|is not a valid precompiled"
)
"""What compilers say of a precompiled header that was cut short."""


def compile_whole_files() -> None:
    """Makes this process compile C++ to files that appear complete, and replace those that a killed process cut short."""
    if hasattr(codecache, "_worker_compile_cpp"):
        codecache._worker_compile_cpp = _compile_whole


def _compile_whole(lock_path: str, cpp_builders: Sequence[Any]) -> None:
    """Makes the builders' files unless they exist; takes the place of torch's `_worker_compile_cpp` (torch 2.11 to 2.15)."""
    from torch.utils._filelock import FileLock

    with FileLock(lock_path, timeout=_LOCK_TIMEOUT_S):
        for builder in cpp_builders:
            target = Path(builder.get_target_file_path())
            if target.exists():
                with target.open("rb") as file:
                    head = file.read(ELF_HEAD_BYTES)
                if not is_cut_short(target.name, head, target.stat().st_size):
                    continue
                _remove_cut_short(target)
            try:
                _build(builder, target)
            except CppCompileError as error:
                header = getattr(getattr(builder, "_build_option", None), "precompiled_header", None)
                if not header or not _BROKEN_HEADER.search(error.output):
                    raise
                for precompiled in Path(header).parent.glob(f"{Path(header).name}.?ch"):
                    _remove_cut_short(precompiled)
                _build(builder, target)  # with the header itself; the next process precompiles it again


def _build(builder: Any, target: Path) -> None:
    """Compiles to a temporary name beside the target, and renames the result."""
    output = str(getattr(builder, "_output", ""))
    if not output.endswith(str(target)):  # a torch that says otherwise where it compiles to
        builder.build()
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    builder._output = output.removesuffix(str(target)) + str(part)
    try:
        builder.build()
        os.replace(part, target)
    finally:
        builder._output = output
        part.unlink(missing_ok=True)


def _remove_cut_short(path: Path) -> None:
    print(f"{path} was cut short, as by a process that was killed; it is compiled again", file=sys.stderr, flush=True)
    path.unlink(missing_ok=True)
