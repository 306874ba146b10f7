"""Entry of the coordinator: ``python -m coordinator --spec-fd N``.

N has a flowgpu.launch.Spec as JSON. Standard error is coordinator.log of the job; users see nothing
of it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from coordinator.supervisor import Supervisor
from flowgpu.launch import Spec


def main() -> int:
    """Run one job to its end."""
    parser = argparse.ArgumentParser(prog="coordinator")
    parser.add_argument("--spec-fd", type=int, required=True)
    arguments = parser.parse_args()
    with os.fdopen(arguments.spec_fd, "rb") as source:
        spec = Spec.from_json(source.read())
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # One thread that computes must not keep those waiting that only pass messages on.
    sys.setswitchinterval(0.0005)
    Supervisor(spec).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
