"""Checkpoint a job with NVIDIA's checkpoint API and CRIU, and bring it back: the peer.

    python -m bench.peer_nvidia --folder DIR -- python workloads/gpt2.py

The driver moves all GPU memory of the process into host memory of that process, and CRIU writes the
process. Prints one JSON object with the keys that FlowGPU's reports have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from bench.device import check
from bench.watch import PID_FILE, StepWatch
from flowgpu.host.criu import Criu
from tests.gpu.job import last_step, lines_of

LOCK_MILLISECONDS = 20_000
START_SECONDS = STEP_SECONDS = 180.0
CRIU_SECONDS = 300.0
SETTLE_SECONDS = 0.5


class Clock:
    """Seconds of named parts, in the order in which they ran."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = action()
        self.phases[name] = time.monotonic() - began
        return result

    @property
    def total(self) -> float:
        return sum(self.phases.values())


def pause(process: subprocess.Popen[bytes], criu: Criu, images: Path) -> Clock:
    """Lock, checkpoint and dump; the process is gone afterwards."""
    lock = driver.CUcheckpointLockArgs()
    lock.timeoutMs = LOCK_MILLISECONDS
    clock = Clock()
    clock.time("lock", lambda: check(driver.cuCheckpointProcessLock(process.pid, lock)))
    clock.time("checkpoint", lambda: check(driver.cuCheckpointProcessCheckpoint(process.pid, None)))
    clock.time(
        "criu",
        lambda: criu.dump(process.pid, images, leave_stopped=False, timeout=CRIU_SECONDS),
    )
    clock.time("end", process.wait)
    return clock


def resume(criu: Criu, images: Path) -> Clock:
    """Restore and unlock."""
    clock = Clock()
    pid = clock.time("criu", lambda: criu.restore(images, timeout=CRIU_SECONDS))
    clock.time("restore", lambda: check(driver.cuCheckpointProcessRestore(pid, None)))
    clock.time("unlock", lambda: check(driver.cuCheckpointProcessUnlock(pid, None)))
    return clock


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def wait_step(log: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while last_step(log) < step:
        if process.poll() is not None:
            raise SystemExit(f"the job ended with {process.returncode}: {log.read_text()[-2000:]}")
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} did not come in {START_SECONDS:.0f} s")
        time.sleep(0.005)


def measure(folder: Path, command: list[str], steps: int, more: int) -> dict[str, Any]:
    """One job: `steps` steps, the checkpoint, the restore, `more` steps."""
    log, images = folder / "peer.log", folder / "peer"
    check(driver.cuInit(0))
    criu = Criu.locate()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    pid_file = folder / PID_FILE
    pid_file.write_text(str(process.pid))
    try:
        with StepWatch(log) as watch:
            wait_step(log, steps, process)
            time.sleep(SETTLE_SECONDS)
            step_seconds = watch.step_seconds()
        paused = pause(process, criu, images)
        last = last_step(log)
        image_bytes = sum(path.stat().st_size for path in images.iterdir())
        with StepWatch(log) as watch:
            began = time.monotonic()
            resumed = resume(criu, images)
            came = watch.first_after(last, STEP_SECONDS)
            if came is None:
                raise SystemExit("the restored job made no step")
            if watch.first_after(last + more - 1, STEP_SECONDS) is None:
                raise SystemExit("the restored job stopped after its first step")
        return {
            "steps": last + 1,
            "step_seconds": step_seconds,
            "pause_seconds": paused.total,
            "phases": paused.phases,
            "image_bytes": image_bytes,
            "restore_seconds": resumed.total,
            "restore_phases": resumed.phases,
            "next_step_seconds": came - began,
            "lines": lines_of(log.read_text(errors="replace")),
        }
    finally:
        end(process.pid)
        pid_file.unlink()
        shutil.rmtree(images, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.peer_nvidia")
    parser.add_argument("--folder", type=Path, required=True, help="on a tmpfs, for log and image")
    parser.add_argument("--steps", type=int, default=10, help="steps before the checkpoint")
    parser.add_argument("--more", type=int, default=3, help="steps after the restore")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    print(json.dumps(measure(options.folder, options.command, options.steps, options.more)))


if __name__ == "__main__":
    main()
