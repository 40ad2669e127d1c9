"""Spares a look at one setting the code of graphs that only another value of one Python number asks for.

Background: a number that changes at each step and is a constant of the graph makes torch compile again at each step, until its
recompile limit is hit and the function runs eagerly. All these graphs are alike, and each runs once. Most of the time to compile
one goes into generating and compiling its code, so after the first few, AOTAutograd's graph runs as it is.

Output: the number of graphs without code. If there are any and no limit was hit after all, steps were timed that are not the
setting's, and it has to be measured again without this.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._guards import CompileContext

from compile_sweep.contract.installed_torch import private
from compile_sweep.schema.causes.recompiles import fold_recompiles

_NUMBER = re.compile(r"-?(\d[\d.e+-]*|inf|nan)")
GRAPHS_WITH_CODE = 2  # number of graphs of one function that get code, whatever asked for them


class RepeatedGraphs:
    """Lets repeated graphs run without code, and counts them."""

    def __init__(self) -> None:
        self.without_code = 0

    @contextmanager
    def spared(self, reasons: Sequence[str]) -> Iterator[None]:
        """Inside the block, Inductor compiles no graph that repeats another."""
        # This stands before Inductor, which is loaded with the first graph, so that loading it counts as compile time.
        inductor = private("torch", "_TorchCompileInductorWrapper")
        if inductor is None:
            yield
            return
        compile_it = inductor.__call__

        def compile_unless_repeated(backend: Any, graph: Any, inputs: Any, **options: Any) -> Any:
            if not _repeats(reasons):
                return compile_it(backend, graph, inputs, **options)
            from torch._dynamo.backends.debugging import aot_eager

            self.without_code += 1
            return aot_eager(graph, inputs)

        inductor.__call__ = compile_unless_repeated
        try:
            yield
        finally:
            inductor.__call__ = compile_it


def _repeats(reasons: Sequence[str]) -> bool:
    """Tells whether the graph that is being compiled differs from those before it in the value of one number only."""
    compiling = CompileContext.current_compile_id()
    if compiling is None or (compiling.frame_compile_id or 0) < GRAPHS_WITH_CODE:
        return False
    last = fold_recompiles(reasons[-GRAPHS_WITH_CODE:])
    if len(last) != 1 or last[0].first.kind != "value":
        return False
    return sum(_NUMBER.fullmatch(value) is not None for value in last[0].values) == GRAPHS_WITH_CODE
