"""Kinds of memory and objects that the emulated GPU lacks, or has in part, for a real one."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.array_lib import SURFACE as STORED
from tests.emu.array_lib import filled, of_array
from tests.emu.cuda_source import PACKAGES, compile_cuda
from tests.emu.driver_cases_managed import (
    MANAGED,
    VARIABLE,
    accessed_by,
    advise,
    from_pool,
    location,
    managed,
    managed_pool,
    told,
    words,
)
from tests.emu.driver_lib import (
    MIB,
    download,
    function,
    launch,
    launch_inc,
    libcuda,
    ok,
    pool_properties,
    properties,
    start,
)
from tests.emu.support_lib import CASES, Say, case

__all__ = ["CASES"]

LAST = 68_000_000 - 4
BUMP_LARGE = (
    b".visible .global .attribute(.managed) .align 4 .u32 large[17000000];\n"
    b".visible .entry bump_large() { .reg .b32 %r<3>; ld.global.u32 %r1, [large+LAST];\n"
    b"add.u32 %r2, %r1, 1; st.global.u32 [large+LAST], %r2; ret; }\0"
)
LARGE = VARIABLE.rstrip(b"\0") + BUMP_LARGE.replace(b"LAST", b"%d" % LAST)
COUNT = 256  # what four blocks of driver_lib.launch do at once


def kernel(source: str, name: str) -> Any:
    return function(name.encode(), compile_cuda(source).encode() + b"\0")


def zeros(size: int = 4 * COUNT) -> int:
    address = int(ok(cu.cuMemAlloc(size)))
    ok(cu.cuMemsetD8(address, 0, size))
    ok(cu.cuCtxSynchronize())
    return address


def pointers(*values: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    return values, (ctypes.c_uint64,) * len(values)


@case("managed memory", native_unsaved="cuMemAllocManaged")
def managed_memory(say: Say) -> Iterator[None]:
    start()
    attach = cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    data = int(ok(cu.cuMemAllocManaged(4 * COUNT, attach)))
    host = np.ctypeslib.as_array((ctypes.c_uint32 * COUNT).from_address(data))
    host[:] = 5
    inc = function(b"inc")
    ok(launch_inc(inc, data, COUNT))
    ok(cu.cuCtxSynchronize())
    yield
    ok(launch_inc(inc, data, COUNT))
    ok(cu.cuCtxSynchronize())
    say(host[[0, -1]])


@case("managed pools (`cuMemPoolCreate`)", native_unsaved="cuMemAllocManaged")
def managed_pools(say: Say) -> Iterator[None]:
    start()
    stream, inc = ok(cu.cuStreamCreate(1)), function(b"inc")
    pools = [managed_pool(), ok(cu.cuMemGetDefaultMemPool(location("HOST"), MANAGED))]
    blocks = [from_pool(pool, size, stream) for pool in pools for size in (4 * COUNT, 40 << 20)]
    gone = from_pool(pools[0], 4 * COUNT, stream)

    def step() -> None:
        ok(cu.cuStreamSynchronize(stream))
        for block in blocks:
            words(block, COUNT)[:] += 10
            ok(launch_inc(inc, block, COUNT, stream))
        ok(cu.cuStreamSynchronize(stream))

    step()
    ok(cu.cuMemFreeAsync(gone, stream))
    yield
    step()
    owner = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    owners = [int(ok(cu.cuPointerGetAttribute(owner, block))) for block in blocks]
    say(
        [words(block, 2).tolist() for block in blocks],
        owners == [int(pools[at // 2]) for at in range(4)],
    )
    more = from_pool(pools[0], 8192, stream)
    for block in (*blocks, more):
        ok(cu.cuMemFreeAsync(block, stream))
    ok(cu.cuStreamSynchronize(stream))
    say([int(ok(cu.cuMemPoolGetAttribute(pool, used))) for pool in pools])
    ok(cu.cuMemPoolDestroy(pools[0]))


@case("managed variables (`__managed__`)", native_unsaved="managed variables of a module")
def managed_variables(say: Say) -> Iterator[None]:
    """One is large."""
    start()
    library = ok(cu.cuLibraryLoadData(LARGE, [], [], 0, [], [], 0))
    module = ok(cu.cuModuleLoadData(VARIABLE))
    large = int(ok(cu.cuLibraryGetManaged(library, b"large"))[0])
    bump_large = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, b"bump_large"))))
    both = [
        words(int(ok(cu.cuLibraryGetManaged(library, b"both"))[0]), 2),
        words(int(ok(cu.cuModuleGetGlobal(module, b"both"))[0]), 2),
    ]
    bumps = [
        cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, b"bump_both")))),
        ok(cu.cuModuleGetFunction(module, b"bump_both")),
    ]

    def step() -> None:
        for seen, bump in zip(both, bumps, strict=True):
            seen[:] += 10
            ok(cu.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
            ok(cu.cuCtxSynchronize())

        words(large + LAST, 1)[:] += 3
        ok(cu.cuLaunchKernel(bump_large, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cu.cuCtxSynchronize())

    step()
    yield
    step()
    say(*both, words(large, 1), words(large + LAST, 1))


@case("hints for managed memory, and attachments", native_unsaved="cuMemAllocManaged")
def managed_hints(say: Say) -> Iterator[None]:
    start()
    size, small = 40 << 20, 12_288
    data, part, other = managed(size), managed(small), managed(small)
    stream = ok(cu.cuStreamCreate(1))

    def tell() -> None:
        for at, many in ((data, size), (data, 4 << 20), (part, small), (other, small)):
            names = ("READ_MOSTLY", "PREFERRED_LOCATION", "LAST_PREFETCH_LOCATION")
            say([told(name, at, many) for name in names], accessed_by(at, many))

    advise("SET_READ_MOSTLY", data, size)
    advise("SET_PREFERRED_LOCATION", data, 4 << 20)
    advise("SET_ACCESSED_BY", part, small)
    advise("SET_PREFERRED_LOCATION", part, small, location("HOST"))
    ok(cu.cuMemPrefetchAsync(data, 4 << 20, location("DEVICE"), 0, stream))
    ok(cu.cuMemPrefetchAsync(other, small, location("HOST"), 0, stream))
    for flags in (cu.CUmemAttach_flags.CU_MEM_ATTACH_SINGLE, 1):
        ok(cu.cuStreamAttachMemAsync(stream, part, 0, flags))
        ok(cu.cuStreamAttachMemAsync(stream, data, size, flags))
    ok(cu.cuStreamSynchronize(stream))
    tell()
    yield
    tell()
    advise("UNSET_READ_MOSTLY", data, size)
    ok(cu.cuMemFree(part))
    tell_again = managed(small)
    say(told("READ_MOSTLY", data, size), told("PREFERRED_LOCATION", tell_again, small))


@case("host memory mapped into the device", "round-trips", "not supported")
def mapped_host_memory(say: Say) -> Iterator[None]:
    start()
    host = int(ok(cu.cuMemHostAlloc(4 * COUNT, 2)))  # CU_MEMHOSTALLOC_DEVICEMAP
    data = int(ok(cu.cuMemHostGetDevicePointer(host, 0)))
    seen = np.ctypeslib.as_array((ctypes.c_uint32 * COUNT).from_address(host))
    seen[:] = 5
    inc = function(b"inc")
    ok(launch_inc(inc, data, COUNT))
    ok(cu.cuCtxSynchronize())
    yield
    say("pointer", int(ok(cu.cuMemHostGetDevicePointer(host, 0))) == data)
    ok(launch_inc(inc, data, COUNT))
    ok(cu.cuCtxSynchronize())
    say(seen[[0, -1]])


@case("pools of the program's own")
def own_pools(say: Say) -> Iterator[None]:
    start()
    pool, stream = ok(cu.cuMemPoolCreate(pool_properties())), ok(cu.cuStreamCreate(1))
    data = int(ok(cu.cuMemAllocFromPoolAsync(MIB, pool, stream)))
    ok(cu.cuMemsetD32Async(data, 9, MIB // 4, stream))
    ok(cu.cuStreamSynchronize(stream))
    yield
    say("contents", bool((download(data, MIB // 4) == 9).all()))
    more = int(ok(cu.cuMemAllocFromPoolAsync(MIB, pool, stream)))
    for address in (data, more):
        ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuMemPoolDestroy(pool))


HEAP = """
__device__ int* kept;
extern "C" __global__ void make() {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        kept = (int*)malloc(64 * sizeof(int));
        for (int i = 0; i < 64; i++) kept[i] = i;
    }
}
extern "C" __global__ void use(int* out) {
    if (blockIdx.x == 0) out[threadIdx.x] = kept[threadIdx.x]++;
}
"""


@case("the device's heap (`malloc` in a kernel)", "not supported", unsaved="the device's heap")
def device_heap(say: Say) -> Iterator[None]:
    start()
    module = ok(cu.cuModuleLoadData(compile_cuda(HEAP).encode() + b"\0"))
    make, use = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"make", b"use"))
    out = zeros()
    ok(launch(make, (), ()))
    ok(launch(use, *pointers(out)))
    ok(cu.cuCtxSynchronize())
    yield
    ok(launch(use, *pointers(out)))
    say(download(out, 64)[[0, -1]])


PRINT = """
extern "C" __device__ int printf(const char*, ...);
extern "C" __global__ void hello(int n) {
    if (blockIdx.x == 0 && threadIdx.x == 0) printf("kernel %d\\n", n);
}
"""


@case("`printf` in a kernel (the emulated GPU prints nothing)")
def device_printf(say: Say) -> Iterator[None]:
    start()
    hello = kernel(PRINT, "hello")

    def turn(number: int) -> None:
        ok(launch(hello, (number,), (ctypes.c_int,)))
        ok(cu.cuCtxSynchronize())
        ctypes.CDLL(None).fflush(None)

    turn(1)
    yield
    turn(2)
    say("printed")


def copy_to_array(array: Any, rows: Any) -> None:
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = rows.ctypes.data, rows.strides[0]
    copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY
    copy.dstArray = array
    copy.WidthInBytes, copy.Height = rows.strides[0], rows.shape[0]
    ok(cu.cuMemcpy2D(copy))


TEXTURE = """
extern "C" __global__ void sample(unsigned long long texture, float* out) {
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (blockIdx.x == 0) out[threadIdx.x] = tex2D<float>(texture, x + 0.5f, y + 0.5f);
}
"""
SURFACE = """
extern "C" __global__ void touch(unsigned long long surface, float* out) {
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (blockIdx.x) return;
    float value;
    surf2Dread(&value, surface, x * 4, y);
    out[threadIdx.x] = value;
    surf2Dwrite(value + 1.0f, surface, x * 4, y);
}
"""
ROWS = np.arange(64, dtype=np.float32).reshape(4, 16)


@case("arrays and texture objects")
def textures(say: Say) -> Iterator[None]:
    start()
    array = filled(ROWS[..., None])
    texture = ok(cu.cuTexObjectCreate(of_array(array), cu.CUDA_TEXTURE_DESC(), None))
    sample, out = kernel(TEXTURE, "sample"), zeros()

    def turn() -> None:
        ok(launch(sample, *pointers(int(texture), out)))
        say(download(out, 64, np.float32)[[0, 17, 63]])

    turn()
    yield
    turn()
    copy_to_array(array, ROWS + 100)
    turn()
    ok(cu.cuTexObjectDestroy(texture))
    ok(cu.cuArrayDestroy(array))


@case("surface objects")
def surfaces(say: Say) -> Iterator[None]:
    start()
    array = filled(ROWS[..., None], STORED)
    surface = ok(cu.cuSurfObjectCreate(of_array(array)))
    touch, out = kernel(SURFACE, "touch"), zeros()

    def turn() -> None:
        ok(launch(touch, *pointers(int(surface), out)))
        say(download(out, 64, np.float32)[[0, 17, 63]])

    turn()
    yield
    turn()


def inc_node(graph: Any, inc: Any, data: int, after: list[Any]) -> Any:
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = inc
    params.gridDimX, params.gridDimY, params.gridDimZ = 4, 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = 64, 1, 1
    params.kernelParams = ((data, COUNT), (ctypes.c_uint64, ctypes.c_uint32))
    return ok(cu.cuGraphAddKernelNode(graph, after or None, len(after), params))


def launched(say: Say, made: Any, data: int, stream: Any) -> None:
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    say(download(data, COUNT)[[0, -1]])


@case("CUDA graphs, made node by node")
def explicit_graph(say: Say) -> Iterator[None]:
    start()
    graph, stream, inc, data = (
        ok(cu.cuGraphCreate(0)),
        ok(cu.cuStreamCreate(1)),
        function(b"inc"),
        zeros(),
    )
    first = inc_node(graph, inc, data, [])
    second = inc_node(graph, inc, data, [first])
    made = ok(cu.cuGraphInstantiate(graph, 0))
    launched(say, made, data, stream)
    yield
    launched(say, made, data, stream)
    inc_node(graph, inc, data, [second])
    launched(say, ok(cu.cuGraphInstantiate(graph, 0)), data, stream)
    ok(cu.cuGraphExecDestroy(made))
    ok(cu.cuGraphDestroy(graph))


def begin_capture(stream: Any) -> None:
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    ok(cu.cuStreamBeginCapture(stream, mode))


@case("CUDA graphs, captured")
def captured_graph(say: Say) -> Iterator[None]:
    start()
    stream, inc, data = ok(cu.cuStreamCreate(1)), function(b"inc"), zeros()
    begin_capture(stream)
    for _ in range(3):
        ok(launch_inc(inc, data, COUNT, stream))
    made = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
    launched(say, made, data, stream)
    yield
    launched(say, made, data, stream)


@case("CUDA graphs with memory nodes", "not supported", unsaved="with a node of memory")
def graph_with_memory(say: Say) -> Iterator[None]:
    start()
    stream, inc, data = ok(cu.cuStreamCreate(1)), function(b"inc"), zeros()
    begin_capture(stream)
    try:
        own = int(ok(cu.cuMemAllocAsync(4 * COUNT, stream)))
        ok(cu.cuMemcpyDtoDAsync(own, data, 4 * COUNT, stream))
        ok(launch_inc(inc, own, COUNT, stream))
        ok(cu.cuMemcpyDtoDAsync(data, own, 4 * COUNT, stream))
        ok(cu.cuMemFreeAsync(own, stream))
    finally:  # a capture that is left open holds up the cases that follow
        graph = cu.cuStreamEndCapture(stream)
    made = ok(cu.cuGraphInstantiate(ok(graph), 0))
    launched(say, made, data, stream)
    yield
    launched(say, made, data, stream)


@case("CUDA graphs with a condition", "not supported", unsaved="cuGraphConditionalHandleCreate")
def conditional_graph(say: Say) -> Iterator[None]:
    context = start()
    graph, stream, inc, data = (
        ok(cu.cuGraphCreate(0)),
        ok(cu.cuStreamCreate(1)),
        function(b"inc"),
        zeros(),
    )
    always = ok(
        cu.cuGraphConditionalHandleCreate(graph, context, 1, 1)
    )  # the default at each launch
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = always
    params.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 1
    params.conditional.ctx = context
    ok(cu.cuGraphAddNode(graph, None, None, 0, params))
    inc_node(params.conditional.phGraph_out[0], inc, data, [])
    made = ok(cu.cuGraphInstantiate(graph, 0))
    launched(say, made, data, stream)
    yield
    launched(say, made, data, stream)


@case(
    "CUDA graphs that the device may launch, launched by the host",
    unsaved="that the device may launch",
)
def graph_for_the_device(say: Say) -> Iterator[None]:
    start()
    graph, stream, inc, data = (
        ok(cu.cuGraphCreate(0)),
        ok(cu.cuStreamCreate(1)),
        function(b"inc"),
        zeros(),
    )
    inc_node(graph, inc, data, [])
    flag = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
    made = ok(cu.cuGraphInstantiate(graph, int(flag)))
    ok(cu.cuGraphUpload(made, stream))
    launched(say, made, data, stream)
    yield
    launched(say, made, data, stream)


STARTS = """
#include <cuda_device_runtime_api.h>
extern "C" __global__ void starts(cudaGraphExec_t graph) {
    cudaGraphLaunch(graph, cudaStreamGraphFireAndForget);
}
"""


def device_runtime() -> Path:
    """libcudadevrt.a of the toolkit or of NVIDIA's package for Python."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [toolkit / "lib64", *(package / "lib" for package in PACKAGES)]
    found = [folder / "libcudadevrt.a" for folder in folders]
    return next((path for path in found if path.exists()), found[0])


