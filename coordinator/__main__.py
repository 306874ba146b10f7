"""Entry of a job's keeper and coordinator: ``python -m coordinator --spec-fd N``.

N has a flowgpu.launch.Spec as JSON. Standard error is coordinator.log of the job; users see nothing
of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator import first_ids
from coordinator.descriptors import make_table
from coordinator.keeper import Kept, keep

if TYPE_CHECKING:
    from coordinator.ghost_client import Ghost


def early_ghost(fields: dict[str, object]) -> Ghost | None:
    """The ghost of a restore, which waits for it longest; None where it will need none."""
    gpus, env = fields["gpus"], fields["ghost_env"]
    if not isinstance(gpus, list) or not isinstance(env, dict) or not gpus:
        return None
    from coordinator.ghost_client import COMMAND, Ghost, GhostGone

    with contextlib.suppress(GhostGone):  # the restore tries again, and says why it failed
        return Ghost(env, (*COMMAND, "--contexts", ",".join(gpus)))
    return None


def main() -> int:
    """Keep one job."""
    parser = argparse.ArgumentParser(prog="coordinator")
    parser.add_argument("--spec-fd", type=int, required=True)
    arguments = parser.parse_args()
    with os.fdopen(arguments.spec_fd, "rb") as source:
        text = source.read()
    spec = json.loads(text)
    for fd in spec["descriptors"]:
        os.set_inheritable(fd, False)  # the program alone is to have them
    if spec["kind"] == "restore":
        from coordinator.terminals import free_numbers

        free_numbers(Path(spec["image"]))
    return keep(lambda kept: coordinate(text, kept), spec["job_dir"], spec["descriptors"])


def coordinate(text: bytes, kept: Kept) -> int:
    """Run the job from its start, or from where another coordinator has left it, to its end."""
    make_table()
    ghost = None if kept.writers is None else early_ghost(json.loads(text))
    # Only now: what all this needs takes Python some tenths of a second to load.
    import logging

    from coordinator.supervisor import Supervisor
    from flowgpu.launch import Spec

    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    spec = Spec.from_json(text)
    if kept.writers is not None and spec.kind == "run":
        first_ids.leave()
    # One thread that computes must not keep those waiting that only pass messages on.
    sys.setswitchinterval(0.0005)
    kind = Supervisor
    if spec.kind == "container":
        from coordinator.container import ContainerSupervisor as kind
    kind(spec, kept, ghost=ghost).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
