#!/usr/bin/env python3
"""Tests that run when what they test has changed.

    lanes.py files LANE      their files, for pytest
    lanes.py ignore          the options by which pytest leaves out the files of every lane
    lanes.py stale           the lanes whose inputs are not those of their last passing run
    lanes.py passed LANE     notes the inputs as those of a passing run, in tests/lanes.json

`make test-LANE` runs a lane and notes that it has passed; CI runs a lane that is not fresh.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "tests" / "lanes.json"


class Lane(NamedTuple):
    """Test files, and what they test beside themselves: patterns of the repository's files."""

    tests: tuple[str, ...]
    inputs: tuple[str, ...]


# What a job runs on: a change of any of it may change how a job is dumped and restored.
PRODUCT = (
    "**/CMakeLists.txt",
    "coordinator/**",
    "flowgpu/**",
    "native/**",
    "pyproject.toml",
    "tools/compile_kernels.py",
    "tools/fetch_criu.py",
    "tools/find_cuda.py",
)

LANES = {
    # Jobs under a real HTCondor, which `make setup-htcondor` fetches.
    "condor": Lane(
        tests=("tests/condor/test_condor.py",),
        inputs=(
            *PRODUCT,
            "contrib/capabilities/*",
            "contrib/htcondor/*",
            "tests/condor/*.py",
            "tests/conftest.py",
            "tests/emu/test_checkpoint.py",
            "tests/ordinary_user.py",
            "tests/patience.py",
            "tests/unit/coordinator_job.py",
            "tests/unit/criu_job.py",
            "tools/fetch_htcondor.py",
            "workloads/**",
        ),
    ),
    # A thousand cuts through ranks of NCCL.
    "cuts": Lane(
        tests=("tests/emu/test_nccl_drawn_cuts.py",),
        inputs=(
            "coordinator/communicators.py",
            "coordinator/cut.py",
            "coordinator/live_set.py",
            "flowgpu/launch.py",
            "flowgpu/nccl.py",
            "native/emu/**",
            "native/include/flowgpu/nccl.h",
            "native/nccl/**",
            "tests/emu/intercept_lib.py",
            "tests/emu/nccl_*.py",
            "pyproject.toml",
            "tests/patience.py",
        ),
    ),
    # Drawn programs of driver calls: a recorded GPU, the emulated one, and the intercept library.
    "drawn": Lane(
        tests=("tests/emu/test_programs.py",),
        inputs=(
            "native/common/**",
            "native/emu/**",
            "native/include/**",
            "native/intercept/**",
            "native/memstub/**",
            "native/modimage/**",
            "native/rewind/**",
            "native/vmm/**",
            "flowgpu/wire.py",
            "tests/emu/intercept_lib.py",
            "tests/emu/program_*.py",
            "tests/emu/record_programs.py",
            "tests/emu/recorded_*.json",
            "tests/emu/replay_cases*.py",
            "pyproject.toml",
            "tests/patience.py",
        ),
    ),
    # What the emulated GPU computes: each instruction, whole kernels, and Triton's; and its driver.
    "emulator": Lane(
        tests=(
            "tests/emu/test_driver.py",
            "tests/emu/test_kernels.py",
            "tests/emu/test_ptx.py",
            "tests/emu/test_ptx_faults.py",
            "tests/emu/test_ptx_math.py",
            "tests/emu/test_ptx_opcodes.py",
            "tests/emu/test_ptx_threads.py",
            "tests/emu/test_emulated_cubin.py",
            "tests/emu/test_replay_bare.py",
            "tests/emu/test_interpreter_bench.py",
            "tests/unit/test_kernel_results.py",
            "tests/unit/test_triton_kernels.py",
        ),
        inputs=(
            "native/emu/**",
            "native/common/**",
            "bench/interpreter.py",
            "tests/emu/array_lib.py",
            "tests/emu/cubin_*.py",
            "tests/emu/cuda_source.py",
            "tests/emu/driver_*.py",
            "tests/emu/fatbins.py",
            "tests/emu/forks.py",
            "tests/emu/image_reader.py",
            "tests/emu/intercept_lib.py",
            "tests/emu/intercept_task.py",
            "tests/emu/kernel_*.py",
            "tests/emu/program_lib.py",
            "tests/emu/ptx_*.py",
            "tests/emu/replay_*.py",
            "tests/emu/rewind_lib.py",
            "tests/emu/test_replay.py",
            "tests/emu/triton_*",
            "tests/gpu/catalogue.py",
            "tests/gpu/site.py",
            "tests/gpu/slots.py",
            "tests/emu/triton_ptx/**",
            "tests/patience.py",
            "tools/compile_triton.py",
            "pyproject.toml",
        ),
    ),
    # What measures FlowGPU, draws its figures, and shows it.
    "measuring": Lane(
        tests=(
            "tests/emu/test_bench.py",
            "tests/unit/test_bench_overhead.py",
            "tests/unit/test_bench_units.py",
            "tests/unit/test_campaign.py",
            "tests/unit/test_criu_fetch.py",
            "tests/unit/test_demo.py",
            "tests/unit/test_memstub_cost.py",
            "tests/unit/test_performance.py",
            "tests/unit/test_report.py",
            "tests/unit/test_summary.py",
            "tests/unit/test_trials_page.py",
        ),
        inputs=(
            "bench/**",
            "flowgpu/cli/**",
            "flowgpu/options.py",
            "native/memstub/**",
            "tests/emu/ddp_program.py",
            "tests/emu/nccl_lib.py",
            "tests/emu/program_lib.py",
            "tests/emu/test_checkpoint.py",
            "tests/faults/*.py",
            "tests/gpu/**",
            "tests/patience.py",
            "tests/trials/*.py",
            "tests/unit/coordinator_job.py",
            "tests/unit/criu_entries.py",
            "tests/unit/store_lib.py",
            "tools/*.py",
            "workloads/**",
            "pyproject.toml",
        ),
    ),
    # Faults at each step, kills at random, coordinators that are killed, jobs away from their GPU,
    # drawn uses of a store, and machines that lack something: memory of the GPU, of the control
    # group or of the runtime folder, or a clock that goes on.
    "faults": Lane(
        tests=(
            "tests/emu/test_takeover.py",
            "tests/emu/test_suspend.py",
            "tests/emu/test_share.py",
            "tests/emu/test_fault_matrix.py",
            "tests/emu/test_full_gpu.py",
            "tests/emu/test_clock.py",
            "tests/emu/test_storm.py",
            "tests/emu/test_memory_limit.py",
            "tests/emu/test_full_runtime_folder.py",
            "tests/unit/test_store_machine.py",
        ),
        inputs=(
            *PRODUCT,
            "bench/**",
            "tests/conftest.py",
            "tests/emu/driver_lib.py",
            "tests/emu/program_*.py",
            "tests/emu/programs/clock.c",
            "tests/emu/record_programs.py",
            "tests/emu/recorded_*.json",
            "tests/emu/series_task.py",
            "tests/emu/test_checkpoint.py",
            "tests/emu/test_cli_end_to_end.py",
            "tests/fakes/*",
            "tests/faults/*.py",
            "tests/gpu/*.py",
            "tests/patience.py",
            "tests/unit/coordinator_job.py",
            "tests/unit/criu_entries.py",
            "tests/unit/criu_job.py",
            "tests/unit/store_lib.py",
            "workloads/**",
        ),
    ),
    # Pods of a real kube-apiserver, which `make setup-kubernetes` builds.
    "kubernetes": Lane(
        tests=("tests/kubernetes/test_kubernetes.py",),
        inputs=(
            *PRODUCT,
            "contrib/kubernetes/*",
            "docs/kubernetes.md",
            "tests/conftest.py",
            "tests/emu/test_checkpoint.py",
            "tests/kubernetes/*.py",
            "tests/patience.py",
            "tests/slurm/cluster.py",
            "tests/unit/coordinator_job.py",
            "tools/fetch_kubernetes.sh",
            "workloads/**",
        ),
    ),
    # The reader of modules' images, on compiled, drawn and damaged ones, under sanitizers.
    "modimage": Lane(
        tests=("tests/emu/test_module_images.py", "tests/emu/test_movable_code.py"),
        inputs=(
            "native/common/**",
            "native/emu/**",
            "native/modimage/**",
            "tests/emu/cubin_*.py",
            "tests/emu/cuda_source.py",
            "tests/emu/fatbins.py",
            "tests/emu/image_reader.py",
            "tests/emu/ptx_runner.py",
            "pyproject.toml",
            "tests/patience.py",
        ),
    ),
    # What the commands of README and tutorial print.
    "pages": Lane(
        tests=("tests/emu/test_doc_commands.py",),
        inputs=(
            *PRODUCT,
            "README.md",
            "docs/*.md",
            "tests/conftest.py",
            "tests/doc_blocks.py",
            "tests/emu/test_cli_end_to_end.py",
            "tests/gpu/shared.py",
            "tests/patience.py",
            "workloads/**",
        ),
    ),
    # Jobs in containers of a real podman, which `make setup-podman` fetches.
    "podman": Lane(
        tests=("tests/podman/test_podman.py", "tests/podman/test_container.py"),
        inputs=(
            *PRODUCT,
            "contrib/podman/*",
            "tests/conftest.py",
            "tests/emu/test_checkpoint.py",
            "tests/patience.py",
            "tests/podman/*.py",
            "tests/unit/coordinator_job.py",
            "tools/fetch_podman.sh",
            "workloads/**",
        ),
    ),
    # Jobs of several nodes.
    "nodes": Lane(
        tests=(
            "tests/emu/test_nodes.py",
            "tests/emu/test_nodes_addresses.py",
            "tests/emu/test_nodes_connections.py",
            "tests/emu/test_nodes_launched.py",
            "tests/emu/test_nodes_nccl.py",
            "tests/emu/test_nodes_suspend.py",
        ),
        inputs=(
            *PRODUCT,
            "tests/conftest.py",
            "tests/emu/driver_lib.py",
            "tests/emu/intercept_lib.py",
            "tests/emu/nccl_*.py",
            "tests/emu/node_jobs.py",
            "tests/emu/node_program.py",
            "tests/emu/test_checkpoint.py",
            "tests/emu/test_nccl_checkpoint.py",
            "tests/patience.py",
            "tests/unit/coordinator_job.py",
            "workloads/_cuda.py",
        ),
    ),
    # Jobs of several processes that share GPU memory, and of ranks of NCCL.
    "ranks": Lane(
        tests=(
            "tests/emu/test_nccl_checkpoint.py",
            "tests/emu/test_replicas.py",
            "tests/emu/test_sharing.py",
        ),
        inputs=(
            *PRODUCT,
            "bench/machine.py",
            "tests/conftest.py",
            "tests/emu/ddp_program.py",
            "tests/emu/driver_lib.py",
            "tests/emu/intercept_lib.py",
            "tests/emu/nccl_*.py",
            "tests/emu/program_lib.py",
            "tests/emu/test_checkpoint.py",
            "tests/faults/*.py",
            "tests/gpu/*.py",
            "tests/patience.py",
            "tests/unit/coordinator_job.py",
            "workloads/**",
        ),
    ),
    # Images of running jobs: series, copies before the pause, one line that starts or goes on.
    "series": Lane(
        tests=(
            "tests/emu/test_recopy.py",
            "tests/emu/test_run_or_restore.py",
            "tests/emu/test_series.py",
        ),
        inputs=(
            *PRODUCT,
            "bench/*.py",
            "tests/conftest.py",
            "tests/emu/gpu_job.py",
            "tests/emu/program_lib.py",
            "tests/emu/series_task.py",
            "tests/emu/test_checkpoint.py",
            "tests/gpu/shared.py",
            "tests/patience.py",
            "tests/unit/coordinator_job.py",
            "tests/unit/mover_lib.py",
            "workloads/**",
        ),
    ),
    # Jobs under a real Slurm, which `make setup-slurm` installs.
    "slurm": Lane(
        tests=("tests/slurm/test_slurm.py",),
        inputs=(
            *PRODUCT,
            "bench/jobs.py",
            "bench/machine.py",
            "bench/preempt.py",
            "contrib/slurm/*",
            "tests/conftest.py",
            "tests/emu/node_program.py",
            "tests/emu/test_checkpoint.py",
            "tests/patience.py",
            "tests/slurm/*.py",
            "tests/unit/coordinator_job.py",
            "workloads/**",
        ),
    ),
    # What ordinary programs do, each dumped and restored (tests/trials), and jobs whose processes
    # start and end meanwhile, or have unusual settings and names.
    "trials": Lane(
        tests=(
            "tests/emu/test_odd_names.py",
            "tests/emu/test_process_settings.py",
            "tests/emu/test_workers.py",
            "tests/emu/test_started_programs.py",
            "tests/emu/test_trials_processes.py",
            "tests/emu/test_trials_files.py",
            "tests/emu/test_trials.py",
        ),
        inputs=(
            *PRODUCT,
            "bench/machine.py",
            "tests/conftest.py",
            "tests/emu/driver_lib.py",
            "tests/emu/gpu_job.py",
            "tests/emu/intercept_lib.py",
            "tests/emu/program_lib.py",
            "tests/emu/programs/*",
            "tests/emu/test_checkpoint.py",
            "tests/emu/test_cli_end_to_end.py",
            "tests/emu/trials_lib.py",
            "tests/emu/workers_task.py",
            "tests/faults/lanes.py",
            "tests/gpu/*.py",
            "tests/patience.py",
            "tests/trials/**",
            "tests/unit/coordinator_job.py",
            "workloads/**",
        ),
    ),
    # The wheel, built and installed into an environment of its own.
    "wheel": Lane(
        tests=("tests/wheel/test_wheel.py",),
        inputs=(
            "**/CMakeLists.txt",
            "flowgpu/cli/**",
            "flowgpu/launch.py",
            "pyproject.toml",
            "tools/find_cuda.py",
            "tools/package.cmake",
            "tools/shell_files.py",
        ),
    ),
    # The workloads by themselves: they print the same each time, and a wrong bit shows.
    "workloads": Lane(
        tests=("tests/emu/test_workloads.py",),
        inputs=(
            "native/common/**",
            "native/emu/**",
            "tests/patience.py",
            "workloads/**",
            "pyproject.toml",
        ),
    ),
}


def files(patterns: Sequence[str]) -> list[str]:
    """Names of the files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return sorted(filter(None, listed.split("\0")))


def digest(lane: Lane) -> str:
    """Digest of the names and bytes of the lane's files."""
    found = hashlib.sha256()
    for name in files((*lane.tests, *lane.inputs)):
        found.update(f"{name}\0".encode())
        found.update(hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()


def main(words: list[str]) -> int:
    verb, *names = words
    if verb == "ignore":
        print(" ".join(f"--ignore={file}" for lane in LANES.values() for file in lane.tests))
        return 0
    notes = json.loads(NOTES.read_text()) if NOTES.exists() else {}
    if verb == "stale":
        print(" ".join(name for name, lane in LANES.items() if notes.get(name) != digest(lane)))
        return 0
    (name,) = names
    lane = LANES[name]
    if verb == "files":
        print(" ".join(lane.tests))
    elif verb == "passed":
        NOTES.write_text(json.dumps(notes | {name: digest(lane)}, indent=1, sort_keys=True) + "\n")
    else:
        raise SystemExit(f"lanes.py: no verb {verb}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