@case("CUDA graphs launched by a kernel", "not supported", unsaved="that the device may launch")
def graph_by_kernel(say: Say) -> Iterator[None]:
    start()
    kinds = cu.CUjitInputType
    ptx = compile_cuda(STARTS, ("--relocatable-device-code=true",)).encode() + b"\0"
    state = ok(cu.cuLinkCreate(0, [], []))
    library = str(device_runtime()).encode()
    ok(cu.cuLinkAddData(state, kinds.CU_JIT_INPUT_PTX, ptx, len(ptx), b"starts", 0, [], []))
    ok(cu.cuLinkAddFile(state, kinds.CU_JIT_INPUT_LIBRARY, library, 0, [], []))
    image, _ = ok(cu.cuLinkComplete(state))
    starts = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(image)), b"starts"))
    ok(cu.cuLinkDestroy(state))
    stream, inc, data = ok(cu.cuStreamCreate(1)), function(b"inc"), zeros()
    graph = ok(cu.cuGraphCreate(0))
    inc_node(graph, inc, data, [])
    flag = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
    started = ok(cu.cuGraphInstantiate(graph, int(flag)))
    ok(cu.cuGraphUpload(started, stream))
    begin_capture(stream)
    given = ((int(started),), (ctypes.c_uint64,))
    ok(cu.cuLaunchKernel(starts, 1, 1, 1, 1, 1, 1, 0, stream, given, 0))
    made = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
    launched(say, made, data, stream)
    yield
    launched(say, made, data, stream)


