"""The real coordinator with the ghost of tests/fakes/ghost.py, which needs no CUDA."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator import supervisor
from coordinator.keeper import Kept, keep
from coordinator.supervisor import Supervisor
from flowgpu import launch
from flowgpu.launch import Spec


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec-fd", type=int, required=True)
    with os.fdopen(parser.parse_args().spec_fd, "rb") as source:
        spec = Spec.from_json(source.read())
    return keep(lambda kept: coordinate(spec, kept), spec.job_dir)


def coordinate(spec: Spec, kept: Kept) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.DEBUG)
    # The task's library in this setting is Python code: any file has a digest.
    launch.intercept_library = lambda: Path(__file__)
    # What comes when the program runs already.
    if seconds := os.environ.get("FAKE_LATE_START"):
        supervisor.lift_limits = lambda: time.sleep(float(seconds))
    # A helper thread that fails as none should.
    if reason := os.environ.get("FAKE_FAILING_THREAD"):
        Supervisor._load = lambda self: exec(f"raise RuntimeError({reason!r})")
    ghost = Path(__file__).with_name("ghost.py")
    Supervisor(spec, kept, [sys.executable, "-P", str(ghost)]).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
