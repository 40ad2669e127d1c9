"""Measures one setting in a process of its own: `python -m compile_sweep.harness.run_one ASSIGNMENT OUTCOME`, both JSON files.

For whoever wants one measurement without a sweep. The assignment's `protocol` may name fields of `Protocol`. The phase reached
is a line of the file `phase` beside the outcome.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.toolchain import warm_cpp_headers
from compile_sweep.schema.phases import Phase
from compile_sweep.schema.settings import CompileSettings


def main(assignment: Path, outcome: Path) -> None:
    """Reads what to measure and writes what came of it, be it a measurement or an exception."""
    told = json.loads(assignment.read_text(encoding="utf-8"))
    try:
        came = _measured(told, outcome.with_name("phase"))
    except Exception as error:  # whatever it is, whoever asked says it better than a traceback
        traceback.print_exc()
        came = {
            "error_type": f"{type(error).__module__}.{type(error).__qualname__}",
            "error_text": str(error),
            "error_is_compilers": isinstance(error, TorchDynamoException),
        }
    outcome.write_text(json.dumps(came), encoding="utf-8")


def _measured(told: dict[str, Any], phase_file: Path) -> dict[str, Any]:
    def on_phase(phase: Phase) -> None:
        written = phase_file.with_suffix(".new")
        written.write_text(phase, encoding="utf-8")
        os.replace(written, phase_file)

    device = torch.device(told["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        warm_cpp_headers()
    workload = load_workload(told["workload"])(told["size"], told["seed"])
    prepared = prepare(workload, CompileSettings.parse(told["settings"]), device)
    measurement = measure(prepared, protocol=Protocol(**told.get("protocol", {})), on_phase=on_phase)
    return {"measurement": measurement.to_dict(), "targets": prepared.compiled_apart(workload.build_model())}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
