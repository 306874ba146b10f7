#!/bin/sh
# A job in a container, which goes on where its last container was stopped:
#   job.sh NAME IMAGE COMMAND...
# FLOWGPU_IMAGES  folder of the host for images of jobs; else `images` here
# FLOWGPU_EVERY   seconds between images of the running job; else 600
# PODMAN_OPTIONS  more options, by spaces: volumes, --device nvidia.com/gpu=all
set -eu
name=$1 image=$2
shift 2
mkdir -p "${FLOWGPU_IMAGES:=$PWD/images}"
# Stopping waits until the image is whole. Capabilities and calls are those that CRIU needs.
# shellcheck disable=SC2086
exec podman run --rm --name "$name" --stop-timeout 300 --tmpfs /run --volume "$FLOWGPU_IMAGES:/images" \
    --cap-add SYS_ADMIN,CHECKPOINT_RESTORE,SYS_PTRACE,NET_ADMIN,SYS_RESOURCE,SYS_TIME \
    --security-opt seccomp=unconfined ${PODMAN_OPTIONS:-} "$image" \
    flowgpu run --name "$name" --store /images --resume --every "${FLOWGPU_EVERY:-600}" --on-signal TERM=dump -- "$@"
