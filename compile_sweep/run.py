"""`python -m compile_sweep.run --settings X train.py …`: a training script with a sweep's winner applied, without a change to it.

Under torchrun: `torchrun --nproc-per-node 2 -m compile_sweep.run --settings X train.py …`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from compile_sweep.schema.errors import CompileSweepError
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.main_module import run_as_main
from compile_sweep.script.winner import Applier


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code, unless the script ends the process with its own."""
    options = argparse.ArgumentParser(
        prog="python -m compile_sweep.run", description="Train a script with compile settings applied, without a change to it."
    )
    options.add_argument(
        "--settings",
        required=True,
        help="a sweep's folder, whose best setting is taken, a JSON file, or text such as scope=full,dynamic=auto",
    )
    options.add_argument("script", metavar="SCRIPT.py", help="the script, followed by its own arguments")
    options.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    told = options.parse_args(arguments)
    try:
        own = told.arguments[1:] if told.arguments[:1] == ["--"] else told.arguments
        job = ScriptJob.of(told.script, own)
        applier = Applier(told.settings)
    except CompileSweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    del sys.path[0]  # the folder of `-m`; the script's own comes in its place
    with applier.own_compile.answered(plainly=not applier.settings.as_written):
        applier.begin()
        try:
            run_as_main(job.path, job.arguments, shown_as=told.script)
        finally:
            applier.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