@case("green contexts", "not supported", unsaved="cuGreenCtxCreate")
def green_context(say: Say) -> Iterator[None]:
    start()
    kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    multiprocessors = ok(cu.cuDeviceGetDevResource(0, kind))
    groups, _, _ = ok(cu.cuDevSmResourceSplitByCount(1, multiprocessors, 0, 8))
    about = ok(cu.cuDevResourceGenerateDesc([groups[0]], 1))
    flag = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = ok(cu.cuGreenCtxCreate(about, 0, flag))
    stream = ok(cu.cuGreenCtxStreamCreate(green, 1, 0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuCtxFromGreenCtx(green))))
    inc, data = function(b"inc"), zeros()

    def turn() -> None:
        ok(launch_inc(inc, data, COUNT, stream))
        ok(cu.cuStreamSynchronize(stream))
        say(download(data, COUNT)[[0, -1]])

    turn()
    yield
    turn()
    ok(cu.cuGreenCtxDestroy(green))


@case("IPC handles of events")
def ipc_events(say: Say) -> Iterator[None]:
    start()
    event = ok(cu.cuEventCreate(2 | 4))  # without timing, for other processes
    ok(cu.cuIpcGetEventHandle(event))
    yield
    ok(cu.cuEventRecord(event, 0))
    ok(cu.cuEventSynchronize(event))
    say("done", cu.cuEventQuery(event)[0].name)


