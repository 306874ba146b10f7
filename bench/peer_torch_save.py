"""Have a job save itself and start it anew from the file: the peer that frameworks bring along.

    python -m bench.peer_torch_save --folder DIR -- python workloads/gpt2.py

The pause is from the end of the step in which the request came to the file on the storage, model,
optimizer and random states in it; the restore from the start of the new process to the end of its
first step. Prints one JSON object with the keys that FlowGPU's reports have.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.peer_nvidia import SETTLE_SECONDS, STEP_SECONDS, end, wait_step
from bench.watch import PID_FILE, StepWatch
from tests.gpu.job import last_step, lines_of

SAVE_SECONDS = 300.0


class Program:
    """One process of the job, its output in a file; `folder` takes its id while it may run."""

    def __init__(self, command: list[str], log: Path, folder: Path) -> None:
        self.log, self._pid_file = log, folder / PID_FILE
        self.began = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid_file.write_text(str(self.process.pid))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            end(self.process.pid)
        self._pid_file.unlink()

    def lines(self) -> list[str]:
        return lines_of(self.log.read_text(errors="replace"))


def told(path: Path, what: str) -> dict[str, Any]:
    """What the program noted beside the file about saving or loading it."""
    return dict(json.loads(path.with_name(f"{path.name}.{what}.json").read_text()))


def save(program: Program, path: Path) -> tuple[float, dict[str, Any]]:
    """Ask for the file; the moment of asking and what the program says."""
    asked = time.monotonic()
    os.kill(program.process.pid, signal.SIGUSR1)
    program.process.wait(SAVE_SECONDS)
    try:
        return asked, told(path, "saved")
    except FileNotFoundError:
        said = program.log.read_text(errors="replace")[-2000:]
        code = program.process.returncode
        raise SystemExit(f"the job ended with {code} and saved nothing: {said}") from None


def measure(folder: Path, command: list[str], steps: int, more: int) -> dict[str, Any]:
    """One job: `steps` steps, the save, the start of a new process, `more` steps."""
    path = folder / "state"
    with Program([*command, "--save-to", str(path)], folder / "first.log", folder) as program:
        with StepWatch(program.log) as watch:
            wait_step(program.log, steps, program.process)
            time.sleep(SETTLE_SECONDS)
            step_seconds = watch.step_seconds()
        asked, saved = save(program, path)
        lines, last = program.lines(), last_step(program.log)
    with Program([*command, "--load", str(path)], folder / "second.log", folder) as program:
        with StepWatch(program.log) as watch:
            wait_step(program.log, last + 1, program.process)
            came = watch.first_after(last, STEP_SECONDS)
            wait_step(program.log, last + more, program.process)
        assert came is not None  # wait_step has seen it
        loaded = told(path, "loaded")
        return {
            "steps": last + 1,
            "step_seconds": step_seconds,
            "pause_seconds": saved["synced"] - saved["began"],
            "request_seconds": saved["synced"] - asked,
            "phases": {
                "save": saved["written"] - saved["began"],
                "sync": saved["synced"] - saved["written"],
            },
            "image_bytes": path.stat().st_size,
            "restore_seconds": loaded["loaded"] - program.began,
            "restore_phases": {
                "start": loaded["began"] - program.began,
                "load": loaded["loaded"] - loaded["began"],
                "step": came - loaded["loaded"],
            },
            "next_step_seconds": came - program.began,
            "lines": lines + program.lines(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.peer_torch_save")
    parser.add_argument("--folder", type=Path, required=True, help="on a tmpfs, for log and file")
    parser.add_argument("--steps", type=int, default=10, help="steps before the request")
    parser.add_argument("--more", type=int, default=3, help="steps after the restart")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    print(json.dumps(measure(options.folder, options.command, options.steps, options.more)))


if __name__ == "__main__":
    main()
