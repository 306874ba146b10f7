#!/bin/bash
# A job of several nodes that may be preempted at any time: `sbatch -N 2 nodes.sh python train.py`.
#SBATCH --comment=flowgpu
#SBATCH --gres=gpu:1
# Without `B:`, so that Slurm's signal reaches the commands on all nodes.
#SBATCH --signal=URG@60
set -eu
mkdir -p "${FLOWGPU_IMAGES:=$SLURM_SUBMIT_DIR/images}"
# By this the nodes know each other.
FLOWGPU_JOIN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export FLOWGPU_JOIN
# A node that has ended with 75 is no reason to end the others, which are being dumped.
exec srun --kill-on-bad-exit=0 env --block-signal=URG flowgpu run --join "job-$SLURM_JOB_ID" --store "$FLOWGPU_IMAGES" --resume \
    --every "${FLOWGPU_EVERY:-600}" --on-signal URG=dump -- "$@"