@case(
    "memory shared through a pool's handle",
    "not supported",
    refusal="cuMemPoolExportToShareableHandle",
)
def exported_pool(say: Say) -> Iterator[None]:
    start()
    props = pool_properties()
    props.handleTypes = properties().requestedHandleTypes
    pool, stream = ok(cu.cuMemPoolCreate(props)), ok(cu.cuStreamCreate(1))
    ok(cu.cuMemPoolExportToShareableHandle(pool, props.handleTypes, 0))
    yield
    data = int(ok(cu.cuMemAllocFromPoolAsync(MIB, pool, stream)))
    ok(cu.cuMemFreeAsync(data, stream))
    say("done", libcuda().cuStreamSynchronize(ctypes.c_void_p(int(stream))))


def library_of_driver(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError:
        ok((cu.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
        raise


@case("NVML in the process", "not supported")
def nvml(say: Say) -> Iterator[None]:
    start()
    library = library_of_driver("libnvidia-ml.so.1")
    device, used = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()

    def ask() -> int:
        return int(library.nvmlDeviceGetMemoryInfo(device, used))

    say(library.nvmlInit_v2(), library.nvmlInit_v2())
    say(library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)), ask())
    failed, ends = set[int](), threading.Event()

    def poll() -> None:
        while not ends.is_set():
            failed.add(ask())

    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    yield
    say(ask())
    ends.set()
    poller.join()
    say("polled", sorted(failed), *(library.nvmlShutdown() for _ in range(3)))


@case("the hardware's decoders of video and JPEG", "not supported", refusal="libnvcuvid")
def decoders(say: Say) -> Iterator[None]:
    start()
    library = library_of_driver("libnvcuvid.so.1")
    yield
    say("done", library is not None)
