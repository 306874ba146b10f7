"""Every case of docs/reference/support.md on the real GPU of this machine: what becomes of each.

    python -m tests.gpu.support [--engine replay] [--gpu emulated] [--out FILE.json]

`python -m bench.summary FILE.json` keeps the outcomes; tools/supportlist.py puts them on the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import machine
from flowgpu.errors import FlowError
from tests.emu.support_lib import ENGINES, NOT_RUN, CaseFailed, Engine, show
from tests.emu.support_rows import CASES
from tests.gpu import shared
from tests.gpu.site import Site, Trouble
from tests.gpu.slots import seeing

GPU_NAME = """
from cuda.bindings import driver as cu
cu.cuInit(0)
print(cu.cuDeviceGetName(80, 0)[1].rstrip(b"\\0 ").decode())
"""


def outcome(site: Site, name: str, folder: Path, engine: Engine) -> tuple[str, str]:
    """What became of a case, and its refusal or what is wrong."""
    try:
        with seeing(site.kind, CASES[name].devices):
            return _shown(site, name, folder, engine)
    except pytest.skip.Exception as fewer:
        return NOT_RUN, str(fewer)


def _shown(site: Site, name: str, folder: Path, engine: Engine) -> tuple[str, str]:
    try:
        shown = show(site, folder, [name], engine)
    except (CaseFailed, FlowError, Trouble, OSError, subprocess.SubprocessError) as wrong:
        print(wrong, file=sys.stderr)
        return "**failed**", str(wrong).strip().rpartition("\n")[2][:200]
    return shown.outcome, shown.words


def _about(engine: Engine, gpu: str) -> dict[str, Any]:
    heading = machine.heading("support", machine.of_module("tests.gpu.support"))
    return heading | {"engine": engine, "gpu": gpu, "driver": heading["machine"]["driver"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.gpu.support")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, tuple[str, str]] = {}
    with Site(options.gpu) as site, tempfile.TemporaryDirectory(prefix="support-") as folder:
        words = [sys.executable, "-c", GPU_NAME]
        name_of_gpu = subprocess.check_output(words, env=site.plain_environment, text=True).strip()
        about = _about(options.engine, name_of_gpu)
        for name in options.cases:
            place = Path(folder) / name
            place.mkdir()
            with shared.gpu() if site.kind == "nvidia" else nullcontext():
                found[name] = outcome(site, name, place, options.engine)
            print(name, *found[name], flush=True)
            if options.out:  # after each, since a run may be cut off
                options.out.write_text(json.dumps(about | {"outcomes": found}, indent=1) + "\n")
    return 1 if any(what == "**failed**" for what, _ in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
