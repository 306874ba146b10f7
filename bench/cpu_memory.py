"""Whose the CPU memory in an image is: the driver's, FlowGPU's, or all else, the program's own.

By what was mapped where the pages lie: libraries by the names of their files, FlowGPU's handles by
their address. What the driver or FlowGPU had from malloc lies among the program's and is counted as
that. `python -m bench.cpu_memory IMAGE` prints MiB of each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flowgpu.host import criu_images
from flowgpu.host.criu_images import SavedMapping

DRIVER = ("libcuda.so", "libcudadebugger", "libnvidia-")
FLOWGPU = ("/intercept/libcuda.so", "/libflowgpu_")
HANDLES = range(0x1F00_0000_0000, 0x1F00_0400_0000)  # native/intercept/replay/handles.h
LEFT_OUT = "/memfd:flowgpu"


def owner(path: str, start: int) -> str:
    """`driver`, `flowgpu` or `program`."""
    if start in HANDLES or path.startswith(LEFT_OUT) or any(name in path for name in FLOWGPU):
        return "flowgpu"
    return "driver" if Path(path).name.startswith(DRIVER) else "program"


def by_owner(mappings: Iterable[SavedMapping]) -> Counter[str]:
    """Bytes of each owner. Memory right behind a file's is the file's too: its zeroed variables."""
    found: Counter[str] = Counter()
    end, path = 0, ""
    for one in mappings:
        path = one.path or (path if one.start == end else "")
        end = one.end
        found[owner(path, one.start)] += one.bytes
    return found


def of_image(image: Path) -> dict[str, int]:
    """Bytes of each owner in an image that has all its pages itself."""
    folder, found = image / "criu", Counter[str]()
    for pid in criu_images.living_pids(folder):
        found += by_owner(criu_images.saved_mappings(folder, pid))
    return dict(found)


if __name__ == "__main__":
    for name, size in of_image(Path(sys.argv[1])).items():
        print(f"{name:8} {size / (1 << 20):10.1f}")
