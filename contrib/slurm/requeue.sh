#!/bin/bash
# The same where RequeueExit is not set, and no cli_filter.lua is there: `sbatch requeue.sh python train.py`.
#SBATCH --requeue --open-mode=append --signal=B:URG@60
#SBATCH --gres=gpu:1
set -u
mkdir -p "${FLOWGPU_IMAGES:=$SLURM_SUBMIT_DIR/images}"
env --block-signal=URG flowgpu run --name "job-$SLURM_JOB_ID" --store "$FLOWGPU_IMAGES" --resume --every "${FLOWGPU_EVERY:-600}" \
    --on-signal URG=dump -- "$@" &
job=$!
trap 'kill -URG $job' URG
# A signal ends `wait`; the job goes on until its image is whole.
while wait "$job"; code=$?; kill -0 "$job" 2> /dev/null; do :; done
# It kills what still runs of the job, so nothing may.
[ "$code" != 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
