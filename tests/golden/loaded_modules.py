"""Formats names of loaded modules for a golden file."""

from __future__ import annotations

import json
from collections.abc import Iterable

OURS = ("analysis", "compile_sweep", "orchestrator", "workloads")
HEAVY = (
    "fsspec", "jinja2", "mlflow", "numpy", "optuna", "pandas", "plotly", "pyarrow", "ray", "ray.train", "ray.tune", "rich",
    "scipy", "sklearn", "torch", "torch._dynamo", "torch._inductor", "torch.distributed", "transformers", "triton", "tyro",
)  # fmt: skip
"""Third-party modules that take a while to load, or that only some processes need."""


def loaded(names: Iterable[str]) -> str:
    """Returns the names that matter, as JSON."""
    known = set(names)
    ours = sorted(name for name in known if name.partition(".")[0] in OURS)
    return json.dumps({"heavy": [name for name in HEAVY if name in known], "ours": ours}, indent=1) + "\n"
