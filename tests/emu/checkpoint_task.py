"""A program that holds one of everything on the device, for checkpoints from outside.

    python -m tests.emu.checkpoint_task FOLDER [shared] [calls] [busy [destroyed]]

It makes its state, writes `FOLDER/ready`, and for each file `FOLDER/go.N` (N = 1, 2, ...) does one
round with its old handles, checks what it sees and writes `FOLDER/done.N`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.array_lib import (
    F32,
    SURFACE,
    content,
    filled,
    of_array,
    of_host,
    of_mipmap,
    shape,
    solid,
    surface,
    texture,
    told,
)
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
    launch_wait,
    ok,
    properties,
    start,
)
from tests.emu.program_lib import HEAD
from tests.emu.rewind_lib import call_host
from tests.patience import SECONDS

WINDOW = 0x6000_0000_0000


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
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


# out[0] = an element of a texture and one of a mipmapped one; an element of the surface grows by 1.
SEEN = (
    HEAD
    + """
.visible .entry seen(.param .u64 texture, .param .u64 level, .param .u64 surface, .param .u64 out) {
    .reg .b64 %rd<5>; .reg .f32 %f<10>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [texture]; ld.param.u64 %rd2, [level]; ld.param.u64 %rd3, [surface];
    ld.param.u64 %rd4, [out];
    mov.f32 %f1, 0f40200000; mov.u32 %r1, 8;
    tex.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd1, {%f1, %f1}];
    tex.2d.v4.f32.f32 {%f6, %f7, %f8, %f9}, [%rd2, {%f1, %f1}];
    st.global.v2.f32 [%rd4], {%f2, %f6};
    suld.b.2d.b32.trap {%r2}, [%rd3, {%r1, %r1}];
    add.u32 %r2, %r2, 1;
    sust.b.2d.b32.trap [%rd3, {%r1, %r1}], {%r2};
    ret;
}
"""
).encode() + b"\0"


class Arrays:
    """Arrays, levels of a mipmapped one, a texture of each and a surface, and a graph's copy."""

    def __init__(self) -> None:
        rows = np.arange(256, dtype=np.float32).reshape(16, 16, 1)
        self.array, self.written = filled(rows), filled(rows.astype(np.uint32), SURFACE)
        self.mipmap = ok(cu.cuMipmappedArrayCreate(shape(16, 16), 3))
        self.levels = [ok(cu.cuMipmappedArrayGetLevel(self.mipmap, i)) for i in range(3)]
        for level, array in enumerate(self.levels):
            width = 64 >> level
            data = np.full((1, width // 4, width), level + 1, np.uint8)
            ok(cu.cuMemcpy3D(of_host(array, data)))
        flat = ok(cu.cuMipmappedArrayCreate(shape(16, 16), 1))
        ones = np.ones((1, 16, 64), np.uint8)
        ok(cu.cuMemcpy3D(of_host(ok(cu.cuMipmappedArrayGetLevel(flat, 0)), ones)))
        gone = texture(of_array(self.array))
        self.numbers = (
            texture(of_array(self.array)),
            texture(of_mipmap(flat)),
            surface(of_array(self.written)),
        )
        ok(cu.cuTexObjectDestroy(gone))
        self.free, self.last = gone, max(self.numbers)
        self.seen = function(b"seen", SEEN)
        self.out = int(ok(cu.cuMemAlloc(1024)))
        graph, self.stream = ok(cu.cuGraphCreate(0)), ok(cu.cuStreamCreate(1))
        copy = solid(self.array, self.out, (64, 16, 1), back=True)
        ok(cu.cuGraphAddMemcpyNode(graph, None, 0, copy, ok(cu.cuCtxGetCurrent())))
        self.copies = ok(cu.cuGraphInstantiate(graph, 0))

    def round(self, number: int) -> None:
        values = (*self.numbers, self.out)
        types = (ctypes.c_uint64,) * 4
        ok(cu.cuLaunchKernel(self.seen, 1, 1, 1, 1, 1, 1, 0, 0, (values, types), 0))
        ones = np.frombuffer(b"\1\1\1\1", np.float32)[0]
        assert list(download(self.out, 2, np.float32)) == [34, ones]
        assert content(self.written).view(np.uint32)[0, 8, 2] == 130 + number
        run(self.copies, self.stream)
        assert (download(self.out, 256, np.float32) == np.arange(256)).all()
        for level, array in enumerate(self.levels):
            again = ok(cu.cuMipmappedArrayGetLevel(self.mipmap, level))
            assert int(again) == int(array)
            assert told(array) == (16 >> level, 16 >> level, 0, F32, 1, 0)
            assert (content(array) == level + 1).all()
        found = ok(cu.cuTexObjectGetResourceDesc(self.numbers[0]))
        assert int(found.res.array.hArray) == int(self.array)
        ok(cu.cuCtxSynchronize())  # after which what was destroyed is free
        fresh = [texture(of_array(self.array)) for _ in range(2)]
        assert not set(fresh) & set(self.numbers), (fresh, self.numbers)
        # The free number is given, then the one behind all; but a real driver takes some for its
        # own copies of arrays, and of one that was made anew they may be others.
        if "FLOWGPU_EMU_SOCKET" in os.environ and "FLOWGPU_REPLAY" not in os.environ:
            assert fresh == [self.free, self.last + 1], fresh
        for one in fresh:
            ok(cu.cuTexObjectDestroy(one))


POLICY = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY


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
        value = cu.CUstreamAttrValue()
        value.syncPolicy = cu.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
        ok(cu.cuStreamSetAttribute(self.stream, POLICY, value))
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
        self.arrays = Arrays()
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
        policy = ok(cu.cuStreamGetAttribute(self.stream, POLICY)).syncPolicy
        assert policy == cu.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
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
        self.arrays.round(number)


def main() -> None:
    folder = Path(sys.argv[1])
    task = Task(shared="shared" in sys.argv)
    if "calls" in sys.argv:
        call_host(task.stream)
    if "busy" in sys.argv:
        wait = function(b"wait_for")
        flag = int(ok(cu.cuMemAlloc(4)))
        ok(cu.cuMemsetD32(flag, 0, 1))
        ok(cu.cuCtxSynchronize())
        stream, helper = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        ok(launch_wait(wait, flag, stream))
        if "destroyed" in sys.argv:
            ok(cu.cuStreamDestroy(stream))

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
