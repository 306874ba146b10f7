"""A program that holds one of everything on the device, for checkpoints from outside.

    python -m tests.emu.checkpoint_task FOLDER [shared] [busy]

It makes its state, writes `FOLDER/ready`, and for each file `FOLDER/go.N` (N = 1, 2, ...) does one
round with its old handles, checks what it sees and writes `FOLDER/done.N`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_cases_capture import RELAXED
from tests.emu.driver_cases_graphs import (
    add_fill,
    add_kernel,
    edges_of,
    fill_params,
    inc_params,
    nodes_of,
    run,
)
from tests.emu.driver_lib import (
    GRANULE,
    MIB,
    PTX,
    allow,
    download,
    fd_kind,
    function,
    launch_inc,
    ok,
    properties,
    start,
)

WINDOW = 0x6000_0000_0000


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.005)


class Graphs:
    """A graph with a child graph, its executable, and a captured one's, whose graph is gone."""

    def __init__(self, inc: Any, data: int) -> None:
        self.inc, self.data, self.launches = inc, data, 0
        self.stream = ok(cu.cuStreamCreate(1))
        child, self.graph = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
        add_kernel(child, [], inc_params(inc, data, 8))
        self.fill = add_fill(self.graph, [], fill_params(data, 10, 8))
        self.off = add_fill(self.graph, [self.fill], fill_params(data, 99, 8))
        self.child = ok(cu.cuGraphAddChildGraphNode(self.graph, [self.off], 1, child))
        self.made = ok(cu.cuGraphInstantiate(self.graph, 0))
        ok(cu.cuGraphNodeSetEnabled(self.made, self.off, 0))
        ok(cu.cuStreamBeginCapture(self.stream, RELAXED))
        for _ in range(2):
            ok(launch_inc(inc, data, 4, self.stream))
        captured = ok(cu.cuStreamEndCapture(self.stream))
        self.captured = ok(cu.cuGraphInstantiate(captured, 0))
        ok(cu.cuGraphDestroy(captured))

    def round(self, number: int) -> None:
        context = ok(cu.cuCtxGetCurrent())
        ok(
            cu.cuGraphExecMemsetNodeSetParams(
                self.made, self.fill, fill_params(self.data, 10 * number, 8), context
            )
        )
        ok(cu.cuGraphLaunch(self.made, self.stream))
        run(self.captured, self.stream)
        assert list(download(self.data, 8)) == [10 * number + 3] * 4 + [10 * number + 1] * 4
        # The graph is as it was: nothing is disabled in it, and its fill is another.
        embedded = ok(cu.cuGraphChildGraphNodeGetGraph(self.child))
        assert len(nodes_of(embedded)) == 1 and len(edges_of(self.graph)) == 2
        again = ok(cu.cuGraphInstantiate(self.graph, 0))
        run(again, self.stream)
        assert list(download(self.data, 8)) == [100] * 8
        ok(cu.cuGraphExecDestroy(again))


class Task:
    def __init__(self, shared: bool) -> None:
        self.context = start()
        self.module = ok(cu.cuModuleLoadData(PTX))
        self.inc = ok(cu.cuModuleGetFunction(self.module, b"inc"))
        self.bump = ok(cu.cuModuleGetFunction(self.module, b"bump"))
        self.counter = int(ok(cu.cuModuleGetGlobal(self.module, b"counter"))[0])
        self.library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
        self.kernel = ok(cu.cuLibraryGetKernel(self.library, b"inc"))
        self.stream = ok(cu.cuStreamCreateWithPriority(1, -2))
        self.event = ok(cu.cuEventCreate(0))
        ok(cu.cuEventRecord(self.event, self.stream))
        ok(cu.cuEventSynchronize(self.event))
        self.small, self.large = (int(ok(cu.cuMemAlloc(size))) for size in (400, 5 * MIB))
        self.window = int(ok(cu.cuMemAddressReserve(64 * GRANULE, 0, WINDOW, 0)))
        self.handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
        ok(cu.cuMemMap(self.window, GRANULE, 0, self.handle, 0))
        ok(allow(self.window, GRANULE))
        self.pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))
        self.graphs = Graphs(self.inc, self.large + 2 * MIB)
        self.fd = (
            int(ok(cu.cuMemExportToShareableHandle(self.handle, fd_kind(), 0))) if shared else -1
        )
        self.addresses = (self.small, self.large, self.window)
        for address in self.addresses:
            ok(cu.cuMemsetD32(address, 100, 100))
        ok(cu.cuCtxSynchronize())

    def round(self, number: int) -> None:
        for address in self.addresses:
            ok(launch_inc(self.inc, address, 100, self.stream))
        ok(cu.cuStreamSynchronize(self.stream))
        ok(launch_inc(cu.CUfunction(int(self.kernel)), self.small, 100))
        ok(cu.cuLaunchKernel(self.bump, 1, 1, 1, 1, 1, 1, 0, self.stream, 0, 0))
        ok(cu.cuCtxSynchronize())
        assert (download(self.small, 100) == 100 + 2 * number).all()
        assert (download(self.large, 100) == 100 + number).all()
        assert (download(self.window, 100) == 100 + number).all()
        assert download(self.counter, 1)[0] == 5 + number
        assert int(ok(cu.cuCtxGetCurrent())) == int(self.context)
        assert ok(cu.cuStreamGetPriority(self.stream)) == -2
        end = ok(cu.cuEventCreate(0))
        ok(cu.cuEventRecord(end, self.stream))
        ok(cu.cuEventSynchronize(end))
        assert ok(cu.cuEventElapsedTime(self.event, end)) >= 0
        ctypes.memset(self.pinned, number, 4096)
        ok(cu.cuMemcpyHtoDAsync(self.large + MIB, self.pinned, 4096, self.stream))
        ok(cu.cuStreamSynchronize(self.stream))
        assert (download(self.large + MIB, 4096, np.uint8) == number).all()
        fresh = int(ok(cu.cuMemAlloc(400)))
        assert fresh not in self.addresses
        ok(cu.cuMemFree(fresh))
        again = ok(cu.cuModuleGetFunction(self.module, b"inc"))
        assert int(again) == int(self.inc)
        self.graphs.round(number)


def main() -> None:
    folder = Path(sys.argv[1])
    task = Task(shared="shared" in sys.argv)
    if "busy" in sys.argv:
        wait = function(b"wait_for")
        flag = int(ok(cu.cuMemAlloc(4)))
        ok(cu.cuMemsetD32(flag, 0, 1))
        ok(cu.cuCtxSynchronize())
        stream, helper = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        ok(cu.cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, stream, ((flag,), (ctypes.c_uint64,)), 0))

        def release() -> None:
            wait_for(folder / "release")
            ok(cu.cuCtxSetCurrent(task.context))
            ok(cu.cuMemsetD32Async(flag, 1, 1, helper))

        threading.Thread(target=release, daemon=True).start()
    (folder / "ready").touch()
    number = 0
    while True:
        number += 1
        wait_for(folder / f"go.{number}")
        task.round(number)
        (folder / f"done.{number}").touch()


if __name__ == "__main__":
    main()
