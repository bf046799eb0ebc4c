#!/bin/sh
# Starts this host's ranks; run it on every host with the same variables:
#   NUM_HOSTS=4 RANKS_PER_HOST=8 FIRST_HOST=node0 examples/cluster/torchrun.sh [ARGUMENTS OF THE SCRIPT]
# One host listens on PORT at FIRST_HOST. If a host fails, the others start again with it, up to RESTARTS times.
set -eu
here=$(dirname "$0")
exec torchrun \
  --nnodes "${NUM_HOSTS:?says how many hosts there are}" \
  --nproc-per-node "${RANKS_PER_HOST:-gpu}" \
  --rdzv-id "${JOB:-drivetrain}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${FIRST_HOST:?names the host that the others connect to}:${PORT:-29500}" \
  --max-restarts "${RESTARTS:-0}" \
  "${SCRIPT:-$here/classifier.py}" "$@"
