#!/bin/bash
# A job that may be preempted at any time: `sbatch job.sh python train.py`.
#SBATCH --comment=flowgpu
#SBATCH --gres=gpu:1
set -eu
mkdir -p "${FLOWGPU_IMAGES:=$SLURM_SUBMIT_DIR/images}"
# By `exec`, so that Slurm's signal reaches it; blocked, so that one that comes early waits for it.
exec env --block-signal=URG flowgpu run --name "job-$SLURM_JOB_ID" --store "$FLOWGPU_IMAGES" --resume --every "${FLOWGPU_EVERY:-600}" \
    --on-signal URG=dump -- "$@"
