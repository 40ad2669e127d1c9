"""The workloads that come with the project. `compile_sweep` has what a workload of your own needs.

Until 0.3.0, the names that `compile_sweep` exports can also be imported from here, as before 0.2.0.
"""

from typing import Any

import compile_sweep

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name in compile_sweep.__all__:
        return getattr(compile_sweep, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
