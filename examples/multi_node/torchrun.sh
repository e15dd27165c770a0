#!/usr/bin/env bash
# Run this on each of NODES machines; HOST is one of them that all reach.
#
#     NODES=2 GPUS=8 HOST=node-0 AUTOPLAN_GPUS=2x8xH100 ./torchrun.sh
set -euo pipefail
exec torchrun \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "${GPUS:-8}" \
    --rdzv-backend c10d \
    --rdzv-id "${JOB:-autoplan}" \
    --rdzv-endpoint "${HOST:-localhost}:${PORT:-29500}" \
    "$(dirname "$0")/train.py"
