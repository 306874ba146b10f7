"""Every case of docs/support.md on the real GPU of this machine: what becomes of each.

    python -m tests.gpu.support [--engine replay] [--gpu emulated] [--out FILE.json]

tools/supportlist.py puts the newest bench/results/*-support.json of each engine on the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import machine
from flowgpu.errors import FlowError
from tests.emu.support_lib import ENGINES, Engine, Failure, show
from tests.emu.support_rows import CASES
from tests.gpu import shared
from tests.gpu.site import Site, Trouble

GPU_NAME = """
from cuda.bindings import driver as cu
cu.cuInit(0)
print(cu.cuDeviceGetName(80, 0)[1].rstrip(b"\\0 ").decode())
"""


def gpus() -> int:
    """GPUs of this machine that have a device file."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def outcome(site: Site, name: str, folder: Path, engine: Engine) -> tuple[str, str]:
    """What became of a case, and its refusal or what is wrong."""
    if site.kind == "nvidia" and CASES[name].devices > gpus():
        return "not run", "one GPU"
    try:
        shown = show(site, folder, [name], engine)
    except (Failure, FlowError, Trouble, OSError, subprocess.SubprocessError) as wrong:
        print(wrong, file=sys.stderr)
        return "**failed**", str(wrong).strip().rpartition("\n")[2][:200]
    return shown.outcome, shown.words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.gpu.support")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with Site(options.gpu) as site, tempfile.TemporaryDirectory(prefix="support-") as folder:
        for name in options.cases:
            place = Path(folder) / name
            place.mkdir()
            with shared.gpu() if site.kind == "nvidia" else nullcontext():
                found[name] = outcome(site, name, place, options.engine)
            print(name, *found[name], flush=True)
        words = [sys.executable, "-c", GPU_NAME]
        name_of_gpu = subprocess.check_output(words, env=site.plain_environment, text=True).strip()
    if options.out:
        facts = machine.facts()
        document = {
            "kind": "support",
            "engine": options.engine,
            "date": datetime.now(UTC).date().isoformat(),
            "gpu": name_of_gpu,
            "driver": facts["driver"],
            "command": " ".join(["python -m tests.gpu.support", *sys.argv[1:]]),
            "commit": machine.commit(),
            "machine": facts,
            "outcomes": found,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(what == "**failed**" for what, _ in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
