"""deploy/slurm.sh on simulated hosts, with stand-ins for Slurm's two commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import HOME, hosts, why_not

SRUN = """#!/bin/bash
# As Slurm's: the same words on every node, with the environment of here; the first that ends decides.
shift
words=("$@")
environ=$(env | grep -E '^(RAY|PATH|PYTHONPATH)' | xargs)
for node in {nodes}; do
  ssh -q -o StrictHostKeyChecking=no "root@$node" env $environ "${{words[@]@Q}}" &
done
wait -n
code=$?
wait
exit $code
"""


@pytest.fixture
def script(repository: Path) -> Path:
    return repository / "deploy" / "slurm.sh"


def test_it_is_bash_and_says_what_it_needs(script: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    done = subprocess.run(
        ["bash", str(script)], env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == f"there is no {tmp_path}/.venv/bin/python; make install, or name another with PYTHON\n"


@pytest.mark.nightly("starts a cluster over ssh on hosts of its own; `make test` covers the script's checks")
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"needs hosts of its own: {why_not()}")
@pytest.mark.timeout(1500)
def test_a_sweep_runs_on_two_nodes_and_leaves_nothing(script: Path, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (controller, nodes):
        first, second = nodes
        controller.write(f"{HOME}/bin/srun", SRUN.format(nodes=f"{first.address} {second.address}"))
        controller.write(f"{HOME}/bin/scontrol", f"#!/bin/sh\necho {first.address}\necho {second.address}\n")
        for node in (controller, *nodes):  # the home that Slurm's nodes share
            node.write(f"{HOME}/.ray/auth_token", "c3" * 32)
        printed = controller.run(
            f"chmod +x bin/* && PATH=$HOME/bin:$PATH bash {script} --size tiny --settings scope=eager --output {HOME}/sweep "
            "--placement spread --no-warm-start --cache-store none",
            timeout_s=1200,
            SLURM_JOB_NODELIST="node[1-2]",
            SLURM_JOB_NUM_NODES="2",
            SLURM_JOB_ID="41",
            PYTHON=f"{sys.prefix}/bin/python",
        )
        assert "trials: " in printed, printed
        (record,) = map(json.loads, first.run(f"cat {HOME}/sweep/trials.jsonl").splitlines())
        assert record["status"] == "ok", record
        assert f"{HOME}/sweep/report.html" in first.files(HOME)
        assert not [path for path in second.files(HOME) if "/sweep/" in path]
        for node in nodes:
            node.fall_silent(300)
