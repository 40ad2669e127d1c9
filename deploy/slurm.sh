#!/usr/bin/env bash
# One sweep on Slurm: `sbatch --nodes 4 deploy/slurm.sh captioning --max-concurrent 4`, with the words of a sweep after the script.
# Ray starts on every node of the allocation, the sweep runs on the first, and all of it ends with the job.
#
# To choose, here or on sbatch's command line: nodes, GPUs a node, partition and time. PYTHON names an interpreter that has
# compile-sweep, at one path on all nodes. At the time limit what is recorded is kept; the same command with --resume goes on.
#SBATCH --job-name=compile-sweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
set -euo pipefail

python=${PYTHON:-${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin/python}
[ -x "$python" ] || { echo "there is no $python; make install, or name another with PYTHON" >&2; exit 2; }
PATH=$(dirname "$python"):$PATH
export PATH

# The token keeps other users of the nodes out of Ray; every task finds it in the home that Slurm's nodes share.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
[ -e ~/.ray/auth_token ] || ray get-auth-token --generate >/dev/null

# symmetric-run starts the head where this address is, and ends everywhere once the sweep has.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs of one node, if it takes several, do not meet
export RAY_ADDRESS=$head:$port RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

exec srun --kill-on-bad-exit=1 ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --disable-usage-stats --dashboard-host=127.0.0.1 --resources='{"host": 1}' -- python -m orchestrator.sweep "$@"
