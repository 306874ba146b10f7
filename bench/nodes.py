"""What a checkpoint and a restore of a job of two nodes take: ranks that train one model.

    python -m bench.nodes [--gpu nvidia|emulated] [--engine native|replay]
                          [--communicators keep|rebuild] [--repeats N] [--out FILE.json]

Each node has a rank, in a network namespace of this machine, which takes root and the program ip;
and a GPU of its own where there are two. On NVIDIA's GPUs the job is GPT-2 XL with DDP
(workloads/gpt2_xl_ddp.py), on the emulated GPU a small program of the tests. Images go to a tmpfs.
A restore counts from the start of both commands, and ends for the slower node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import machine
from bench.watch import StepWatch
from flowgpu.launch import GpuKind, emulated_driver, emulator_socket
from flowgpu.render import size
from tests.emu.node_jobs import ROOT, Node, Nodes, connected_hosts
from tests.emu.test_checkpoint import end_emulator
from tests.faults.lanes import lane_name
from tests.gpu.job import last_step
from tests.gpu.site import Trouble
from tests.gpu.slots import VISIBLE, visible_gpus
from tests.unit.coordinator_job import wait_for

JOB = "gpt2_xl_ddp on two nodes"
ADDRESSES = ("10.77.34.1", "10.77.34.2")
STEPS, STEPS_BEFORE, STEPS_AFTER = 2000, 8, 2
STEP_SECONDS = 300.0
TOLD = ("gpu_bytes_stored", "cpu_bytes", "image_bytes", "pause_seconds")


@contextlib.contextmanager
def two_nodes(kind: GpuKind) -> Iterator[Nodes]:
    """Both, each on a host of its own, with a rank of the job."""
    with contextlib.ExitStack() as stack:

        def folder(**where: str) -> Path:
            made = tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True)
            return Path(stack.enter_context(made))

        work = folder()
        hosts = connected_hosts(stack, ADDRESSES)
        bases = [folder(prefix="flowgpu-") for _ in hosts]
        nodes = Nodes(Node(k, base, work, "") for k, base in enumerate(bases))
        gpus = visible_gpus(kind, None) if kind == "nvidia" else []
        for node, name in zip(nodes, hosts, strict=True):
            stack.callback(end_emulator, emulator_socket(node.base))
            stack.callback(node.clear)
            node.be_on(name, ADDRESSES[0])
            node.gpu = kind
            node.env |= {"NCCL_HOSTID": f"host {node.number}", "NCCL_SOCKET_IFNAME": "fgveth"}
            node.env |= {"WORKLOAD_HURRY": str(work / "hurry")}
            if kind == "emulated":
                _run_small(node, work)
            else:
                node.env[VISIBLE] = gpus[node.number % len(gpus)]
                _run_large(node)
        yield nodes


def _run_small(node: Node, work: Path) -> None:
    node.env |= {"LD_LIBRARY_PATH": str(emulated_driver().parent), "PYTHONPATH": str(ROOT)}
    node.env["FLOWGPU_EMU_DEVICES"] = "2"  # the second rank takes the second
    words = (2, STEPS, work, "processes", node.number)
    node.program = [sys.executable, "-m", "tests.emu.ddp_program", *words]


def _run_large(node: Node) -> None:
    node.env |= {
        "RANK": str(node.number),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "7100",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    node.program = [sys.executable, "workloads/gpt2_xl_ddp.py", "--steps", STEPS]


def measured(nodes: Nodes, engine: str, communicators: str, image: Path) -> dict[str, Any]:
    """One job, dumped and restored. Raises Trouble."""
    for node in nodes:
        node.run("--engine", engine)
    nodes[0].wait_more(STEPS_BEFORE)
    words = ("--json", "--engine", engine, "--communicators", communicators)
    done = nodes.ask("pause-and-dump", image, *words)
    if done.returncode:
        raise Trouble(done.stderr)
    paused = json.loads(done.stdout)
    for node in nodes:
        node.wait()
    with StepWatch(nodes[0].out) as watch:
        last = last_step(nodes[0].out)
        began = time.monotonic()
        nodes.restore(image)
        came = watch.first_after(last, STEP_SECONDS)
        if came is None or watch.first_after(last + STEPS_AFTER - 1, STEP_SECONDS) is None:
            raise Trouble(f"the restored job made no steps: {nodes[0].said}")
    reports = [wait_for(lambda node=node: node.record.restored, "a report") for node in nodes]
    return {
        "engine": engine,
        "communicators": communicators,
        **{name: paused[name] for name in TOLD},
        "cut_seconds": paused["phases"].get("cut", 0.0),
        "restore_seconds": max(report["restore_seconds"] for report in reports),
        "next_step_seconds": came - began,
    }


COLUMNS = ("communicators", "engine", "pause", "cut", "stored", "image", "restore", "next step")


def show(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = (
        row["communicators"],
        row["engine"],
        f"{row['pause_seconds']:.2f} s",
        f"{row['cut_seconds'] * 1e3:.0f} ms",
        size(row["gpu_bytes_stored"]),
        size(row["image_bytes"]),
        f"{row['restore_seconds']:.2f} s",
        f"{row['next_step_seconds']:.2f} s",
    )
    return f"| {' | '.join(cells)} |"


HEADING = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def table(document: dict[str, Any]) -> str:
    """What job it is, and its rows."""
    rows = "\n".join(map(show, document["rows"]))
    return f"{document['job']} ({document['gpu']})\n{HEADING}\n{rows}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=("nvidia", "emulated"), default="nvidia")
    parser.add_argument("--engine", choices=("native", "replay"), default="replay")
    parser.add_argument("--communicators", choices=("keep", "rebuild"), default="rebuild")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if os.geteuid() or not shutil.which("ip"):
        parser.error("it makes network namespaces, which takes root and the program ip")
    document = machine.heading("nodes", machine.of_module("bench.nodes"))
    lane = f"{lane_name(options.gpu, options.engine)}, {options.communicators}"
    document |= {"gpu": lane, "job": JOB, "rows": []}
    print(HEADING)
    for _ in range(options.repeats):
        images = Path(tempfile.mkdtemp(dir="/dev/shm"))
        try:
            with two_nodes(options.gpu) as nodes:
                image = images / "image"
                row = measured(nodes, options.engine, options.communicators, image)
        finally:
            shutil.rmtree(images)
        machine.keep_row(document, row, show(row), options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
